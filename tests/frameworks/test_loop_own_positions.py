"""Loops that draw their own batches, by positions that objects of theirs count."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from frameworks.loop_rig import NewProcesses, in_process
from lastgasp.pytorch import Session, TorchState
from lastgasp.pytorch.loop.positions_of_its_own import NOTE

SAID = NOTE.partition("{}")[0]


@pytest.fixture(autouse=True)
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session is the first one of its process."""
    in_process(monkeypatch, NewProcesses())


class Shards:
    """As nanoGPT's `DataLoaderLite`: where it is in its data is a number of its own."""

    def __init__(self) -> None:
        self.position, self.size, self.loss = 0, 64, 0.5

    def __next__(self) -> Tensor:
        self.position = (self.position + 2) % self.size
        self.loss += 0.5
        return torch.full((2, 2), float(self.position))

    def state_dict(self) -> dict[str, int]:
        """What `extra` saves."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Its counterpart."""
        self.position = state["position"]


def counting(size: int) -> Iterator[Tensor]:
    """A generator that knows where it is."""
    position = 0
    while True:
        position = (position + 3) % size
        yield torch.full((2, 2), float(position))


class Trainer:
    """Has its data as an attribute, and a loop in a method."""

    def __init__(self, data: Any) -> None:
        self.data, self.steps = data, 0

    def train(self, session: Session, state: TorchState) -> None:
        """Nothing holds a batch longer than the loop does."""
        for _ in range(4):
            x = next(self.data)
            held = weakref.ref(x)
            for optimizer in state.optimizers.values():
                optimizer.step()
            self.steps += 1
            self.over(session)
            del x
            assert held() is None

    def over(self, session: Session) -> None:
        """The loop itself is in the caller."""
        session.updated()


@pytest.mark.parametrize("kind", ["object", "saved", "saved inside", "generator", "drawn"])
def test_positions_that_an_object_of_the_loop_counts_are_named(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run would train on the first data again; random numbers are restored, and what `extra` has."""
    others: dict[str, Any] = {"generator": counting(64), "drawn": (torch.rand(2, 2) for _ in iter(int, 1))}
    data = others[kind] if kind in others else Shards()
    inside = SimpleNamespace(of=data, state_dict=dict, load_state_dict=lambda _: None)
    extra: Any = {"saved": {"data": data}, "saved inside": {"data": inside}}.get(kind)
    model = nn.Linear(2, 1)
    state = TorchState(model, SGD(model.parameters(), lr=0.1), extra=extra)
    with Session.open(tmp_path, state=state) as session:
        Trainer(data).train(session, state)
    named = [line for line in caplog.messages if SAID in line]
    assert len(named) == (kind in ("object", "generator"))
    assert all(f"{SAID}data.position. A resumed run" in line.replace("self.", "") for line in named)


def test_a_dict_of_its_locals_that_the_loop_has_stays_as_it_is(tmp_path: Path) -> None:
    """`settings = locals()`: before Python 3.13 it is what a frame gives whoever asks."""

    def train(rate: float, width: int = 2) -> dict[str, Any]:
        settings = locals()
        model = nn.Linear(width, 1)
        state = TorchState(model, SGD(model.parameters(), lr=rate))
        with Session.open(tmp_path, state=state) as session:
            Trainer(Shards()).train(session, state)
        return settings

    assert train(0.1) == {"rate": 0.1, "width": 2, "tmp_path": tmp_path}


@pytest.mark.parametrize("by", ["batches", "updated"])
def test_what_the_loop_carries_in_names_of_its_own_is_noted_when_it_is_resumed(
    by: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`extra` has the best loss so far, and neither the sum nor the list."""
    caplog.set_level("INFO", "lastgasp")
    said = "in names of its own is in no checkpoint, and a resumed run begins with the script's: total, losses. Give"

    def train(steps: int) -> None:
        model = nn.Linear(2, 1)
        best, total, losses = {"loss": 9.0}, 0.0, list[float]()
        optimizer = SGD(model.parameters(), lr=0.1)
        state = TorchState(model, optimizer, extra={"best": best})
        with Session.open(tmp_path, state=state, max_steps=steps, every=1) as session:
            given = session.batches([torch.ones(1, 2)] * 3) if by == "batches" else [torch.ones(1, 2)] * 2
            for batch in given:
                loss = model(batch).sum()
                loss.backward()
                optimizer.step()
                total += float(loss)
                losses.append(total)
                best["loss"] = min(best["loss"], total - 0.5)
                if by == "updated":
                    session.updated()

    train(2)
    assert [one.levelname for one in caplog.records if said in one.getMessage()] == ["INFO"]
    caplog.clear()
    train(4)
    assert [one.levelname for one in caplog.records if said in one.getMessage()] == ["WARNING"]
