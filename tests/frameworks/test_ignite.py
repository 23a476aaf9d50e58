"""The recipe of docs/plain-loop.md for Ignite's Engine, as it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.utils.data import DataLoader

from frameworks.loop_rig import NewProcesses, in_process
from lastgasp.pytorch import Session, TorchState
from support.pages import DOCS, blocks

BATCHES, EPOCHS = 5, 3


class Killed(Exception):
    """In the middle of a step."""


def train(directory: Path, dies: int = -1) -> tuple[list[Any], list[torch.Tensor]]:
    """What the engine has told, and the weights; `dies`: in that iteration."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data: Any = torch.randn(BATCHES * 2, 4)
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, shuffle=True)
    told: list[Any] = []

    def step(engine: Engine, batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        if engine.state.iteration == dies:
            raise Killed
        optimizer.step()
        return float(loss)

    def tell(engine: Engine, event: str) -> None:
        told.append((event, engine.state.epoch, engine.state.iteration, engine.state.output))

    trainer = Engine(step)
    for event in (Events.ITERATION_COMPLETED, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED, Events.COMPLETED):
        trainer.add_event_handler(event, tell, event.name)
    [recipe] = [text for text in blocks(DOCS / "plain-loop.md", "python") if "trainer.run(" in text]
    with Session.open(directory, state=TorchState(model, optimizer)) as s:
        exec(recipe, {"s": s, "epochs": EPOCHS, "loader": loader, "trainer": trainer})
    return told, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("dies", [2, 5, 6, 9, 15])
def test_events_epochs_and_weights_are_those_of_an_undisturbed_run(
    dies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an epoch, in its last iteration, and in the first of the next."""
    in_process(monkeypatch, NewProcesses())
    told, weights = train(tmp_path / "undisturbed")
    assert [one[:2] for one in told if one[0] == "EPOCH_COMPLETED"] == [("EPOCH_COMPLETED", e) for e in (1, 2, 3)]
    with pytest.raises(Killed):
        train(tmp_path / "d", dies)
    rest, resumed = train(tmp_path / "d")
    iterations = [one for one in told if one[0] == "ITERATION_COMPLETED"]
    assert [one for one in rest if one[0] == "ITERATION_COMPLETED"] == iterations[dies - 1 :]
    ended = [one for one in told if one[0].endswith("COMPLETED") and one[2] >= dies]
    assert [one for one in rest if one[0].endswith("COMPLETED")] == ended
    assert all(map(torch.equal, weights, resumed))
