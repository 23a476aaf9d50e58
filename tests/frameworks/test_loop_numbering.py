"""Loops that number their batches themselves: learning rates may follow from a number that starts at 0 again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from frameworks.loop_rig import Cut, NewProcesses, in_process, loader
from lastgasp.pytorch import Session, TorchState
from lastgasp.pytorch.loop.numbering import NUMBERS
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


@pytest.mark.parametrize("collected", [False, True])
@pytest.mark.parametrize("how", LOOPS)
def test_a_loop_that_numbers_its_batches_itself_is_named(
    how: str, collected: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, said, noted = LOOPS[how]
    if collected:  # while the pass begins
        begin = Run.begin_pass
        monkeypatch.setattr(Run, "begin_pass", lambda *args: (begin(*args), gc.collect())[0])

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


def anew(step: int, epoch: int, count: int) -> float:
    return 0.1 / (1 + 5 * epoch + count)


RATES: dict[str, tuple[Callable[[int, int, int], float], int]] = {
    "by a count of its own": (anew, 1),
    "by the step": (lambda step, epoch, count: 0.1 / (1 + step), 0),
    "constant": (lambda step, epoch, count: 0.1, 0),
    "of the epoch": (lambda step, epoch, count: 0.1 / (1 + epoch), 0),
    "in turn": (lambda step, epoch, count: 0.1 / (1 + step % 2), 0),
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
