"""A learning rate that the script has changed since is not the one that a resumed run trains with: that is said."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from lastgasp.pytorch import TorchState
from lastgasp.pytorch.as_set import AsSet


def made(lr: float, steps: int = 10, **options: Any) -> tuple[torch.optim.Optimizer, Any]:
    weights = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [weights.weight]}, {"params": [weights.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, **options)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def as_set(optimizer: torch.optim.Optimizer, scheduler: Any) -> AsSet:
    return AsSet({"optimizer": optimizer}, {"scheduler": scheduler})


def test_what_differs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    before = as_set(*made(0.1)).values
    with caplog.at_level(logging.WARNING, "lastgasp"):
        as_set(*made(0.1)).tell(before)
        as_set(*made(0.1)).tell(None)  # of an earlier version
        assert caplog.text == ""
        as_set(*made(0.01, 20, betas=(0.8, 0.9))).tell(before)
    assert "lr of optimizer, group 0 is 0.1 (the script: 0.01)" in caplog.text
    assert "betas of optimizer, group 0 is (0.9, 0.999) (the script: (0.8, 0.9))" in caplog.text
    assert "T_max of scheduler" in caplog.text or "more" in caplog.text


def test_what_training_changes_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, scheduler = made(0.1)
    state = TorchState(nn.ModuleList(), optimizer, scheduler)
    before = dict(state.as_set.values)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() != [0.1, 0.1] and state.as_set.values == before
    with caplog.at_level(logging.WARNING, "lastgasp"):
        as_set(*made(0.1)).tell(before)
    assert caplog.text == ""
