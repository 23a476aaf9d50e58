"""The settings of the marks: what is accepted, what is refused, which one counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.errors import ConfigError
from lastgasp.steps import bits
from lastgasp.steps.settings import MarksConfig


@pytest.mark.parametrize(
    ("marks", "mask"),
    [
        (None, bits.DEFAULT_ON),
        (True, bits.DEFAULT_ON),
        (False, None),
        ("all", bits.ALL),
        ("none", 0),
        ("step,comm", bits.STEP | bits.COMM),
        ("step comm", bits.STEP | bits.COMM),
    ],
)
def test_what_is_marked(marks: bool | str | None, mask: int | None) -> None:
    assert MarksConfig.resolve(marks).mask == mask


def test_collectives_are_off_by_default() -> None:
    assert not bits.DEFAULT_ON & bits.COMM
    assert bits.describe(bits.DEFAULT_ON) == "step forward dataloader save"
    assert bits.describe(0) == "none"


@pytest.mark.parametrize("bad", ["steps", ",", "", 3, ["step"], "step;comm"])
def test_unknown_marks_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match="marks="):
        MarksConfig.resolve(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1, 1.5, True, "many", float("inf")])
def test_a_limit_is_a_number_of_megabytes(bad: object) -> None:
    with pytest.raises(ConfigError, match="profiling_limit_mb="):
        MarksConfig.resolve(profiling_limit_mb=bad)  # type: ignore[arg-type]


def test_argument_beats_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LASTGASP_MARKS", "comm")
    monkeypatch.setenv("LASTGASP_PROFILING_DIR", str(tmp_path))
    monkeypatch.setenv("LASTGASP_PROFILING_LIMIT_MB", "7")
    assert MarksConfig.resolve() == MarksConfig(mask=bits.COMM, directory=tmp_path, limit_mb=7)
    assert MarksConfig.resolve(False, tmp_path / "x", 0) == MarksConfig(mask=None, directory=tmp_path / "x", limit_mb=0)


def test_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP_MARKS", "yes")
    with pytest.raises(ConfigError, match="LASTGASP_MARKS='yes'"):
        MarksConfig.resolve()
