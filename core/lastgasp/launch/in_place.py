"""The launcher's part of a recovery in place: a store where the ranks meet again, and new processes for dead ranks."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from lastgasp.gasp.again import ORDER, Again, Offer
from lastgasp.launch.attempts import LaunchAttempt
from lastgasp.launch.warm import Warm
from lastgasp.launch.warm_process import NoFork
from lastgasp.launch.warm_torch import replacement

log = logging.getLogger("lastgasp.launch")


class GoesOn(Exception):
    """Leaves torch's look at its workers: the dead one was replaced, and the others are to be left alone."""


def until_it_goes_on(poll: Callable[[], Any]) -> Callable[[], Any]:
    """torch's look at its workers, which sees none that has failed where the dead ones were replaced."""

    def look() -> Any:
        try:
            return poll()
        except GoesOn:
            return None

    return look


class InPlace:
    """One per attempt; all of it is called on the launcher's main thread.

    Args:
        attempt: as the launcher counts it.
        group: its workers; context: their processes.
    """

    def __init__(self, attempt: LaunchAttempt, group: WorkerGroup, context: Any, warm: Warm) -> None:
        self._attempt, self._group, self._context, self._warm = attempt, group, context, warm
        self._stores: dict[int, TCPStore] = {}
        self._offered: Offer | None = None
        self._done = 0

    def look(self) -> None:
        """Between two looks at the workers: offer what can be done, once some rank can be entered again."""
        attempt, several = self._attempt, self._group.group_world_size != 1
        if attempt.controller is None or several or not isinstance(self._context, SubprocessContext):
            return
        coming = attempt.controller.may_enter_again(attempt.number)
        if coming is None:
            return
        if coming not in self._stores:
            self._stores = {n: store for n, store in self._stores.items() if n == coming - 1}
            host = self._group.master_addr or "localhost"
            self._stores[coming] = TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        offer = Offer(
            attempt=attempt.number,
            incarnation=coming,
            port=self._stores[coming].port,
            no_process=self._warm.cannot_fork,
        )
        if offer != self._offered:
            self._offered = offer
            attempt.controller.offer(offer)
            log.debug("a fault can be answered in place, as incarnation %d%s", coming,
                      offer.no_process and f"; no rank can be replaced: {offer.no_process}")  # fmt: skip

    def replaced(self, failed: dict[int, str]) -> bool:
        """Give each dead rank a new process, if that was agreed on.

        Args:
            failed: the dead ranks, and how they ended.

        Returns:
            False where it was not (yet), or failed; the controller knows then, and the step is saved.
        """
        controller = self._attempt.controller
        again = controller.again(self._attempt.number) if controller is not None else None
        if again is None or again.incarnation <= self._done or set(failed) != set(again.lost):
            return False
        self._done = again.incarnation
        try:
            if again.lost and (why := self._warm.changed):
                raise NoFork(why)
            for rank in again.lost:
                self._replace(rank, again)
        except (NoFork, OSError) as error:
            log.warning("a rank could not be replaced: %s", error)
            for rank in again.lost:
                self._attempt.report_exit(rank, f"could not be replaced: {error}")
            return False
        return True

    def _replace(self, rank: int, again: Again) -> None:
        context = self._context
        local = next(n for n, worker in enumerate(self._group.workers) if worker.global_rank == rank)
        order = msgspec.json.encode(msgspec.structs.replace(again, aux={})).decode()
        handler = replacement(self._warm, context, local, again.environment | {ORDER: order})
        context.subprocess_handlers[local] = handler
        context._failures.pop(local, None)
        context._running_local_ranks.add(local)
        self._group.workers[local].id = handler.proc.pid
        with contextlib.suppress(OSError):
            os.unlink(context.error_files[local])
        log.info("rank %d has a new process, %d", rank, handler.proc.pid)
