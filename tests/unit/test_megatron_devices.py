"""Whether Megatron's model has the optimizer's weights on the device; the rest is `test_queued_work.py`."""

from __future__ import annotations

import torch

from lastgasp_megatron.devices import Device
from support.accelerator import Accelerator


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    device = Device(torch.device("cpu"))
    device.mark_copied()
    assert device.copied()


def test_whether_the_weights_are_copied_is_asked_and_not_waited_for() -> None:
    module = Accelerator()
    device, done = Device(torch.device("cuda:3"), module), list[int]()
    module.training.give(lambda: bool(done))
    device.mark_copied()
    assert not device.copied()
    done.append(1)
    assert device.copied()
