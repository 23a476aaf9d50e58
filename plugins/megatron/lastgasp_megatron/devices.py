"""Reading device memory while the training thread's stream may wait for a collective that never ends.

Megatron updates the optimizer's own weights, and copies them to the model's in a step of its own, which a collective
follows: whether that copy is done is asked, and never waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lastgasp.adapter.torch import QueuedWork


class Device(QueuedWork):
    """The device of the weights; on "cpu" there is nothing to wait for.

    Args:
        device: torch's; module: torch's module of it, looked up where left out.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        super().__init__([device], module)
        self.device = device
        self._copied = self._events()

    def mark_copied(self) -> None:
        """The model's weights are copied from the optimizer's once all that was issued so far is done."""
        self._record(self._copied)

    def copied(self) -> bool:
        """Whether that copy is done. Does not wait: it is followed by a collective that may never end."""
        return self._done(self._copied)


class HostCopies:
    """Pinned memory of the host for tensors of a device, kept for the next time. One thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def __call__(self, number: int, flat: Tensor) -> Tensor:
        """The bytes `flat` on the host; waits for the device, whose work so far waits for no other rank."""
        kept = self._kept.get(number)
        if kept is None or kept.shape != flat.shape:
            kept = self._kept[number] = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        return kept.copy_(flat)
