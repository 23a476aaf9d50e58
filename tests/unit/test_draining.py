"""What is queued on an accelerator of any kind gets some time to end before process groups are dropped."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from lastgasp import _clock
from lastgasp.errors import UsageError
from lastgasp.exception_origin import may_pass
from lastgasp.pytorch.draining import DRAIN, drain
from support.accelerator import Accelerator


@pytest.mark.parametrize("ends_after", [3, 1000])
def test_an_accelerator_of_any_kind_is_drained(ends_after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, seconds = Accelerator(), count()
    now = [0]

    def later() -> float:
        now[0] = next(seconds)
        return float(now[0])

    monkeypatch.setattr(_clock, "monotonic", later)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("privateuseone"))
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    module.training.give(lambda: now[0] >= ends_after)
    drain()
    assert now[0] == min(ends_after, DRAIN)


def test_nothing_is_waited_for_without_one() -> None:
    drain()


def test_a_dead_device_fails_again() -> None:
    assert not may_pass(torch.AcceleratorError("CUDA error: device-side assert triggered"))
    assert may_pass(torch.OutOfMemoryError("CUDA out of memory"))
    assert not may_pass(UsageError("a call that is refused each time"))


def test_torch_2_6_raises_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator() -> None:
        raise RuntimeError("no accelerator")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    drain()
