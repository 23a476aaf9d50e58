"""The layout of docs/how-it-works.md §11 and the sizes of CONTRIBUTING.md, held by tests."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/public_names.txt"
FRAMEWORKS = ("torch", "lightning", "numpy", "mindspore", "megatron", "tensorflow", "sklearn", "matplotlib",
              "transformers", "accelerate")  # fmt: skip
SOURCES = sorted([*ROOT.glob("core/**/*.py"), *ROOT.glob("plugins/**/*.py")])
MODULE_LINES, FUNCTION_LINES, PARAMETERS, MANY_PARAMETERS = 450, 60, 8, 6
# 151 when this was written (click, rich and asyncio would each add dozens); the point is to notice a new one.
IMPORT_LIMIT = 200

Function = ast.FunctionDef | ast.AsyncFunctionDef


def frozen_names() -> dict[str, list[str]]:
    """The golden file: `module: name name ...`, one module a line."""
    lines = [line.partition(":") for line in GOLDEN.read_text().splitlines() if line and line[0] != "#"]
    return {module: names.split() for module, _, names in lines}


@pytest.mark.parametrize("module", sorted(frozen_names()))
def test_public_names_are_frozen(module: str) -> None:
    found = sorted(importlib.import_module(module).__all__)
    assert found == sorted(frozen_names()[module]), f"public names of {module} changed: is it meant? Edit {GOLDEN}"
    assert all(hasattr(importlib.import_module(module), name) for name in found)


def test_importing_lastgasp_loads_no_framework_and_little_else() -> None:
    code = "import json, sys, lastgasp; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    loaded = json.loads(done.stdout)
    assert [name for name in loaded if name.partition(".")[0] in FRAMEWORKS] == []
    assert len(loaded) < IMPORT_LIMIT


def test_the_command_line_loads_no_framework() -> None:
    code = "import json, sys, lastgasp.cli; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert [name for name in json.loads(done.stdout) if name.partition(".")[0] in FRAMEWORKS] == []


def test_sizes() -> None:
    wrong = []
    for path in SOURCES:
        text, where = path.read_text(), path.relative_to(ROOT)
        if text.count("\n") > MODULE_LINES:
            wrong.append(f"{where}: {text.count(chr(10))} lines, allowed {MODULE_LINES}")
        for function in _functions(ast.parse(text)):
            lines, count = (function.end_lineno or 0) - function.lineno + 1, len(_parameters(function))
            if lines > FUNCTION_LINES:
                wrong.append(f"{where}: {function.name}: {lines} lines, allowed {FUNCTION_LINES}")
            if count > PARAMETERS:
                wrong.append(f"{where}: {function.name}: {count} parameters, allowed {PARAMETERS}")
            elif count > MANY_PARAMETERS:
                warnings.warn(f"{where}: {function.name} has {count} parameters", stacklevel=1)
    assert wrong == []


def test_what_is_public_has_a_docstring() -> None:
    wrong = []
    for path in SOURCES:
        tree, where = ast.parse(path.read_text()), path.relative_to(ROOT)
        if path.stat().st_size and not ast.get_docstring(tree):
            wrong.append(f"{where}: the module has none")
        wrong += [f"{where}: {node.name}" for node in _public(tree) if not ast.get_docstring(node)]
    assert wrong == []


@pytest.mark.parametrize("folder", ["plugins", *(str(p.relative_to(ROOT)) for p in ROOT.glob("plugins/*/"))])
def test_plugin_folders_do_not_shadow_the_framework(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _parameters(function: Function) -> list[ast.arg]:
    """Those that count: not the options of a constructor, which are named at the call and may be left out."""
    options = {a.arg for a, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if default}
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    left_out = {"self", "cls"} | (options if function.name == "__init__" else set())
    return [a for a in given if a.arg not in left_out]


def _public(tree: ast.Module | ast.ClassDef) -> Iterator[Function | ast.ClassDef]:
    """Public classes and functions of the module, and public methods of its public classes.

    The methods of a class whose name begins with _ are not public; nor are overloads and setters.
    """
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            if not any("overload" in ast.unparse(d) or ".setter" in ast.unparse(d) for d in node.decorator_list):
                yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node)


def test_no_two_tests_modules_have_the_same_name() -> None:
    """pytest imports them by their names alone, and a complete run would not even begin."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
