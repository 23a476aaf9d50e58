"""A framework that ends a training for good: the launcher stops with its code."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.gasp.rundir import VARIABLE
from lastgasp.launch import framework_verdict
from lastgasp.launch.framework_verdict import Verdict
from lastgasp.launch.orphans import MARK
from lastgasp.launch.restarts import Restarts

SAID = Verdict(16, "the loss is NaN")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run"))
    monkeypatch.setenv(MARK, "0123456789abcdef")
    return tmp_path / "run"


def test_what_ranks_have_said_is_taken_once(home: Path) -> None:
    assert framework_verdict.give(SAID) and framework_verdict.give(SAID)
    assert framework_verdict.take("another round") is None
    assert framework_verdict.take("0123456789abcdef") == SAID
    assert framework_verdict.take("0123456789abcdef") is None
    assert list(home.iterdir()) == []


def test_without_a_launcher_there_is_nobody_to_tell(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.delenv(MARK)
    assert not framework_verdict.give(SAID)
    assert not home.exists()


def test_a_directory_that_cannot_be_trusted_costs_only_the_message(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home.mkdir(mode=0o755)
    assert not framework_verdict.give(SAID)
    assert "could not be informed" in caplog.text
    assert framework_verdict.take("0123456789abcdef") is None


@pytest.mark.parametrize("content", ["", "{", '{"code": "x", "why": 1}'])
def test_what_is_no_verdict_is_none(content: str, home: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "verdict-0123456789abcdef").write_text(content)
    assert framework_verdict.take("0123456789abcdef") is None


@pytest.mark.parametrize("progressed", [True, False])
def test_the_launcher_stops_with_its_code_whatever_progress_was_made(progressed: bool) -> None:
    restarts = Restarts(always=False)
    restarts.verdict_of_framework = SAID
    restarts.ended(0, used=True, progressed=progressed)
    assert (restarts.should_give_up, restarts.exit_code) == (True, 16)
    assert restarts.verdict.startswith("stopped with exit code 16: the loss is NaN. A restart would not change it")
