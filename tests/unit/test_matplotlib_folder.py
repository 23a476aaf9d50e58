"""matplotlib gets a folder where it would make a temporary one in each process, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lastgasp.launch import matplotlib_folder
from lastgasp.launch.matplotlib_folder import VARIABLE, MatplotlibFolder

NOWHERE = "/dev/null/home"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user who has set nothing else."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (VARIABLE, "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_whoever_has_a_home_is_left_alone(home: Path) -> None:
    assert MatplotlibFolder().variables() == {}
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("name", ["HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"])
def test_it_is_made_once_and_removed(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, NOWHERE)
    folder = MatplotlibFolder()
    found = folder.variables()
    assert Path(found[VARIABLE]).is_dir()
    assert folder.variables(os.environ | found) == found
    (Path(found[VARIABLE]) / "fontlist.json").touch()
    folder.close()
    folder.close()
    assert not Path(found[VARIABLE]).exists()


def test_a_folder_of_the_users_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", NOWHERE)
    monkeypatch.setenv(VARIABLE, str(home))
    assert MatplotlibFolder().variables() == {}


def test_settings_of_the_user_are_not_hidden(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the other folder cannot be written: it is often a mount point's, of root."""
    monkeypatch.setenv("XDG_CACHE_HOME", NOWHERE)
    (home / ".config/matplotlib").mkdir(parents=True)
    (home / ".config/matplotlib/matplotlibrc").touch()
    assert MatplotlibFolder().variables() == {}


@pytest.mark.parametrize("place", [".config", ".cache"])
def test_a_folder_of_its_own_that_cannot_be_written(place: str, home: Path) -> None:
    (home / place).mkdir()
    (home / place / "matplotlib").touch()  # as root, tests may write everywhere else
    folder = MatplotlibFolder()
    assert VARIABLE in folder.variables()
    folder.close()


def test_a_script_that_has_put_another_module_in_its_place(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", NOWHERE)
    monkeypatch.setitem(sys.modules, "matplotlib", type(sys)("matplotlib"))
    assert MatplotlibFolder().variables() == {}


def test_no_matplotlib_and_no_place_for_temporary_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", NOWHERE)
    with monkeypatch.context() as patch:
        patch.setattr(matplotlib_folder, "find_spec", lambda name: None)
        assert MatplotlibFolder().variables() == {}
    monkeypatch.setattr(tempfile, "tempdir", NOWHERE)
    assert MatplotlibFolder().variables() == {}


def test_matplotlib_itself_makes_none_then(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", NOWHERE)
    folder = MatplotlibFolder()
    for given, made in (({}, True), (folder.variables(), False)):
        code = f"import os, matplotlib; print(os.environ.get({VARIABLE!r}) != {given.get(VARIABLE)!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | given, capture_output=True, text=True, timeout=120
        )
        assert (done.stdout, "temporary cache directory" in done.stderr) == (f"{made}\n", made)
    folder.close()
