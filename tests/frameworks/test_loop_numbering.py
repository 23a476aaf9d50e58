"""Loops that number their batches themselves: learning rates may follow from a number that starts at 0 again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingWarmRestarts, CyclicLR

from frameworks.loop_rig import Cut, NewProcesses, in_process, loader
from lastgasp.pytorch import Session, TorchState
from lastgasp.pytorch.loop.numbering import NUMBERS, numbered_anew
from lastgasp.pytorch.loop.run import Run
from lastgasp.pytorch.loop.schedules import RATES_ANEW


@pytest.fixture(autouse=True)
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens a session again stands for a script that was started again."""
    in_process(monkeypatch, NewProcesses())


def log_every(batches: Iterable[Any]) -> Iterator[Any]:
    """As MetricLogger and tqdm do."""
    for one in batches:
        yield one
        gc.collect()


LOOPS: dict[str, tuple[Callable[..., Iterable[Any]], int, int]] = {
    "plainly": (lambda s, data: enumerate(s.batches(data)), 1, 1),
    "through generators": (lambda s, data: enumerate(log_every(log_every(s.batches(data)))), 1, 1),
    "by s.enumerate": (lambda s, data: log_every(s.enumerate(data)), 0, 0),
    "from the right number": (lambda s, data: enumerate(s.batches(data), s.step), 1, 0),
    "from 1": (lambda s, data: enumerate(s.batches(data), s.step + 1), 1, 0),
    "not at all": (lambda s, data: (one for one in s.batches(data)), 0, 0),
}
"""What the loop iterates over; whether that is said at the start; whether it is noted when a pass is resumed."""


@pytest.mark.parametrize("collected", ["", "begins", "is looked at"])
@pytest.mark.parametrize("how", LOOPS)
def test_a_loop_that_numbers_its_batches_itself_is_named(
    how: str, collected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, said, noted = LOOPS[how]
    if collected == "begins":  # the pass
        begin = Run.begin_pass
        monkeypatch.setattr(Run, "begin_pass", lambda *args: (begin(*args), gc.collect())[0])
    elif collected:  # by another thread
        objects = gc.get_objects
        monkeypatch.setattr(gc, "get_objects", lambda **which: (gc.collect(1), objects(**which))[1])

    def train(until: int) -> None:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        with Session.open(tmp_path, state=TorchState(model, optimizer), every=3) as s:
            for _ in s.epochs(2):
                for _ in numbers(s, loader()):
                    if s.step == until:
                        raise Cut
                    optimizer.step()

    with pytest.raises(Cut):
        train(3)
    assert caplog.text.count(NUMBERS) == said and "which calls the first one" not in caplog.text
    caplog.clear()
    train(99)
    assert caplog.text.count("the first one of the resumed pass 0, although 3 came before it") == noted
    assert NUMBERS not in caplog.text


@pytest.mark.parametrize(
    ("number", "before", "batches", "step", "noted"),
    [
        (0, 3, 5, 3, True),
        (1, 3, 5, 3, True),
        (10, 3, 5, 13, True),  # over all passes, from the first batch of this one
        (13, 3, 5, 13, False),
        (8, 3, 0, 8, False),  # by the step, in a later pass over a stream
        (9, 3, 0, 8, False),
        (5, 2, 5, 5, False),  # by the step, where the pass before was left early
        (12, 2, 5, 6, False),  # by a count of its own, where it was
    ],
)
def test_only_a_number_that_begins_anew_is_noted(
    number: int, before: int, batches: int, step: int, noted: bool
) -> None:
    assert bool(numbered_anew(number, before, batches, step)) is noted


def anew(step: int, epoch: int, count: int) -> float:
    return 0.1 / (1 + 5 * epoch + count)


RATES: dict[str, tuple[Callable[[int, int, int], float], int]] = {
    "by a count of its own": (anew, 1),
    "by the step": (lambda step, epoch, count: 0.1 / (1 + step), 0),
    "constant": (lambda step, epoch, count: 0.1, 0),
    "of the epoch": (lambda step, epoch, count: 0.1 / (1 + epoch), 0),
    "in turn": (lambda step, epoch, count: 0.1 / (1 + step % 2), 0),
    "down and up": (lambda step, epoch, count: (0.05, 0.04, 0.03, 0.02, 0.03, 0.04)[step % 6], 0),
}
"""How the loop sets its learning rate, from the step, the epoch and a count of its own; whether a resume notes it."""


@pytest.mark.parametrize("at", [3, 4, 8])
@pytest.mark.parametrize("how", RATES)
def test_learning_rates_that_begin_anew_are_named(
    how: str, at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From a count of the loop's own, which no enumerate() gives away."""
    rate, noted = RATES[how]

    def train(until: int) -> list[float]:
        model, used = nn.Linear(4, 3), list[float]()
        optimizer = SGD(model.parameters(), lr=0.5)
        with Session.open(tmp_path, state=TorchState(model, optimizer), every=1) as s:
            for epoch in s.epochs(2):
                counts = iter(range(5))
                for _ in s.batches(loader()):
                    if s.step == until:
                        raise Cut
                    optimizer.param_groups[0]["lr"] = rate(s.step, epoch, next(counts))
                    used.append(optimizer.param_groups[0]["lr"])
                    optimizer.step()
        return used

    with pytest.raises(Cut):
        train(at)
    assert RATES_ANEW not in caplog.text
    used = train(99)
    assert caplog.text.count(RATES_ANEW) == noted
    assert (used == [rate(step, step // 5, step % 5) for step in range(at, 10)]) is not bool(noted)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 4),
    "chained": lambda optimizer: ChainedScheduler([CosineAnnealingWarmRestarts(optimizer, 4)]),
    "triangle": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=1, step_size_down=3),
}


@pytest.mark.parametrize("at", [4, 9])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_scheduler_that_comes_back_to_its_first_rates_is_not_named(
    kind: str, at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut where it does so for the first time in the epoch."""

    def train(until: int) -> None:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = SCHEDULES[kind](optimizer)
        with Session.open(tmp_path, state=TorchState(model, optimizer, scheduler), every=1) as s:
            for _ in s.epochs(2):
                for _ in s.batches(loader()):
                    if s.step == until:
                        raise Cut
                    optimizer.step()
                    scheduler.step()

    with pytest.raises(Cut):
        train(at)
    train(99)
    assert RATES_ANEW not in caplog.text


def test_a_scheduler_that_gets_a_count_of_the_loops_own_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As torch's documentation has it of CosineAnnealingWarmRestarts."""

    def train(until: int) -> None:
        model = nn.Linear(4, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = CosineAnnealingWarmRestarts(optimizer, 3)
        with Session.open(tmp_path, state=TorchState(model, optimizer, scheduler), every=1) as s:
            for epoch in s.epochs(2):
                counts = iter(range(5))
                for _ in s.batches(loader()):
                    if s.step == until:
                        raise Cut
                    scheduler.step(epoch + next(counts) / 5)
                    optimizer.step()

    with pytest.raises(Cut):
        train(3)
    train(99)
    assert caplog.text.count(RATES_ANEW) == 1


@pytest.mark.parametrize("at", [4, 9])
@pytest.mark.parametrize("by_step", [False, True], ids=["by a count of its own", "by the step"])
def test_learning_rates_that_begin_anew_behind_an_update_are_named(
    by_step: bool, at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """timm's scheduler is stepped there, with `num_updates` of the loop: the first resumed update has the right one."""

    def train(until: int) -> list[float]:
        model, used = nn.Linear(4, 3), list[float]()
        optimizer = SGD(model.parameters(), lr=0.1)
        with Session.open(tmp_path, state=TorchState(model, optimizer), every=1) as s:
            for epoch in s.epochs(2):
                updates = 5 * epoch
                for _ in s.batches(loader()):
                    if s.step == until:
                        raise Cut
                    used.append(optimizer.param_groups[0]["lr"])
                    optimizer.step()
                    updates += 1
                    optimizer.param_groups[0]["lr"] = 0.1 / (1 + (s.step + 1 if by_step else updates))
        return used

    with pytest.raises(Cut):
        train(at)
    assert RATES_ANEW not in caplog.text
    used = train(99)
    assert (used == [0.1 / (1 + step) for step in range(at, 10)]) is by_step or at == 9
    assert caplog.text.count(RATES_ANEW) == (not by_step and at != 9)
