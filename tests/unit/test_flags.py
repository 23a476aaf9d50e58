"""What is said where a checkpoint's flags are others than the script's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lastgasp.pytorch.flags import Flags
from support.copiers import COPIERS, use


@pytest.fixture(params=COPIERS, autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who compares."""
    return use(request.param, monkeypatch)


@pytest.mark.parametrize("part", ["", "model.0"], ids=["all", "a part"])
def test_a_model_that_the_loop_itself_puts_into_training_mode_is_no_news(
    part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`from_pretrained` gives a model that evaluates; a part of one that does is the script's wish."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
    flags = Flags(torch.nn.ModuleDict({"model": model}))
    saved = flags.record(flags.take())
    (model if not part else model[0]).eval()
    flags.restore(saved)
    assert model.training and model[0].training and model[1].training
    assert ("model.0 is in training mode" in caplog.text) is bool(part)


def test_norms_follow_their_statistics_as_they_did(caplog: pytest.LogCaptureFixture) -> None:
    """BaseFinetuning has them do so when it unfreezes them, and not in a process that resumes later."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1), torch.nn.BatchNorm1d(1))
    model[2].track_running_stats = False
    flags = Flags(model)
    saved = flags.record(flags.take())
    assert (saved["untracked"], saved["evaluating"]) == (["2"], [])
    model[1].track_running_stats, model[2].track_running_stats = False, True
    flags.restore({name: row for name, row in saved.items() if name != "untracked"})  # of an earlier version
    assert (model[1].track_running_stats, caplog.text) == (False, "")
    flags.restore(saved)
    assert (model[1].track_running_stats, model[2].track_running_stats) == (True, False)
    assert "1 follows running statistics; 2 does not follow running statistics" in caplog.text


def test_flags_are_those_of_now_whoever_asks() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    flags = Flags(model, gradients=True)
    assert flags.take() == (b"\1\1\1\1", b"\1\1\1\1", bytes(4))
    model[0].weight.requires_grad_(False)
    model[1].eval()
    model[1].track_running_stats = None  # a user's, which is no bool
    model[1].bias.grad = torch.zeros(1)
    assert flags.look() == b"\0\0\0\1"
    assert flags.take() == (b"\0\1\1\1", b"\1\1\0\0", b"\0\0\0\1")
    del model[1].track_running_stats
    with pytest.raises(AttributeError):
        flags.take()
