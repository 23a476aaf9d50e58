"""What this rank has queued on its accelerators, and what may never be done because a peer is gone.

A call of torch's returns once its work is queued. After a peer's death the collective in a stream does not end, and
nothing behind it is done: not the update that the host has queued meanwhile, and no copy to the host. Hence two rules.
The host queues an update only when all before it is done, the gradients' collectives among them (`gate`): then a step
that is complete by the host's count will be complete on the device without any peer. And a gasp reads on streams of its
own (`reading`), behind the update and beside all later work.

Where the host goes on to queue work behind a collective that never ends, the device takes no more work at some point,
of no thread and for no stream: then communicators are aborted before a gasp reads. So they are where a training thread
waits for such work, once the training is to be entered again (`free`).

Run on one GPU, whose ranks talk over sockets; no machine with two was at hand.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lastgasp import _clock
from lastgasp.errors import NotSaveable
from lastgasp.gasp.rank_status import Released
from lastgasp.nccl import WATCHDOG
from lastgasp.pytorch.aborting import abort_groups, failure, groups_number, let_go, uses_nccl, why_not_again
from lastgasp.session import Session

log = logging.getLogger("lastgasp")

LONGEST = 30.0
"""Seconds that a gasp waits for the device to end an update that it has been given."""
FREED_AFTER = 3.0
"""Seconds that a training thread which is to enter its training again may need to come by itself."""
TAKES_WORK = 1.0
"""Seconds within which a device makes a small copy, if it takes any work."""
LOOKS_EVERY = 0.5
"""Seconds between two looks at whether it does."""
_STREAMS = 33
"""One more than torch has of them: it gives out each in turn, and NCCL's are among them."""
ASKS_EVERY = 0.05
"""Seconds, of a thread that waits for gradients, between two questions whether a collective has failed."""
_PAUSE, _LONG_PAUSE = 20e-6, 1e-3
_NEEDED = ("Event", "Stream", "stream", "device", "current_stream")


class QueuedWork:
    """The streams of this rank's accelerators. Costs nothing where there are none.

    Args:
        devices: of the model; module: torch's module of them, looked up where left out.
    """

    def __init__(self, devices: Iterable[torch.device], module: Any = None) -> None:
        found = [device for device in devices if device.type not in ("cpu", "meta")]
        self._module = module if module is not None or not found else self.module_of(found[0])
        self._devices = found if self._module is not None else []
        self._gradients, self._update = self._events(), self._events()
        self._marked = self._torn = False
        self._goes_on: Callable[[], bool] = bool
        self._asks_at = 0.0

    @staticmethod
    def module_of(device: torch.device) -> Any:
        """torch's module of this kind of device; None where it has no streams that one could wait for."""
        try:
            found = torch.get_device_module(device)
        except (RuntimeError, AttributeError):
            return None
        return found if all(hasattr(found, name) for name in _NEEDED) else None

    def gate(self, session: Session) -> Callable[[], None]:
        """`session.before_update` for a training thread that gives its work to a device.

        It returns once all that was queued before is done, and the gate is open. An exception of the gate's passes.
        Where another backend leads, it is `before_update` itself: that one stops the device when it wants the thread.
        """
        before_update = session.before_update
        if not self._devices or session.backend.backend != "embedded":
            return before_update
        status = session.status
        status.free, status.doomed = self.free, why_not_again
        self._goes_on = lambda: status.may_go_on
        _tell_of_watchdog(self._devices[0])

        def wait_then_ask() -> None:
            if self._capturing():  # into a CUDA graph: an event cannot be asked for, and nothing is done now
                before_update()
                return
            self._record(self._gradients)
            if status.inside:  # a further optimizer of the same step, which can only be finished
                self._wait(lambda: status.outcome is not None)
                if why := let_go():
                    raise _torn_gradients(why) if status.outcome is None else Released(status.outcome)
                return
            while True:
                self._wait(lambda: status.closed or bool(self._failed()))
                before_update()
                done = self._done(self._gradients)
                why = let_go() if done else failure()
                if done and not why:
                    return
                status.not_yet()  # the gate was closed, and has opened again; it may close once more
                if why:
                    raise _torn_gradients(why)

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
        number = groups_number()
        self._await_update()
        with self._taking_work(number), ExitStack() as stack:
            own = [self._idle_stream(device) for device in self._devices]
            for device, stream in zip(self._devices, own, strict=True):
                stack.enter_context(self._module.device(device))
                stack.enter_context(self._module.stream(stream))
            yield
            for stream in own:
                stream.synchronize()

    def let_copy(self) -> None:
        """Before the training thread copies on its own stream: have nothing on it wait for ever. No update may follow.

        Raises:
            NotSaveable: the device does not come to the mark.
        """
        self._await_update()
        number, deadline, queued = groups_number(), _clock.monotonic() + TAKES_WORK, self._events()
        self._record(queued)
        while not self._done(queued) and _clock.monotonic() < deadline:
            time.sleep(_PAUSE)
        if not self._done(queued):
            self._abort(number)

    def _await_update(self) -> None:
        deadline, waited = _clock.monotonic() + LONGEST, False
        while self._marked and not self._done(self._update):
            waited = True
            if _clock.monotonic() > deadline:
                raise NotSaveable(f"the accelerator has not made the update that it was given, for {LONGEST:g} s")
            time.sleep(_PAUSE)
        if self._torn or (waited and let_go()):
            raise NotSaveable("its communicators were aborted before the accelerator had made the update")

    def free(self) -> Callable[[], None]:
        """To be called before the training thread hears that its training is to be entered again.

        Returns:
            To be called on a thread of its own: should the training thread not come by itself, it ends what that may
            wait for, but nothing that it has begun since.
        """
        number = groups_number()

        def end() -> None:
            deadline = _clock.monotonic() + FREED_AFTER
            while groups_number() == number and _clock.monotonic() < deadline:
                time.sleep(_LONG_PAUSE)
            self._abort(number)

        return end

    def _abort(self, number: int) -> bool:
        torn = self._marked and not self._done(self._update)
        if torn and groups_number() == number:
            self._torn = True  # before an event says what it would say of an update, too
        return abort_groups(number)

    @contextmanager
    def _taking_work(self, number: int) -> Iterator[None]:
        """See to it that the device takes work, at the cost of collectives that nobody needs any more.

        It may take some now, and none a moment later: the training thread queues more, or waits only then. Ranks that
        may go on from where they are need their collectives.
        """
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                if not self._takes_work() and not over.is_set() and not self._goes_on():
                    self._abort(number)
                    return
                over.wait(LOOKS_EVERY)

        if uses_nccl():
            threading.Thread(target=look, name="lastgasp-takes-work", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _takes_work(self) -> bool:
        """Whether the device makes a small copy in time."""
        taken = threading.Event()

        def copy() -> None:
            try:
                for device in self._devices:
                    with self._module.device(device), self._module.stream(self._idle_stream(device)):
                        _copy_one(device)
            except Exception:  # it fails again where somebody sees it
                log.debug("a small copy on the device failed", exc_info=True)
            taken.set()

        threading.Thread(target=copy, name="lastgasp-takes-work", daemon=True).start()
        return taken.wait(TAKES_WORK)

    def _idle_stream(self, device: torch.device) -> Any:
        """One with nothing on it: torch gives out streams in turn, NCCL's with a collective that never ends too."""
        for _ in range(_STREAMS):
            found = self._module.Stream(device)
            if not hasattr(found, "query") or found.query():
                break
        return found

    def _failed(self) -> str:
        """As `failure`, asked now and then: it looks at all groups."""
        if (now := _clock.monotonic()) < self._asks_at:
            return ""
        self._asks_at = now + ASKS_EVERY
        return failure()

    def _wait(self, ends: Callable[[], bool]) -> None:
        pause, self._asks_at = _PAUSE, _clock.monotonic() + ASKS_EVERY
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


def _copy_one(device: torch.device) -> None:
    torch.empty(1, device=device).cpu()


def _torn_gradients(why: str) -> RuntimeError:
    return RuntimeError(f"a collective of NCCL has failed ({why}): the gradients of this step are not whole")


def _tell_of_watchdog(device: torch.device) -> None:
    """NCCL notices a dead peer over a network, and torch ends the process a minute later, whatever it has to save.

    Where torch is told to leave it alone, nobody but lastgasp ends a collective that hangs.
    """
    here, all_of_them = (int(os.environ.get(name) or 1) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    value = os.environ.get(WATCHDOG, "3")
    if device.type != "cuda" or all_of_them == 1 or os.environ.get("RANK") != "0":
        return
    if value == "0":
        log.info("%s=0: torch ends no collective of NCCL that hangs. lastgasp does while a training is under way; "
                 "before it begins and behind its end nobody does", WATCHDOG)  # fmt: skip
    elif all_of_them > here:
        log.warning("%s=%s: once NCCL has noticed a dead rank on another host, torch ends this process after a minute, "
                    "which may be before a large state is saved. Set it to 0 on all nodes; lastgasp finds hung ranks "
                    "itself, while a training is under way", WATCHDOG, value)  # fmt: skip
