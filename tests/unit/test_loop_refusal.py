"""A loop's session that refuses to start reports to launcher and record: another try would end the same way."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lastgasp import startup_refusal
from lastgasp.errors import ConfigError, NoGoodCheckpoint
from lastgasp.pytorch import Session, TorchState
from lastgasp.session import Session as Engine


def test_its_launcher_will_not_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a launcher of ours is there, an uncaught refusal ends the process with 87."""
    monkeypatch.setenv("LASTGASP_LAUNCHER", "1")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(startup_refusal, "_before", None)
    monkeypatch.setattr(startup_refusal.atexit, "register", lambda _: None)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as error:
        Session.open(tmp_path, state="none")  # type: ignore[arg-type]
    assert sys.excepthook is startup_refusal._hook
    assert startup_refusal.is_refusal(error.value)


def test_the_incident_says_why_it_did_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[Any, str]] = []
    monkeypatch.setattr(Engine, "failed_to_start", lambda self, error, kind: said.append((error, kind)))
    (tmp_path / "gasp-step=00000003.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(NoGoodCheckpoint) as error:
        Session.open(tmp_path, state=TorchState(nn.Linear(1, 1)))
    assert said == [(error.value, "exception")]
