"""A learning rate that the script has changed since is not the one that a resumed run trains with: that is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastgasp.errors import CheckpointMismatch
from lastgasp.pytorch import TorchState
from lastgasp.pytorch.as_set import AsSet


def made(lr: float, steps: int = 10, **options: Any) -> tuple[torch.optim.Optimizer, Any]:
    weights = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [weights.weight]}, {"params": [weights.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, **options)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def as_set(optimizer: torch.optim.Optimizer, scheduler: Any) -> AsSet:
    return AsSet({"optimizer": optimizer}, {"scheduler": scheduler})


def test_what_differs_is_named(tmp_path: Path) -> None:
    before, told = as_set(*made(0.1)).values, list[str]()
    as_set(*made(0.1)).tell(before, told.append, tmp_path)
    as_set(*made(0.1)).tell(None, told.append, tmp_path)  # of an earlier version
    assert told == []
    other = as_set(*made(0.01, 20, betas=(0.8, 0.9)))
    other.tell(before, told.append)
    [text] = told
    assert "lr of optimizer, group 0 is 0.1 (the script: 0.01)" in text
    assert "betas of optimizer, group 0 is (0.9, 0.999) (the script: (0.8, 0.9))" in text
    assert "T_max of scheduler" in text or "more" in text
    with pytest.raises(CheckpointMismatch, match="another trial"):
        other.tell(before, told.append, tmp_path)


def of_module(share: float, **more: Any) -> AsSet:
    attention = nn.MultiheadAttention(4, 2, dropout=share)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(share), nn.LayerNorm(4, **more), attention)
    module[0].started = share  # type: ignore[assignment]
    return AsSet({}, {}, module=module)


def test_settings_of_modules_are_told_and_stay_the_scripts(tmp_path: Path) -> None:
    """A trial of a sweep with another share of dropout has weights of the same shapes."""
    before, told = of_module(0.1).values, list[str]()
    of_module(0.1).tell(before, told.append, tmp_path)
    assert told == []
    other = of_module(0.3, eps=1e-3)
    other.tell(before, told.append)
    [text] = told
    assert text.startswith("when the job of the checkpoint began, p of 1 is 0.1 (the script: 0.3); eps of 2 is 1e-05")
    assert "dropout of 3 is 0.1" in text and text.endswith("Training goes on with the script's")
    with pytest.raises(CheckpointMismatch, match=r"p of 1 is 0\.1 .* another trial"):
        other.tell(before, told.append, tmp_path)


def test_what_training_changes_does_not_count() -> None:
    optimizer, scheduler = made(0.1)
    state = TorchState(nn.ModuleList(), optimizer, scheduler)
    before = dict(state.as_set.values)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() != [0.1, 0.1] and state.as_set.values == before
    told: list[str] = []
    as_set(*made(0.1)).tell(before, told.append)
    assert told == []
