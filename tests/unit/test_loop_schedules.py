"""Schedulers of a step that was cut short after its update are stepped as often as in the step before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ReduceLROnPlateau, SequentialLR, StepLR

from lastgasp.pytorch.loop.schedules import ScheduleWatch


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return SequentialLR(optimizer, [ConstantLR(optimizer), StepLR(optimizer, 1, 0.5)], [2])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    return ChainedScheduler([ConstantLR(optimizer), StepLR(optimizer, 1, 0.5)])


@pytest.mark.parametrize("make", [warm_up, chained, lambda o: StepLR(o, 1, 0.5)], ids=["warm-up", "chained", "one"])
def test_what_was_cut_off_is_caught_up(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    watch = ScheduleWatch([scheduler])
    for _ in range(2):
        watch.opens()
        optimizer.step()
        scheduler.step()
        watch.closes()
    rates = [scheduler.get_last_lr()]
    watch.opens()
    optimizer.step()  # and it is cut short here
    watch.catch_up()
    rates.append(scheduler.get_last_lr())
    watch.catch_up()
    assert rates[1] != rates[0] and scheduler.get_last_lr() == rates[1]


def test_one_that_needs_a_metric_is_left_alone() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer)
    watch = ScheduleWatch([scheduler])
    watch.opens()
    optimizer.step()
    scheduler.step(1.0)
    watch.closes()
    watch.opens()
    watch.catch_up()
    assert scheduler.last_epoch == 1
