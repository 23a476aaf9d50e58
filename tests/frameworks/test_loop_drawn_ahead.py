"""Loops that draw their own batches, one step ahead: a resumed run has lost the one that was drawn for its step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from frameworks.loop_rig import Cut, NewProcesses, in_process
from lastgasp.pytorch import Session, TorchState
from lastgasp.pytorch.loop.drawn_ahead import AHEAD, LOST


@pytest.fixture(autouse=True)
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens a session again stands for a script that was started again."""
    in_process(monkeypatch, NewProcesses())


def nanogpt(folder: Path, ahead: bool, until: int, evaluates: int) -> list[float]:
    """Batches by `torch.randn`, in two micro-steps, as nanoGPT's `get_batch`; returns what each step began with."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    seen = []
    with Session.open(folder, state=TorchState(model, optimizer), every=3) as s:
        x = torch.randn(3, 4) if ahead else torch.zeros(3, 4)
        while s.step < 7:
            if s.step == until:
                raise Cut
            if evaluates and s.step % evaluates == 0:
                model.eval()
                model(torch.randn(3, 4))
                model.train()
            for micro in range(2):
                x = x if ahead else torch.randn(3, 4)
                if not micro:
                    seen.append(x.sum().item())
                loss = model(x).square().mean()
                x = torch.randn(3, 4) if ahead else x
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            s.updated()
    return seen


@pytest.mark.parametrize("evaluates", [0, 2, 3])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_batch_that_is_drawn_ahead_is_named(
    ahead: bool, evaluates: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not where an evaluation before the first step may have drawn: that comes at some steps only."""
    whole = nanogpt(tmp_path / "whole", ahead, 99, evaluates)
    with pytest.raises(Cut):
        nanogpt(tmp_path / "cut", ahead, 3, evaluates)
    assert caplog.text.count(AHEAD) == 2 * (ahead and not evaluates) and LOST not in caplog.text
    caplog.clear()
    rest = nanogpt(tmp_path / "cut", ahead, 99, evaluates)
    assert (rest == whole[3:]) is not ahead
    assert caplog.text.count(LOST) == (ahead and evaluates != 3) and AHEAD not in caplog.text


def test_what_one_step_draws_behind_its_batch_is_nothing_ahead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as an action of an environment: the numbers belong to the step."""
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with Session.open(tmp_path, state=TorchState(model, optimizer)) as s:
        while s.step < 3:
            model(torch.ones(4)).backward()
            torch.randn(3)
            optimizer.step()
            s.updated()
    assert AHEAD not in caplog.text
