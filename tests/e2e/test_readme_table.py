"""The table of docs/frameworks.md: each cell names a test that proves it, or says no."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = "| what you get | Lightning | Trainer | Megatron-LM | MindFormers, MindSpore | plain PyTorch | TensorFlow |"
WRITTEN = "you write"
"""The row that says what to write; all others are proven."""


def table() -> dict[str, list[str]]:
    """What one gets -> a cell for each framework."""
    lines = (ROOT / "docs/frameworks.md").read_text().splitlines()
    assert HEADER in lines, f"docs/frameworks.md has no table that begins with {HEADER}"
    rows = {}
    for line in lines[lines.index(HEADER) + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        rows[name] = cells
    return rows


def proofs(cell: str) -> list[tuple[str, bool]]:
    """The tests that a cell names, and whether they need make test-full."""
    return [(path, bool(star)) for path, star in re.findall(r"`(tests/[^`]+)`( \*)?", cell)]


def test_each_framework_has_a_cell_in_each_row() -> None:
    rows = table()
    assert len(rows) >= 7
    assert {len(cells) for cells in rows.values()} == {HEADER.count(" | ")}


def test_each_cell_is_proven_or_says_no() -> None:
    cells = [cell for name, row in table().items() if name != WRITTEN for cell in row]
    assert [cell for cell in cells if not proofs(cell) and not re.match(r"no\b", cell)] == []


def test_what_is_named_exists_and_runs_where_it_is_said_to() -> None:
    for path, full in {proof for row in table().values() for cell in row for proof in proofs(cell)}:
        file, _, name = path.partition("::")
        assert (ROOT / file).is_file(), path
        found = runs_in(ROOT / file)
        assert found, path
        if name:
            assert name in found, path
        # Without a star some test of it must run in make test; with one, none does.
        always = [function for function, only_full in found.items() if not only_full and name in ("", function)]
        assert bool(always) != full, path


def runs_in(file: Path) -> dict[str, bool]:
    """The tests of a module -> whether all their cases are marked full."""
    tree = ast.parse(file.read_text())
    everywhere = any(
        "mark.full" in ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
    marked = {f.name: "pytest.mark.full" in map(ast.unparse, f.decorator_list) for f in functions}
    return {name: everywhere or full for name, full in marked.items()}


@pytest.mark.parametrize("page", ["docs/plain-files.md", "docs/plain-loop.md", "tests/COVERAGE.md"])
def test_the_tests_that_pages_name_exist(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)", (ROOT / page).read_text())
    assert [path for path in named if not (ROOT / path).is_file()] == []
