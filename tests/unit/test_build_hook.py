"""Wheels and editable installs with a C compiler, without one, and with one that fails (`hatch_build.py`)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from lastgasp._version import __version__

ROOT = Path(__file__).parents[2]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
LIBRARIES = [f"lastgasp/pytorch/_copies{SUFFIX}", f"lastgasp/steps/_ring{SUFFIX}"]
SOURCES = ["lastgasp/pytorch/_copies.c", "lastgasp/steps/_ring.c"]
USE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
sys.path.insert(0, sys.argv[1])
from lastgasp.steps import ringfile
from lastgasp.steps.marks import Marks
from pathlib import Path
ringfile.places = lambda: [Path(sys.argv[2])]
for _ in range(2):
    marks = Marks.open(rank=0, world_size=1)
    with marks.mark("forward"):
        pass
    assert marks.head == 1
    marks.close(remove=True)
print(type(marks.mark("forward")).__module__)
"""

pytestmark = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import hatchling"], capture_output=True, check=False).returncode != 0,
    reason="hatchling is not installed: pip install 'lastgasp[dev]'",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout without git, and without what was built in this one."""
    root = tmp_path / "tree"
    for folder in ("core", "plugins", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so", ".*")
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, root / name)
    return root


def build(tree: Path, target: str, **environ: str) -> tuple[Path, str]:
    """Build one target; returns the file and what was said."""
    out = tree.parent / "dist"
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)],
        cwd=tree, env={**os.environ, "CC": "", **environ}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built, done.stdout + done.stderr


def use(folder: Path, scratch: Path) -> list[str]:
    """What a process says that marks with the package in `folder`."""
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LASTGASP_PURE_PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(folder), str(scratch)],
        env=environ, cwd=scratch, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def unpacked(wheel: Path) -> Path:
    """A folder with its contents."""
    folder = wheel.parent.parent / "unpacked"
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def names(wheel: Path) -> list[str]:
    """Extensions in it."""
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so"))


def test_a_wheel_has_the_extension_and_says_for_what_it_was_built(tree: Path, tmp_path: Path) -> None:
    if not shutil.which(sysconfig.get_config_var("CC").split()[0]):
        pytest.skip("no C compiler")
    wheel, _ = build(tree, "wheel:standard")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-linux_" in wheel.name
    assert names(wheel) == LIBRARIES
    assert use(unpacked(wheel), tmp_path) == ["lastgasp.steps._ring"]
    assert list(tree.rglob("*.so")) == []


@pytest.mark.parametrize("kind", ["missing", "fails", "no header", "asked for"])
def test_a_wheel_without_it_is_for_any_machine_and_python_writes_the_marks(
    tree: Path, tmp_path: Path, kind: str
) -> None:
    environ = {
        "missing": {"CC": "/nonexistent/cc"},
        "fails": {"CC": "false"},
        "no header": {"CFLAGS": "-DPy_PYTHON_H -nostdinc"},
        "asked for": {"LASTGASP_PURE_PYTHON": "1"},
    }[kind]
    wheel, said = build(tree, "wheel:standard", **environ)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert names(wheel) == []
    assert said.count("step marks will be written by Python") == 1
    *told, module = use(unpacked(wheel), tmp_path)
    assert module == "lastgasp.steps.pyring"
    assert len(told) == 1
    assert told[0].startswith("INFO step marks are written by Python")


def test_where_the_compiler_of_python_s_own_build_is_not_here_cc_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreters that are downloaded ready (uv, conda) name the compiler of the machine that built them."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_config_var", {"CC": "their-clang -pthread"}.get)
    library = tmp_path / "o.so"
    assert hook.compile_extension(ROOT / "core/lastgasp/steps/_ring.c", library) == ""
    assert library.exists()


def test_an_editable_install_builds_beside_the_source_and_removes_what_does_not_fit_any_more(
    tree: Path, tmp_path: Path
) -> None:
    for library in LIBRARIES:
        (tree / "core" / library).write_bytes(b"of an older source")
    wheel, _ = build(tree, "wheel:editable", CC="false")
    assert list(tree.rglob("*.so*")) == []
    wheel.unlink()
    if not shutil.which(sysconfig.get_config_var("CC").split()[0]):
        pytest.skip("no C compiler")
    build(tree, "wheel:editable")
    assert sorted(str(path.relative_to(tree / "core")) for path in tree.rglob("*.so*")) == LIBRARIES
    assert use(tree / "core", tmp_path) == ["lastgasp.steps._ring"]


def top_level(wheel: Path) -> set[str]:
    """Files that it puts right into site-packages."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if "/" not in name}


def test_only_those_who_ask_for_it_get_the_hook_of_mindspore(tree: Path) -> None:
    wheel, _ = build(tree, "wheel:standard", CC="false")
    assert top_level(wheel) == set()
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "mindformers" in name]


@pytest.mark.parametrize("kind", ["standard", "editable"])
def test_the_plugin_brings_what_waits_for_mindspore(tree: Path, kind: str) -> None:
    wheel, _ = build(tree / "plugins/mindformers", f"wheel:{kind}")
    found = top_level(wheel)
    assert {"_lastgasp_boot.py", "_lastgasp_boot.pth"} <= found
    (paths,) = [name for name in found if name.startswith("_editable")] if kind == "editable" else [""]
    assert paths < "_lastgasp_boot.pth", "the way to the plugin is known before"
    if paths:
        assert "plugins/mindformers" in zipfile.ZipFile(wheel).read(paths).decode()


@pytest.mark.parametrize("kind", ["standard", "editable"])
def test_who_asks_for_it_gets_a_package_taskd(tree: Path, kind: str) -> None:
    wheel, _ = build(tree / "plugins/taskd", f"wheel:{kind}")
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
        paths = b"".join(archive.read(name) for name in found if name.endswith(".pth")).decode()
    if kind == "editable":
        assert paths.splitlines() == [str(tree / "plugins/taskd"), str(tree / "plugins/taskd/names")]
    else:
        assert {"taskd/api/taskd_worker_api.py", "taskd/served-by-lastgasp", "lastgasp_taskd/py.typed"} <= found


def test_the_plugin_has_the_version_of_the_core_and_asks_for_no_other() -> None:
    files = (ROOT / "plugins/mindformers/pyproject.toml", ROOT / "pyproject.toml")
    own, main = (tomllib.loads(file.read_text()) for file in files)
    assert own["project"]["version"] == __version__
    assert own["project"]["dependencies"] == [f"lastgasp=={__version__}"]
    assert f"lastgasp-mindformers=={__version__}" in main["project"]["optional-dependencies"]["mindformers"]


def test_type_checkers_see_our_annotations(tree: Path) -> None:
    wheel, _ = build(tree, "wheel:standard", CC="false")
    packages = ("lastgasp", "lastgasp_lightning", "lastgasp_megatron")
    assert {f"{package}/py.typed" for package in packages} <= set(zipfile.ZipFile(wheel).namelist())
    assert (tree / "plugins/mindformers/lastgasp_mindformers/py.typed").exists()


def test_a_source_distribution_has_the_source_and_the_hook_but_nothing_built(tree: Path, tmp_path: Path) -> None:
    for library in LIBRARIES:
        (tree / "core" / library).write_bytes(b"")
    archive, _ = build(tree, "sdist")
    shutil.unpack_archive(archive, tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert all((source / "core" / name).exists() for name in SOURCES)
    assert (source / "hatch_build.py").exists()
    assert list(source.rglob("*.so")) == []


@pytest.mark.parametrize("source", SOURCES)
def test_the_extensions_compile_without_a_warning(tmp_path: Path, source: str) -> None:
    compiler = shutil.which(sysconfig.get_config_var("CC").split()[0])
    if not compiler:
        pytest.skip("no C compiler")
    command = [
        compiler, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-c",
        f"-I{sysconfig.get_path('include')}", str(ROOT / "core" / source), "-o", str(tmp_path / "o"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
