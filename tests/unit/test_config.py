"""The configuration: argument beats environment beats default, and every wrong value says how to put it right."""

from __future__ import annotations

import errno
import math
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.config import GaspConfig, check_writable, env_flag
from lastgasp.errors import ConfigError
from lastgasp.launch import torchrun_hook

WRONG: dict[str, list[object]] = {
    "keep": [0, -1, 1.5, True, "", "three", math.nan, math.inf, 10**400, [], object],
    "resume": ["", 3, True, b"path", ["auto"]],
    "hang_timeout": [0, -1.0, "never", "", math.nan, math.inf, True, False, 10**400, []],
    "save_timeout": [0, -0.1, "soon", "", math.nan, -math.inf, True, False, {}],
    "finish_timeout": [0, -10, "auto", math.nan, math.inf, True, [1]],
    "sha256": ["yes", 1, 0, "", 0.0, []],
}
RIGHT: dict[str, list[tuple[object, object]]] = {
    "keep": [(1, 1), ("7", 7), (2.0, 2)],
    "resume": [("auto", "auto"), ("never", "never"), (Path("a/b"), "a/b")],
    "hang_timeout": [("auto", "auto"), (0.5, 0.5), ("90", 90.0)],
    "save_timeout": [(1, 1.0), ("2.5", 2.5)],
    "finish_timeout": [(0.25, 0.25), ("3", 3.0)],
    "sha256": [(True, True), (False, False), ("1", True), ("0", False), ("true", True)],
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shell of the tests has set."""
    for name in [name for name in os.environ if name.startswith("LASTGASP_") and "TEST_MARK" not in name]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in WRONG.items() for v in values], ids=repr)
def test_wrong_arguments(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        GaspConfig.resolve(tmp_path, **{field: value})
    error = caught.value
    assert (error.field, error.value) == (field, value)
    assert error.allowed in str(error) and error.remedy in str(error) and f"{field}={value!r}" in str(error)
    assert error.allowed and error.remedy.endswith(".")


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in WRONG.items() for v in values if isinstance(v, str) and v], ids=repr
)
def test_wrong_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: str) -> None:
    variable = f"LASTGASP_{field.upper()}"
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        GaspConfig.resolve(tmp_path)
    assert (caught.value.field, caught.value.value) == (variable, value)


@pytest.mark.parametrize(
    ("field", "value", "meaning"), [(f, v, m) for f, pairs in RIGHT.items() for v, m in pairs], ids=repr
)
def test_right_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object, meaning: object
) -> None:
    assert getattr(GaspConfig.resolve(tmp_path, **{field: value}), field) == meaning
    if isinstance(value, str):
        monkeypatch.setenv(f"LASTGASP_{field.upper()}", value)
        assert getattr(GaspConfig.resolve(tmp_path), field) == meaning


def test_argument_beats_environment_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GaspConfig.resolve(tmp_path).keep == 3
    monkeypatch.setenv("LASTGASP_KEEP", "5")
    monkeypatch.setenv("LASTGASP_DIR", str(tmp_path / "env"))
    assert GaspConfig.resolve().keep == 5
    assert GaspConfig.resolve().directory == tmp_path / "env"
    assert GaspConfig.resolve(tmp_path / "arg", keep=7).keep == 7
    assert GaspConfig.resolve(tmp_path / "arg").directory == tmp_path / "arg"
    assert GaspConfig.resolve(keep=None).keep == 5
    monkeypatch.setenv("LASTGASP_KEEP", "")
    assert GaspConfig.resolve().keep == 3, "an empty variable is one that is not set"


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_any_number_of_seconds_is_taken_or_refused_and_nothing_else(value: float) -> None:
    for field in ("hang_timeout", "save_timeout", "finish_timeout"):
        if math.isfinite(value) and value > 0:
            assert getattr(GaspConfig.resolve("d", **{field: value}), field) == value
        else:
            with pytest.raises(ConfigError):
                GaspConfig.resolve("d", **{field: value})


def test_unknown_names_are_refused_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keeep=2 is not allowed: expected one of \[.*'keep'.*\]. Check the spell"):
        GaspConfig.resolve(tmp_path, keeep=2)


@pytest.mark.parametrize("directory", ["", "a\0b", "~nosuchuser-lastgasp/x", 3, b"x", None])
def test_no_directory(directory: object) -> None:
    with pytest.raises(ConfigError, match=r"dir=.*Give dir=\.\.\. or set LASTGASP_DIR") as caught:
        GaspConfig.resolve(directory)  # type: ignore[arg-type]
    assert caught.value.field == "dir"


@pytest.mark.parametrize("address", ["s3://bucket/x", Path("gs://bucket/x"), "hdfs:///x", "file:///x"], ids=str)
def test_an_address_is_no_directory(address: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be made below the working directory, which a pod takes along when it goes."""
    monkeypatch.setenv("LASTGASP_DIR", str(address))
    for directory in (address, None):
        with pytest.raises(ConfigError, match=r"a mounted file system, not an address\. Mount it"):
            GaspConfig.resolve(directory)
    assert GaspConfig.resolve(tmp_path / "lr=1://x").directory == tmp_path / "lr=1:" / "x"


def test_a_path_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What travels between processes must be text; in the locale C and without UTF-8 mode few paths are."""
    odd = tmp_path / "a\udcffb"
    odd.mkdir()
    monkeypatch.chdir(odd)
    for directory in (odd, "ckpts"):
        with pytest.raises(ConfigError, match=r"dir=.* is not allowed.* valid UTF-8"):
            GaspConfig.resolve(directory)
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    with pytest.raises(ConfigError, match="PYTHONUTF8=1"):
        GaspConfig.resolve(odd)


def test_the_directory_is_absolute_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert GaspConfig.resolve("ckpts").directory == tmp_path / "ckpts"
    assert GaspConfig.resolve("~/ckpts").directory == Path("/home/somebody/ckpts")


def test_it_is_frozen(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        GaspConfig.resolve(tmp_path).keep = 4  # type: ignore[misc]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"a directory that this user can write. Not a directory: fix or move it"):
        check_writable(tmp_path / "file" / "ckpts")


def test_a_directory_that_can_be_made_is_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/sys").exists(), reason="root writes everywhere but in /proc")
def test_a_directory_that_is_read_only() -> None:
    with pytest.raises(ConfigError, match="fix or move it"):
        check_writable(Path("/proc/sys"))


@pytest.mark.parametrize(
    ("attempt", "number", "goes_on"),
    [("1", errno.ENOSPC, True), ("1", errno.ESTALE, True), ("0", errno.ENOSPC, False), ("1", errno.EROFS, False)],
)
def test_a_restart_trains_on_where_the_directory_cannot_be_written_for_a_while(
    attempt: str, number: int, goes_on: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fails(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setenv("LASTGASP_ATTEMPT", attempt)
    monkeypatch.setattr(Path, "touch", fails)
    with nullcontext() if goes_on else pytest.raises(ConfigError, match="fix or move it"):
        check_writable(tmp_path)
        check_writable(tmp_path)
    assert caplog.text.count("nothing can be saved until that is over") == goes_on


def test_a_switch_that_is_none_leaves_torchrun_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who writes `yes` means it; torch's own import, of any job, is no place to raise."""
    for value, disabled in (("", False), ("0", False), ("1", True), ("true", True)):
        monkeypatch.setenv("LASTGASP_DISABLE", value)
        assert torchrun_hook._disabled() is env_flag("LASTGASP_DISABLE") is disabled
    assert caplog.messages == []
    monkeypatch.setenv("LASTGASP_DISABLE", "yes")
    assert torchrun_hook._disabled()
    assert "torchrun is left as it is: LASTGASP_DISABLE='yes' is not allowed" in caplog.text
