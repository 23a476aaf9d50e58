"""Reading device memory while the training thread's stream may wait for a collective that never ends.

The inner optimizer's step is asynchronous on a device: when the host knows that it is issued, an event behind it is
recorded, and a gasp reads on a stream of its own behind that event. Before the inner step Megatron itself waits for
the gradient norm, so that the event never waits for a dead peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Device:
    """The device of the weights.

    Args:
        device: "cpu" needs none of this.
        module: torch's module of that device; looked up where left out.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self._module = module if module is not None or device.type == "cpu" else torch.get_device_module(device)
        self._event = self._module.Event() if self._module is not None else None
        self._copied = self._module.Event() if self._module is not None else None

    def mark(self) -> None:
        """Mark the work issued so far as completing the step that a gasp may read. On the training thread."""
        if self._event is not None:
            self._event.record()

    def mark_copied(self) -> None:
        """The model's weights are copied from the optimizer's once all that was issued so far is done."""
        if self._copied is not None:
            self._copied.record()

    def copied(self) -> bool:
        """Whether that copy is done. Does not wait: it is followed by a collective that may never end."""
        return self._copied is None or bool(self._copied.query())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Run the block after the mark, but not after any later work of the training thread."""
        if self._module is None:
            yield
            return
        with self._module.device(self.device), self._module.stream(self._module.Stream()):
            stream = self._module.current_stream()
            stream.wait_event(self._event)
            yield
            stream.synchronize()


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
