"""What is said where a checkpoint's flags are others than the script's."""

from __future__ import annotations

import pytest
import torch

from lastgasp.pytorch.flags import Flags


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
