"""Communication marks that cannot be made: the calls work as before, and it is reported once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from lastgasp.pytorch import collectives
from lastgasp.pytorch.collectives import Collectives, CommunicationMarks, GradientBuckets
from lastgasp.pytorch.processgroups import UNNAMED
from lastgasp.steps import bits, ringfile
from lastgasp.steps.marks import Marks
from support.ranges import seen


class Own(ProcessGroup):
    """A group of a user-defined class, which torch does not know."""


def own() -> ProcessGroup:
    """One of them."""
    return Own(0, 1)  # type: ignore[call-arg]


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Marks]:
    monkeypatch.setattr(ringfile, "places", lambda: [tmp_path])
    marks = Marks.open(rank=0, world_size=1, mask=bits.ALL, capacity=16)
    yield marks
    marks.close(remove=True)


@pytest.fixture
def calls(marks: Marks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collectives]:
    """Installed around a function that reduces nothing."""

    def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> str:
        return f"reduced {tensor}"

    for module in (dist, distributed_c10d):
        monkeypatch.setattr(module, "all_reduce", all_reduce)
    calls = Collectives(CommunicationMarks(marks))
    yield calls
    calls.close()
    assert dist.all_reduce is all_reduce


def groups(marks: Marks) -> list[str]:
    """Keys of what was marked."""
    return [json.loads(one.name)["groupName"] for one in seen(marks)]


def test_a_group_without_a_name_is_marked_as_such(calls: Collectives, marks: Marks) -> None:
    calls.look()
    assert dist.all_reduce(2, group=own()) == "reduced 2"
    assert groups(marks) == [UNNAMED]


def test_a_call_that_cannot_be_measured_or_marked_is_carried_out(
    calls: Collectives, marks: Marks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise TypeError("torch has changed")

    calls.look()
    with monkeypatch.context() as patch:
        patch.setattr(collectives, "_measure", refuse)
        assert [dist.all_reduce(n, group=own()) for n in (1, 2)] == ["reduced 1", "reduced 2"]
    with monkeypatch.context() as patch:
        patch.setattr(CommunicationMarks, "_define", refuse)
        assert dist.all_reduce(3, group=own()) == "reduced 3"
    assert seen(marks) == []
    assert dist.all_reduce(4, group=own()) == "reduced 4"
    assert len(seen(marks)) == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_functions_that_cannot_be_wrapped_stay_as_they_are(
    calls: Collectives, marks: Marks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(vars(dist))

    def barrier(group: Any = None) -> None: ...

    barrier.__signature__ = "none"  # type: ignore[attr-defined]
    for module in (dist, distributed_c10d):
        monkeypatch.setattr(module, "barrier", barrier)
    for _ in range(3):
        calls.look()
    assert {name for name, value in before.items() if vars(dist)[name] is not value} == {"barrier"}
    assert dist.all_reduce(1) == "reduced 1"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    marks.mask = bits.DEFAULT_ON
    calls.look()


@pytest.mark.parametrize("on", [True, False])
def test_a_ddp_that_reports_no_times_trains_on(marks: Marks, on: bool, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []

    def refuse(rate: int) -> None:
        asked.append(rate)
        raise RuntimeError("torch has changed")

    model: Any = SimpleNamespace(
        module=torch.nn.Linear(2, 2), process_group=own(), _set_ddp_runtime_logging_sample_rate=refuse
    )
    caplog.set_level(logging.WARNING)
    buckets = GradientBuckets(CommunicationMarks(marks), model)
    marks.mask = bits.ALL if on else bits.DEFAULT_ON
    for _ in range(3):
        buckets.look()
    buckets.close()
    assert len(asked) == on
    assert [record.levelname for record in caplog.records] == ["ERROR"] * on
    assert seen(marks) == []
