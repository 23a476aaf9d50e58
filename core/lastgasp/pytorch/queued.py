"""What this rank has queued on its accelerators, and what may never be done because a peer is gone.

A call of torch's returns once its work is queued. After a peer's death the collective in a stream does not end, and
nothing behind it is done: not the update that the host has queued meanwhile, and no copy to the host. Hence two rules.
The host queues an update only when all before it is done, the gradients' collectives among them (`gate`): then a step
that is complete by the host's count will be complete on the device without any peer. And a gasp reads on streams of its
own (`reading`), behind the update and beside all later work.

Run with stand-ins for streams alone: no machine with two accelerators was at hand.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lastgasp import _clock
from lastgasp.errors import NotSaveable
from lastgasp.session import Session

log = logging.getLogger("lastgasp")

LONGEST = 30.0
"""Seconds that a gasp waits for the device to end an update that it has been given."""
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""1 where torchrun sets it: all processes are ended. 0 leaves that to others."""
_PAUSE, _LONG_PAUSE = 20e-6, 1e-3
_NEEDED = ("Event", "Stream", "stream", "device", "current_stream")


class QueuedWork:
    """The streams of this rank's accelerators. Costs nothing where there are none.

    Args:
        devices: of the model; module: torch's module of them, looked up where left out.
    """

    def __init__(self, devices: Iterable[torch.device], module: Any = None) -> None:
        found = [device for device in devices if device.type not in ("cpu", "meta")]
        self._module = module if module is not None or not found else _module_of(found[0])
        self._devices = found if self._module is not None else []
        self._gradients, self._update = self._events(), self._events()
        self._marked = False

    def gate(self, session: Session) -> Callable[[], None]:
        """`session.before_update` for a training thread that gives its work to a device.

        It returns once all that was queued before is done, and the gate is open. An exception of the gate's passes.
        Where another backend leads, it is `before_update` itself: that one stops the device when it wants the thread.
        """
        before_update = session.before_update
        if not self._devices or session.backend.backend != "embedded":
            return before_update
        status = session.status
        _warn_of_watchdog(self._devices[0])

        def wait_then_ask() -> None:
            if self._capturing():  # into a CUDA graph: an event cannot be asked for, and nothing is done now
                before_update()
                return
            self._record(self._gradients)
            if status.inside:  # a further optimizer of the same step, which can only be finished
                self._wait(lambda: status.outcome is not None)
                return
            while True:
                self._wait(lambda: status.closed)
                before_update()
                if self._done(self._gradients):
                    return
                status.not_yet()  # the gate was closed, and has opened again; it may close once more

        return wait_then_ask

    def mark(self) -> None:
        """All that a gasp may read is queued: the step is complete by the host's count. On the training thread."""
        if self._devices and not self._capturing():
            self._record(self._update)
            self._marked = True

    def settle(self) -> None:
        """Wait for all that the training thread has queued; to be called where a copy to the host would wait for it."""
        for device in self._devices:
            self._module.current_stream(device).synchronize()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Run the block behind the mark, and not behind any later work of the training thread. On any thread.

        Raises:
            NotSaveable: the device does not come to the mark.
        """
        deadline = _clock.monotonic() + LONGEST
        while self._marked and not self._done(self._update):
            if _clock.monotonic() > deadline:
                raise NotSaveable(f"the accelerator has not made the update that it was given, for {LONGEST:g} s")
            time.sleep(_PAUSE)
        with ExitStack() as stack:
            own = [self._module.Stream(device) for device in self._devices]
            for device, stream in zip(self._devices, own, strict=True):
                stack.enter_context(self._module.device(device))
                stack.enter_context(self._module.stream(stream))
            yield
            for stream in own:
                stream.synchronize()

    def _wait(self, ends: Callable[[], bool]) -> None:
        pause = _PAUSE
        while not self._done(self._gradients) and not ends():
            time.sleep(pause)
            pause = min(pause * 1.02, _LONG_PAUSE)

    def _events(self) -> list[Any]:
        return [self._module.Event() for _ in self._devices]

    def _record(self, events: list[Any]) -> None:
        for device, event in zip(self._devices, events, strict=True):
            event.record(self._module.current_stream(device))

    def _done(self, events: list[Any]) -> bool:
        return all(event.query() for event in events)

    def _capturing(self) -> bool:
        asked = getattr(self._module, "is_current_stream_capturing", None)
        return asked is not None and bool(asked())


def _warn_of_watchdog(device: torch.device) -> None:
    """NCCL notices a dead peer over a network, and torch ends the process then, whatever it has to save."""
    here, all_of_them = (int(os.environ.get(name) or 1) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    value = os.environ.get(WATCHDOG, "3")
    if device.type == "cuda" and value != "0" and all_of_them > here and os.environ.get("RANK") == "0":
        log.warning("%s=%s: where NCCL notices a dead rank on another host, it ends this process, perhaps before the "
                    "step is saved. Set it to 0 on all nodes; lastgasp finds hung ranks itself",
                    WATCHDOG, value)  # fmt: skip


def _module_of(device: torch.device) -> Any:
    """torch's module of this kind of device; None where it has no streams that one could wait for."""
    try:
        found = torch.get_device_module(device)
    except (RuntimeError, AttributeError):
        return None
    return found if all(hasattr(found, name) for name in _NEEDED) else None
