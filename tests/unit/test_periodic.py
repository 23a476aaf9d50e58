"""Periodic checkpoints of a loop: which ranks are waited for, and for how long."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lastgasp.arena_filling import MEASURED, WARM_UP, Filling
from lastgasp.config import GaspConfig
from lastgasp.errors import DeadlineExceeded, NotSaveable
from lastgasp.pytorch import sharded_source
from lastgasp.pytorch.loop.not_saved import UNEVEN, NotSaved
from lastgasp.pytorch.loop.periodic import JOINED, Joined, Periodic
from lastgasp.pytorch.loop.run import Run
from lastgasp.pytorch.loop.sharded_loop import ShardedLoop
from lastgasp.pytorch.loop.state import TorchState
from lastgasp.pytorch.queued import QueuedWork
from lastgasp.pytorch.sharded_alike import SharedParts
from lastgasp.testing.faults import InjectedFault


class Uneven:
    """A session of ranks that do not come to the same step.

    Args:
        come: what is asked first, and answered for all ranks.
    """

    def __init__(self, *come: str) -> None:
        self.come = come
        self.waited: list[tuple[str, float]] = []
        self.notes: list[str] = []

    def progress(self, phase: str) -> None:
        """Nothing."""

    def gather(self, tag: str, own: bytes, limit: float) -> list[bytes]:
        """They do not come."""
        self.waited.append((tag, limit))
        if tag in self.come:
            return [own, b"of a rank that has gone on"]
        raise DeadlineExceeded("a rank", limit, "")

    def note(self, text: str) -> None:
        """For people."""
        self.notes.append(text)


def state_of(joined: bool, sharded: bool = False) -> Any:
    """With an optimizer that torch's `Join` knows."""
    optimizer = SimpleNamespace(_join_config=SimpleNamespace(enable=joined))
    return SimpleNamespace(sharded=sharded, models={"model": nn.Linear(1, 1)}, optimizers={"optimizer": optimizer})


def run_of(engine: Any, directory: Path, joined: bool, shards: Any = None) -> Any:
    """Saves, on rank 0."""
    run: Any = object.__new__(Run)
    config, writer = GaspConfig.resolve(directory), SimpleNamespace(place=SimpleNamespace(rank=0))
    run.recorder = SimpleNamespace(read=lambda step: b"", queued=QueuedWork(()))
    run.marks = SimpleNamespace(saving=nullcontext)
    run.shards, run._joined = shards, Joined(engine, config, state_of(joined, shards is not None))
    run._periodic = Periodic(engine, writer, config, 0)  # type: ignore[arg-type]
    run.dump = lambda step, aux: pytest.fail("a checkpoint of ranks that are elsewhere")
    return run


def saved(run: Any, *steps: int) -> None:
    """These are due."""
    for run.step in steps:
        run.save()


def test_under_join_ranks_that_may_have_no_data_left_are_waited_for_once(tmp_path: Path) -> None:
    engine = Uneven()
    saved(run_of(engine, tmp_path, True), 2, 4, 6)
    assert engine.waited == [("loop/joined/2", JOINED)]
    assert ["no periodic checkpoints are written from now on" in note for note in engine.notes] == [True]


def test_without_join_each_step_is_waited_for(tmp_path: Path) -> None:
    engine = Uneven()
    saved(run_of(engine, tmp_path, False), 2, 4)
    assert engine.waited == [("loop/save/2", 600.0), ("loop/save/4", 600.0)] and not engine.notes


def test_under_join_a_rank_that_came_and_gave_up_has_no_part_in_a_checkpoint(tmp_path: Path) -> None:
    """The controller was slow, and counts it; what it sent belongs to another moment than this rank's."""
    engine = Uneven("loop/joined/8")
    saved(run_of(engine, tmp_path, True), 8, 16)
    assert [tag for tag, _ in engine.waited] == ["loop/joined/8", "loop/save/8", "loop/joined/16"]
    assert len(engine.notes) == 1


def test_under_join_ranks_that_come_together_write(tmp_path: Path) -> None:
    engine, written = Uneven("loop/joined/2", "loop/save/2"), list[int]()
    run = run_of(engine, tmp_path, True)
    run.dump, run._periodic._write = lambda step, aux: {}, lambda step, checkpoint: written.append(step)
    saved(run, 2)
    assert written == [2] and not engine.notes


@pytest.mark.parametrize("error", [NotSaveable("the buffer queue has changed"), KeyError("param_groups")])
def test_a_state_that_cannot_be_saved_now_costs_that_checkpoint(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A buffer for whose copy the device had no room has changed since; an optimizer has another `state_dict`."""
    engine = Uneven("loop/save/2")
    run = run_of(engine, tmp_path, False)

    def dump(step: int, aux: Any) -> Any:
        raise error

    run.dump = dump
    saved(run, 2)
    [line] = caplog.messages
    assert line.startswith("the checkpoint of step 2 could not be written") and str(error) in line


def test_the_exception_of_a_drill_ends_the_training(tmp_path: Path) -> None:
    run = run_of(Uneven("loop/save/2"), tmp_path, False)

    def dump(step: int, aux: Any) -> Any:
        raise InjectedFault("in the periodic save")

    run.dump = dump
    with pytest.raises(InjectedFault):
        saved(run, 2)


class Arena:
    """Of one rank."""

    fd, identity, forgotten = -1, 0, False

    def forget(self) -> None:
        """Nothing is held any more."""
        self.forgotten = True


def test_under_join_nothing_of_parts_is_saved_and_nobody_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of one number of steps may be of different moments; a joined rank of `ZeroRedundancyOptimizer` updates."""
    engine, loop, arena = Uneven(), object.__new__(ShardedLoop), Arena()
    monkeypatch.setattr(sharded_source, "steps", lambda fd, identity: ())
    run = run_of(engine, tmp_path, True, loop)
    run.state = state_of(True, sharded=True)
    vars(loop).update(
        _run=run, shards=SimpleNamespace(look=lambda: True), life=SimpleNamespace(session=engine), arena=arena,
        _kept={}, _cannot="", _completed=False, _extra_states=SimpleNamespace(step_over=lambda step: {}),
        _filling=Filling(arena, "auto", engine.gather, engine.note, 0),  # type: ignore[arg-type]
        _shared=SharedParts(engine, None, kept_equal=False),
    )  # fmt: skip
    monkeypatch.setattr(run, "capture_aux", lambda step, **_: None)
    for step in range(1, WARM_UP + MEASURED + 2):
        snapshot: Any = SimpleNamespace(step=step, groups=[])
        loop.complete(snapshot)
        saved(run, step)
        with pytest.raises(NotSaveable, match="from step 1 on nothing can be saved: under torch's Join"):
            loop.kept(step)
    assert engine.waited == [] and len(engine.notes) == 1 and arena.forgotten
    assert "from step 1 on nothing can be saved" in loop.cannot_again()


def test_what_is_saved_under_join_is_noted() -> None:
    """A joined rank makes no more updates, and counts no more steps."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = NotSaved(TorchState(model, optimizer))
    assert UNEVEN not in kept.notes()
    optimizer._join_config = SimpleNamespace(enable=True)  # type: ignore[attr-defined]
    assert UNEVEN in kept.notes()
