"""Recovery in place from the checkpoint that was just saved: a framework's whole training is entered again.

For frameworks that make model, optimizer and process groups inside of one call (Megatron's `pretrain`). The step is
saved as ever; then no healthy process ends: each drops what it has of the training and makes that call again, a killed
rank by a new process, and all begin with the saved checkpoint, as after a restart. Where MindIO leads, the step is
saved within its order to roll back (`LedFromFiles`).
"""

from __future__ import annotations

import gc
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lastgasp import exitcodes
from lastgasp.adapter.run import AdapterRun
from lastgasp.checkpoint.manifest_lookup import has_manifest
from lastgasp.config import Recovery
from lastgasp.errors import CheckpointError, DeadlineExceeded, NotSaveable
from lastgasp.gasp import leaving
from lastgasp.gasp.again import INCARNATION, NEW, Again
from lastgasp.gasp.going_on import Fewer
from lastgasp.gasp.joining import order_when_taken_in, tell_code
from lastgasp.gasp.new_process import order_of_this_process
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.ports import Layout, SaveResult
from lastgasp.pytorch.cut import cut_connections, cut_hosts, outside
from lastgasp.pytorch.draining import drain
from lastgasp.pytorch.drop_groups import drop_groups
from lastgasp.pytorch.loop import joining
from lastgasp.pytorch.loop.again_here import frees
from lastgasp.pytorch.loop.led import NO_STEP, Orders, Peer, meet, why_no_new_process
from lastgasp.pytorch.loop.memory import HeldTraining
from lastgasp.pytorch.loop.renumber import numbered, place_after
from lastgasp.pytorch.uservalues import UserValues

log = logging.getLogger("lastgasp")

JOIN = 60.0
"""Seconds that a new process has to come to the training, at least."""
NOT_FEWER = Fewer(why="what trains here knows no training with fewer ranks")


class EnteredFromFiles:
    """One training of this process; all of it is called on the main thread.

    Args:
        values: plain values of the user's objects as they were before the training. It begins with them again: a
            restart does, too, and a new process could not know what others have kept since.

    Attributes:
        why: why it cannot be entered again; empty if it can.
        new: this process has just taken the place of a dead rank.
        life: where MindIO leads, the run of the entry before, which goes on; None otherwise, and in a new process.
        begun: the step with which this entry began.
        resized: ranks are missing since this entry, or are there again, and this rank is the one to tell of it.
    """

    def __init__(self, why: str = "", values: UserValues | None = None) -> None:
        self.why, self._values = why, values
        self._again: Again | None = None
        self._status: RankStatus | None = None
        self.life: AdapterRun | None = None
        self._from: Again | None = None
        self._rank, self.resized = 0, False
        self.begun = 0
        self.new = order_of_this_process() is not None  # otherwise it begins as all others do

    def wait(self) -> bool:
        """Before anything that ranks do together: a process for a missing rank waits here until it is taken in.

        Whoever trains with fewer ranks says here what code it runs.

        Returns:
            Whether it was one: `RANK` and `WORLD_SIZE` are others now.

        Raises:
            SystemExit: there is no place for it any more.
        """
        tell_code()
        return order_when_taken_in() is not None

    def join(self, fewer: bool = False) -> None:
        """Where MindIO may start single processes anew, join it now: before the process group is made, on all ranks.

        A new process returns when the others are about to enter the training again.

        Args:
            fewer: the training may go on with fewer ranks, as far as is known before it begins.

        Raises:
            RuntimeError: MindIO did not take this process into the running job.
        """
        held = joining.join(fewer, moved=False)
        self._from = held.again if held is not None else None

    def joined(self) -> None:
        """The run of this entry has its session: all ranks call it together, once the process group is made."""
        if self._from is not None and self._from.lost:
            dist.barrier()  # a new process has joined the controller before it is asked with the others

    def offer(
        self, life: AdapterRun, recovery: Recovery, asked: bool = True, files: Files | None = None, *,
        fewer: Fewer = NOT_FEWER,
    ) -> None:  # fmt: skip
        """Say which faults of this run may be answered in place. Before it begins.

        Args:
            asked: by the user; otherwise nobody is warned where it cannot be.
            files: where checkpoints stand; left out, MindIO's orders are answered with a dump and a restart.
            fewer: whether it may go on with fewer ranks, whose numbers `reset` (of `goes_on`) finds in the environment.
        """
        self._status = status = life.session.status
        several = life.place.world_size > 1 or self.life is not None  # else all others are missing, and may come back
        if life.session.backend.backend != "embedded" and files is not None and several:
            self._offer_to_mindio(life, recovery, files, fewer)
        if recovery in ("restart", "save"):
            status.recovery = recovery if recovery == "save" else ""
        elif self.why:
            if life.place.rank == 0:
                level = logging.WARNING if asked else logging.INFO
                log.log(level, "this training cannot be entered again: %s. After a fault the job restarts", self.why)
        elif life.session.backend.backend == "embedded":
            status.recovery, status.from_files, status.ends = recovery, True, outside
            status.fewer, status.cut_off, self._rank = fewer, cut_hosts, life.place.rank
            status.free = status.free or frees(life)  # on accelerators collectives are aborted
            life.before_again = self._agreed
            if self._values is not None:
                status.cannot_again = self._values.cannot

    def _offer_to_mindio(self, life: AdapterRun, recovery: Recovery, files: Files, fewer: Fewer) -> None:
        """All ranks call it together."""
        why = self.why or ("" if recovery in ("auto", "retry") else f"recovery={recovery}")
        source = life.source
        peers, source.not_in_place, source.no_recover = meet(
            life.session, why, why_no_new_process(life.session, life.place, recovery)
        )
        source.in_place, life.before_again = None, None
        if not source.not_in_place:
            led = LedFromFiles(self, life, peers, files)
            led.agree_on_fewer(fewer)
            source.in_place, life.before_again, life.stays = led, led.keep, True
            life.session.status.from_files = True

    def begins_with(self, step: int) -> None:
        """All ranks have loaded `step`. Before `offer`.

        Raises:
            CheckpointError: by MindIO's order all begin with another one. Nothing but a restart takes it back.
        """
        wanted, self._from, self.begun = self._from, None, step
        if wanted is not None and wanted.step != step:
            raise CheckpointError(f"all ranks were to begin again with step {wanted.step}, and {step} was loaded")

    def cannot_now(self) -> str:
        """Why it cannot be entered again at this moment; empty if it can."""
        return self._values.cannot() if self._values is not None else ""

    def led(self, again: Again, life: AdapterRun) -> None:
        """MindIO lets all ranks go on: `goes_on` follows, and `life` is for the next entry."""
        self._again, self.life, self._from = again, life, again

    def failed(self, error: BaseException) -> None:
        """The entry has ended with `error` before there was a run of it: MindIO, which leads, has to know."""
        if self.life is not None:
            self.life.failed(error)

    def _agreed(self, again: Again) -> None:
        self._again = again.for_rank(self._rank)

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
        try:
            self._drop(again, error, reset, wrapped)
        except BaseException as raised:
            self.failed(raised)
            raise
        log.info("the training is entered again in this process, from step %d on disk", again.step)
        return True

    def _drop(self, again: Again, error: BaseException, reset: Callable[[], object], wrapped: Iterable[Any]) -> None:
        drain()
        cut_connections(again.pids, again.ends, again.port)
        _forget(error)
        if self._values is not None:
            self._values.put_back()
        os.environ.update(again.environment)
        stay = [number for number, before in enumerate(again.members) if before != NEW]
        self.resized = again.rank in stay[:1]
        reset()
        drop_groups(list(wrapped))
        gc.collect()


@dataclass(frozen=True)
class Files:
    """Where the checkpoints of a training stand: that of each step, and how they lie there."""

    target: Callable[[int], Path]
    layout: Layout


@dataclass(frozen=True)
class OnDisk:
    """A step that is on disk already, to whom asks for it once more; implements `ports.SaveResult`."""

    path: str
    nbytes: int = 0
    first_byte_ns: int = 0
    part: bytes = b""


class FromDisk:
    """Stands for the state while a training is entered again: its step was saved. Implements `ports.StateSource`."""

    buffer_fd = -1

    def __init__(self, rank: int, step: int, files: Files) -> None:
        self.rank, self._step, self._files = rank, step, files

    def capture(self, step: int) -> bytes:
        """Nothing: it is in the checkpoint."""
        return b""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> SaveResult:
        """Nothing has to be written.

        Raises:
            NotSaveable: the checkpoint is not there, or another step is wanted.
        """
        path = self._files.target(self._step)
        if step != self._step or not has_manifest(path, self._files.layout):
            raise NotSaveable(f"this rank is about to begin again with {path}, and holds no step {step}")
        return OnDisk(str(path))

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """It was published."""
        return ""

    def discard(self, result: SaveResult) -> None:
        """It stays."""


class LedFromFiles(Orders):
    """MindIO's orders to a training that begins again with the checkpoint that was just saved.

    MindIO has the step saved before `rollback` comes (`from_files`), and lets no rank go on before it is on disk.

    Args:
        entered: the training. life: its run. peers: of all ranks. files: where checkpoints stand.
    """

    from_files = True

    def __init__(self, entered: EnteredFromFiles, life: AdapterRun, peers: tuple[Peer, ...], files: Files) -> None:
        super().__init__(life, peers)
        self._entered, self._files = entered, files

    def cannot_now(self) -> str:
        """As in the base; a fault that comes before a new step is complete would come again and again."""
        if self.life.session.status.step <= self._entered.begun:
            return NO_STEP
        return self._entered.cannot_now()

    def roll_back(self, step: int) -> None:
        """Nothing: until all have let go of it, the training's own state is what a dump would save."""

    def keep(self, again: Again) -> None:
        """The step is on disk: agree where all meet, by other numbers where ranks are missing or are there again.

        Raises:
            ControlError, DeadlineExceeded: the controller refused this rank, or another rank does not come. A dump that
                is ordered then is on disk already.
        """
        life, before = self.life, self.life.place.rank
        place = place_after(life.place, again)
        life.session.status.durable = again.step
        life.bind(HeldTraining(FromDisk(place.rank, again.step, self._files)))
        if again.members:
            life.joins_again(place)
        found = numbered(self.agreed(again), before)
        self._entered.led(msgspec.structs.replace(found, source=-1, takers=(), saved=True), life)


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
