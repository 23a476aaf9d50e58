"""Periodic checkpoints of a loop: which ranks are waited for, and for how long."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastgasp.config import GaspConfig
from lastgasp.errors import DeadlineExceeded
from lastgasp.pytorch.loop import periodic
from lastgasp.pytorch.loop.periodic import JOINED, Periodic


class Uneven:
    """A session of ranks that do not come to the same step."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.notes: list[str] = []

    def progress(self, phase: str) -> None:
        """Nothing."""

    def gather(self, tag: str, own: bytes, limit: float) -> list[bytes]:
        """They do not come."""
        self.waited.append(limit)
        raise DeadlineExceeded("a rank", limit, "")

    def note(self, text: str) -> None:
        """For people."""
        self.notes.append(text)


@pytest.mark.parametrize(("joined", "waited"), [(True, [JOINED]), (False, [600.0, 600.0, 600.0])])
def test_ranks_that_may_have_no_data_left_are_waited_for_once(
    joined: bool, waited: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torch's `Join` alone."""
    monkeypatch.setattr(periodic, "ddp_of", lambda model: model)
    engine: Any = Uneven()
    writer: Any = SimpleNamespace(place=SimpleNamespace(rank=1))
    model = SimpleNamespace(_join_config=SimpleNamespace(enable=joined))
    saves = Periodic(engine, writer, GaspConfig.resolve(tmp_path), 0, [model])
    for step in (2, 4, 6):
        saves.save(step, b"", lambda _: {})
    assert engine.waited == waited
    assert ["no periodic checkpoints are written from now on" in note for note in engine.notes] == [True] * joined
