"""Recovery in place from the checkpoint that was just saved: a framework's whole training is entered again.

For frameworks that make model, optimizer and process groups inside of one call (Megatron's `pretrain`). The step is
saved as ever; then no healthy process ends: each drops what it has of the training and makes that call again, a killed
rank by a new process, and all begin with the saved checkpoint, as after a restart.
"""

from __future__ import annotations

import gc
import logging
import os
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lastgasp import exitcodes
from lastgasp.adapter.run import AdapterRun
from lastgasp.config import Recovery
from lastgasp.errors import DeadlineExceeded
from lastgasp.gasp import leaving
from lastgasp.gasp.again import INCARNATION, Again
from lastgasp.gasp.new_process import order_of_this_process
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.pytorch.cut import cut_connections, outside
from lastgasp.pytorch.draining import drain
from lastgasp.pytorch.drop_groups import drop_groups
from lastgasp.pytorch.uservalues import UserValues

log = logging.getLogger("lastgasp")

JOIN = 60.0
"""Seconds that a new process has to come to the training, at least."""

class EnteredFromFiles:
    """One training of this process; all of it is called on the main thread.

    Args:
        values: plain values of the user's objects as they were before the training. It begins with them again: a
            restart does, too, and a new process could not know what others have kept since.

    Attributes:
        why: why it cannot be entered again; empty if it can.
        new: this process has just taken the place of a dead rank.
    """

    def __init__(self, why: str = "", values: UserValues | None = None) -> None:
        self.why, self._values = why, values
        self._again: Again | None = None
        self._status: RankStatus | None = None
        self.new = order_of_this_process() is not None  # otherwise it begins as all others do

    def offer(self, life: AdapterRun, recovery: Recovery, asked: bool = True) -> None:
        """Say which faults of this run may be answered in place. Before it begins.

        Args:
            asked: by the user; otherwise nobody is warned where it cannot be.
        """
        self._status = status = life.session.status
        if recovery in ("restart", "save"):
            status.recovery = recovery if recovery == "save" else ""
        elif self.why:
            if life.place.rank == 0:
                level = logging.WARNING if asked else logging.INFO
                log.log(level, "this training cannot be entered again: %s. After a fault the job restarts", self.why)
        elif life.session.backend.backend == "embedded":
            status.recovery, status.from_files, status.ends = recovery, True, outside
            life.before_again = self._agreed
            if self._values is not None:
                status.cannot_again = self._values.cannot

    def _agreed(self, again: Again) -> None:
        self._again = again

    @property
    def patience(self) -> float:
        """Seconds that a new process has to come to the training; the start of this one says how long that may take."""
        return max(JOIN, 2 * leaving.start_took())

    def meet(self, patience: float) -> None:
        """Wait until all ranks are here: a script that made its process group before may have used it before, too.

        Raises:
            DeadlineExceeded: one was not here in `patience` seconds.
        """
        here = f"lastgasp/{os.environ.get(INCARNATION, '0')}/here"
        store: Any = distributed_c10d._get_default_store()
        store.set(f"{here}/{dist.get_rank()}", "")
        try:
            store.wait([f"{here}/{rank}" for rank in range(dist.get_world_size())], timedelta(seconds=patience))
        except dist.DistStoreError as error:
            remedy = "It may wait for the others in something else. The job restarts."
            raise DeadlineExceeded("a rank to enter the training again", patience, remedy) from error

    def goes_on(self, error: BaseException, reset: Callable[[], object], wrapped: Iterable[Any] = ()) -> bool:
        """Whether the training that ended with `error` is entered again. Then nothing of it is left.

        Args:
            error: it and its causes lose the local variables of their tracebacks.
            reset: drops what the framework keeps of a training besides its process groups.
            wrapped: DDP wrappers of torch's own.

        Raises:
            SystemExit: this rank was told to stop meanwhile; the step is on disk.
            Exception: what `reset` raised; the step is on disk.
        """
        again, self._again = self._again, None
        if again is None:
            return False
        if self._status is not None and self._status.asked_to_stop:
            raise SystemExit(exitcodes.SAVED)
        drain()
        cut_connections(again.pids, again.ends)
        _forget(error)
        if self._values is not None:
            self._values.put_back()
        reset()
        drop_groups(list(wrapped))
        gc.collect()
        os.environ.update(again.environment)
        log.info("the training is entered again in this process, from step %d on disk", again.step)
        return True


def _forget(error: BaseException) -> None:
    """Tracebacks keep the model alive, and its process groups with it."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]
