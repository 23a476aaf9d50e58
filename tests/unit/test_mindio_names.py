"""The drop-in has all names of MindIO, with its parameters; and it never stands before the real package."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from enum import Enum, EnumMeta
from pathlib import Path
from types import ModuleType

import pytest

from lastgasp._version import __version__
from lastgasp.backends import choose_backend, is_drop_in

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins/mindio"
DROP_IN = PLUGIN / "lastgasp_mindio/dropin"
GOLDEN = ROOT / "tests/golden/mindio-names.json"
STAND_IN = ROOT / "tests/contract/ascend_standins/mindio_ttp"
MODULES = ("framework_ttp", "framework_ttp.ttp_decorator", "controller_ttp", "utils", "mindspore_api")


def module(name: str) -> ModuleType:
    """One of the drop-in's, under its full name: in this process nothing is called mindio_ttp."""
    return importlib.import_module(f"lastgasp_mindio.dropin.mindio_ttp.{name}")


def signature(value: object) -> object:
    """Parameters with their defaults; the members of an enumeration with their values."""
    if isinstance(value, EnumMeta):
        members: list[Enum] = list(value)
        return {member.name: member.value for member in members}
    assert callable(value)
    parameters = inspect.signature(value).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)


@pytest.mark.parametrize("name", MODULES)
def test_names_and_parameters_are_those_of_mindio(name: str) -> None:
    golden = json.loads(GOLDEN.read_text())[name]
    assert {one: signature(getattr(module(name), one)) for one in golden} == golden
    public = {one for one in vars(module(name)) if one.startswith(("tft_", "set_mindio", "get_mindio"))}
    assert public <= golden.keys()


def test_the_stand_in_of_the_contract_tests_has_the_same_parameters() -> None:
    """It was written from the same notes, by somebody else."""
    golden = json.loads(GOLDEN.read_text())
    compared = 0
    for name in ("framework_ttp", "controller_ttp", "utils"):
        for node in ast.parse((STAND_IN / f"{name}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("tft_"):
                ours = re.findall(r"(\w+)(?:=[^,]*)?(?:, |$)", golden[name][node.name])
                assert [argument.arg for argument in node.args.args] == ours
                compared += 1
    assert compared > 25


# -- beside the real one -----------------------------------------------------------------------------


def python(code: str, *paths: Path, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """A fresh Python that finds these first."""
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)


def real_one(folder: Path) -> Path:
    """A package of that name."""
    (folder / "mindio_ttp/framework_ttp").mkdir(parents=True)
    (folder / "mindio_ttp/__init__.py").write_text("real = True\n")
    return folder


@pytest.mark.parametrize("order", ["drop-in first", "boot"])
def test_beside_the_real_package_the_drop_in_refuses(tmp_path: Path, order: str) -> None:
    real = real_one(tmp_path)
    if order == "boot":
        done = python("import _lastgasp_mindio_boot, mindio_ttp", PLUGIN, real)
    else:
        done = python("import mindio_ttp", DROP_IN, PLUGIN, real)
    assert done.returncode == 1
    said = f"ImportError: lastgasp-mindio does not stand in for the mindio_ttp that is installed in {real}"
    assert done.stderr.splitlines()[-1].startswith(said)


def test_where_both_are_installed_the_choice_of_the_engine_names_both(tmp_path: Path) -> None:
    """Since neither can be imported; a folder that is no package is none."""
    (tmp_path / "none/mindio_ttp").mkdir(parents=True)
    code = "import _lastgasp_mindio_boot; from lastgasp import backends; print(backends.choose_backend().describe())"
    for places, both in ([tmp_path / "none"], False), ([tmp_path / "none", real_one(tmp_path / "site")], True):
        done = python(code, PLUGIN, *places)
        said = f"MindCluster's in {tmp_path / 'site/mindio_ttp'} and lastgasp-mindio's in {DROP_IN / 'mindio_ttp'}"
        assert (said in done.stdout) == both, done.stdout + done.stderr


def test_start_up_makes_the_drop_in_known_and_imports_nothing() -> None:
    code = (
        "import sys; before = {*sys.modules}; import _lastgasp_mindio_boot, importlib.util as u;"
        "print(u.find_spec('mindio_ttp').origin); print([m for m in {*sys.modules} - before if 'lastgasp' in m])"
    )
    done = python(code, PLUGIN)
    assert done.stdout.splitlines() == [str(DROP_IN / "mindio_ttp/__init__.py"), "['_lastgasp_mindio_boot']"]


@pytest.mark.parametrize("kind", ["standard", "editable"])
def test_an_installation_overwrites_nothing_and_is_found(tmp_path: Path, kind: str) -> None:
    """Nothing of the real package; start-up finds the drop-in, which an editable installation leaves where it is."""
    pytest.importorskip("hatchling")
    tree, site = tmp_path / "tree", tmp_path / "site"
    shutil.copytree(PLUGIN, tree, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", f"wheel:{kind}", "-d", str(tmp_path)]
    subprocess.run(command, cwd=tree, capture_output=True, timeout=200, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    tops = {path.name for path in site.iterdir()} - {f"lastgasp_mindio-{__version__}.dist-info"}
    own = "lastgasp_mindio" if kind == "standard" else "_editable_impl_lastgasp_mindio.pth"
    assert tops == {own, "_lastgasp_mindio_boot.py", "_lastgasp_mindio_boot.pth"}
    drop_in = (site if kind == "standard" else tree) / "lastgasp_mindio/dropin/mindio_ttp"
    inside = {drop_in.parents[1] / "py.typed", drop_in / "py.typed", drop_in / "served-by-lastgasp"}
    assert all(path.exists() for path in inside)
    code = "import site, sys, importlib.util as u; site.addsitedir(sys.argv[1]); "
    code += "print(u.find_spec('mindio_ttp').origin)"
    done = python(code, arguments=[str(site)])
    assert done.stdout.strip() == str(drop_in / "__init__.py"), done.stderr


def test_it_has_the_version_of_the_core() -> None:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert project["dependencies"] == [f"lastgasp[pytorch]=={__version__}"]


def test_the_drop_in_is_no_reason_to_take_mindio_for_the_backend() -> None:
    places = {"mindio_ttp": DROP_IN / "mindio_ttp", "torch_npu": Path("/site/torch_npu")}
    assert is_drop_in(places["mindio_ttp"])
    choice = choose_backend({"LASTGASP_BACKEND": "auto"}, places.get)
    assert choice.backend == "embedded"
    assert "its names on lastgasp (lastgasp-mindio)" in choice.describe()


def test_mindspore_mode_is_refused() -> None:
    code = "import os; os.environ['MINDIO_FOR_MINDSPORE'] = '1'; import mindio_ttp.framework_ttp"
    done = python(code, DROP_IN, PLUGIN)
    assert "no MindSpore mode (MINDIO_FOR_MINDSPORE): use lastgasp-mindformers" in done.stderr.splitlines()[-1]


def test_the_controllers_names_need_no_framework() -> None:
    code = "import sys, mindio_ttp.controller_ttp; print([m for m in ('torch', 'mindspore') if m in sys.modules])"
    assert python(code, DROP_IN, PLUGIN).stdout == "[]\n"


def test_it_is_built_on_the_public_seam() -> None:
    """As the import contracts have it for the plugins that are installed."""
    sources = [path.read_text() for path in PLUGIN.rglob("*.py")]
    imported = {name for text in sources for name in re.findall(r"^\s*(?:from|import) (lastgasp[\w.]*)", text, re.M)}
    assert imported, PLUGIN
    assert all(name.startswith(("lastgasp.adapter", "lastgasp_mindio")) for name in imported), imported
