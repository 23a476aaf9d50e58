"""How a dump is written: MindIO's handlers as the engine's source (`ports.StateSource`, `ports.SavesTogether`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastgasp.adapter import GaspConfig, ManifestWriter, NotSaveable, RankStatus, SaveResult, clock
from lastgasp.adapter.checkpoint import DirectoryLayout, SingleFile
from lastgasp.adapter.testing import faults
from lastgasp_mindio import device, manifests, settings
from lastgasp_mindio.callgroups import CallGroups, Savers, this_thread, waits_for_others
from lastgasp_mindio.handlers import Handlers
from lastgasp_mindio.shards import Group, together_of

log = logging.getLogger("lastgasp")

LOOK = 0.001
"""Seconds between two looks at a training thread that must leave its collective."""


@dataclass
class Dump:
    """ports.SaveResult: this rank's part of a dump. Its files are the save handler's own."""

    step: int
    path: str
    first_byte_ns: int
    nbytes: int = 0
    part: bytes = b""


@dataclass
class Saver:
    """Called by the engine's threads while the training thread waits at the gate, is stuck, or has raised.

    Args:
        rank: this one; groups: of the whole job; both as the engine counts. seats: the numbers that handlers know.
        config: limits and directory; layout: how dumps lie there; writer: names who writes their manifests.
        status: of this rank.

    Attributes:
        parked: the training thread has left the training function, and waits for the end of the recovery.
        stopped: a stop was ordered here, so that the training thread raises.
        cleaned: what the clean handler has returned.
        unclean: what the stop or the clean handler has raised: this rank saves nothing any more.
        call_groups: process groups that the save handler has made.
    """

    rank: int
    groups: tuple[Group, ...]
    seats: tuple[int, ...]
    handlers: Handlers
    config: GaspConfig
    layout: SingleFile | DirectoryLayout
    writer: ManifestWriter
    status: RankStatus
    parked: threading.Event = field(default_factory=threading.Event)
    stopped: bool = False
    cleaned: int = 0
    unclean: BaseException | None = None
    buffer_fd: int = -1
    call_groups: CallGroups = field(default_factory=CallGroups)
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _saves_on: int = 0

    def capture(self, step: int) -> bytes:
        """Nothing: random state and data position are the save handler's business."""
        return b""

    # -- saving -----------------------------------------------------------------------------------

    @property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """The shards of each group that this rank is in."""
        return tuple(together_of(self.groups, self.rank).values())

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> Dump:
        """Without a controller: this rank saves all shards, or could not be asked."""
        return self.save_together(step, tuple((self.rank,) * len(part) for part in self.together), reason)

    def save_together(self, step: int, savers: Savers, reason: str) -> Dump:
        """Have the save handler called, at the same time as on the other savers.

        Raises:
            NotSaveable: a handler is missing, the device is not good, or an earlier call cannot end. And what the save
                handler raises.
        """
        info, number = self._info(savers), self.call_groups.ordered(savers)
        with device.current():
            self._take_turn()
            try:
                if self.unclean is not None:
                    raise self.unclean
                if settings.stop_before_dump():
                    self.stop_and_clean(False)
                faults.fire_at("gasp_save", step)
                begun = clock.wall_ns()
                with self.call_groups.calling(number):
                    self.handlers.save(step, info)
            finally:
                self._turn.release()
        where = manifests.expected(self.config.directory, self.layout, step)
        return Dump(step=step, path=str(where), first_byte_ns=begun)

    def _take_turn(self) -> None:
        """Wait until an earlier call of the save handler has returned."""
        if not self._turn.acquire(blocking=False):
            if self.stopped:
                self.handlers.stop()  # it may hang in a collective with a saver that was lost
            if not self._turn.acquire(timeout=self.config.finish_timeout):
                if waits_for_others(self._saves_on):  # not even the stop has ended that; the others can save without us
                    raise NotSaveable("the save handler's last call waits for a rank that is gone")
                if not self._turn.acquire(timeout=self.config.save_timeout):
                    raise NotSaveable("the save handler has not returned from its last call")
        self._saves_on = this_thread()

    def _info(self, savers: Savers) -> list[dict[str, Any]]:
        """MindIO's `save_info`: the groups that this rank saves in, each with one rank a shard."""
        numbers = together_of(self.groups, self.rank)
        parts = zip(numbers, savers, strict=True)
        found = [{"type": self.groups[n].kind, "ranks": [self.seats[rank] for rank in ranks]}
                 for n, ranks in parts if self.rank in ranks]  # fmt: skip
        if not found:
            raise NotSaveable(f"rank {self.rank} was ordered to save in no group")
        return found

    def stop_and_clean(self, memory_failed: bool) -> None:
        """Have the training thread leave its collective, then the device cleared; once. As `save_together`."""
        if self.stopped:
            return
        self.stopped = True
        try:
            self.handlers.stop()
            if not self._left():
                log.warning("rank %d: the training thread has not left its collective in %g s after the stop; the next "
                            "handler is called nevertheless", self.rank, self.config.finish_timeout)  # fmt: skip
            self.cleaned = self.handlers.clean(memory_failed)
        except BaseException as error:
            self.unclean = error
            raise

    def _left(self) -> bool:
        """Wait until the training thread waits for the end of the recovery."""
        deadline = clock.monotonic() + self.config.finish_timeout
        while not self.status.at_gate and not self.parked.wait(LOOK):
            if clock.monotonic() > deadline:
                return False
        return True

    # -- publishing -------------------------------------------------------------------------------

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """On one rank, when all have saved: the rename handler, then the manifest."""
        assert isinstance(result, Dump)
        directory, (_, said) = Path(self.config.directory), settings.directory()
        with device.current(), manifests.room_for(directory, self.layout, result.step):
            self.handlers.rename(result.step)
        if not said:
            return (
                f"the dump of step {result.step} has no manifest: set LASTGASP_DIR to the directory of checkpoints, so "
                "that they are verified before they are loaded"
            )
        path, problem = manifests.seal(directory, self.layout, result.step, self.writer)
        if path is not None:
            result.path = str(path)
        return problem

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of that step."""
        return manifests.found(Path(self.config.directory), self.layout, step) is not None

    def discard(self, result: SaveResult) -> None:
        """Nothing: what a save handler leaves under a temporary name is written anew by the next one."""
