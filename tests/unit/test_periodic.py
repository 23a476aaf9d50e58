"""Periodic checkpoints of a loop: which ranks are waited for, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from lastgasp.config import GaspConfig
from lastgasp.errors import DeadlineExceeded
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


@pytest.fixture
def model() -> Iterator[DistributedDataParallel]:
    """Of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(1, 1))
    dist.destroy_process_group()


def test_ranks_without_data_are_waited_for_once(model: DistributedDataParallel, tmp_path: Path) -> None:
    engine: Any = Uneven()
    writer: Any = SimpleNamespace(place=SimpleNamespace(rank=1))
    periodic = Periodic(engine, writer, GaspConfig.resolve(tmp_path), 0, [model])
    with model.join():
        model(torch.ones(1, 1)).sum().backward()
        for step in (2, 4, 6):
            periodic.save(step, b"", lambda _: {})
    assert engine.waited == [JOINED]
    [note] = engine.notes
    assert "no periodic checkpoints are written from now on" in note


def test_others_are_waited_for_each_time(model: DistributedDataParallel, tmp_path: Path) -> None:
    engine: Any = Uneven()
    writer: Any = SimpleNamespace(place=SimpleNamespace(rank=1))
    periodic = Periodic(engine, writer, GaspConfig.resolve(tmp_path), 0, [model])
    for step in (2, 4):
        periodic.save(step, b"", lambda _: {})
    assert engine.waited == [600.0, 600.0] and engine.notes == []
