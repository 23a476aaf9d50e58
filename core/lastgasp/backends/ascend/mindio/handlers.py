"""What MindIO calls on a rank, mapped to our ports (docs/facts/mindio_tft.md §6).

All of it runs on foreign threads: the save on a fresh one, the rest on MindIO's one message thread, while the training
thread is wherever it is. A handler fails by raising; what is not an Exception would leave the controller without an
answer, so it is turned into one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from lastgasp import _clock
from lastgasp.config import GaspConfig
from lastgasp.errors import NotSaveable
from lastgasp.gasp import messages as m
from lastgasp.gasp.again import NEW
from lastgasp.gasp.fewer_ranks import FEWER
from lastgasp.gasp.processor import Processor
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.ports import GoesOnWithFewer, InPlace, SaveResult, StateSource, in_place_of
from lastgasp.topology import Place

from . import api as package
from . import limits
from .parking import Parking
from .scaling import scaled_in, scaled_out
from .strategies import Strategies

log = logging.getLogger("lastgasp")

CONSULT_TIMEOUT = 15.0
LOOK = 0.001
ASK = 0.1
"""Seconds between two looks for what other ranks have written."""
MARGIN = 5.0
"""Seconds by which this rank gives up before MindIO does, which cannot order anything until it has answered."""
R = TypeVar("R")


def answering(handler: Callable[..., R]) -> Callable[..., R]:
    """The handler, whose every failure is an Exception and on record."""

    @wraps(handler)
    def run(*given: Any) -> R:
        try:
            return handler(*given)
        except Exception:
            log.exception("MindIO's order %s failed", handler.__name__)
            raise
        except BaseException as error:
            log.exception("MindIO's order %s failed", handler.__name__)
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return run


@dataclass
class Handlers:
    """The handlers of one rank.

    Args:
        over: called once the checkpoint is published.
        leave: ends the process, in MindSpore mode: called with nothing, must not return.
        parking: where the training thread waits for a repair in place.
    """

    config: GaspConfig
    place: Place
    source: StateSource
    status: RankStatus
    processor: Processor
    strategies: Strategies
    over: Callable[[m.Ended], None]
    leave: Callable[[], None]
    parking: Parking
    _saved: dict[int, SaveResult] = field(default_factory=dict)
    _published: set[int] = field(default_factory=set)
    _there: tuple[int, ...] = ()
    """By their numbers in the complete job, which to MindIO they keep; empty where none is missing."""
    _members: tuple[int, ...] = ()
    """Who is to be there when the order to scale out has been carried out."""

    def __post_init__(self) -> None:
        self._complete = self.place.world_size

    def register(self, api: Any) -> None:
        """Each handler, once; the last one registered counts, so nobody else may register after this."""
        for name in package.HANDLERS:
            getattr(api, f"tft_register_{name}_handler")(answering(getattr(self, name)))

    # -- dump -------------------------------------------------------------------------------------

    def save_ckpt(self, step: int, save_info: list[Mapping[str, Any]], args: Any, ctx: Any) -> None:
        """This rank holds a shard that is wanted: write it under a temporary name, pass on what the publisher needs.

        A failure is our controller's as well, which then finds another holder: MindIO looks for none.
        """
        try:
            self._save(step, save_info)
        except BaseException as error:
            self.processor.tell(m.SaveFailed(recovery=0, plan=step, why=m.one_line(error)))
            raise

    def _save(self, step: int, save_info: list[Mapping[str, Any]]) -> None:
        limit = self.config.finish_timeout + 2 * self.config.save_timeout
        self.status.hold(limit, step)
        reason = f"MindIO ordered step {step} of ranks {sorted({r for info in save_info for r in info['ranks']})}"
        self._write(step, reason)

    def _write(self, step: int, reason: str) -> None:
        self._outside(step)
        aux = self._consult(step, None).aux
        result = self.source.save(step, aux, reason)
        self._saved[step] = result
        told = m.Saved(
            recovery=0, plan=step, path=result.path, nbytes=result.nbytes, first_byte_ns=result.first_byte_ns,
            part=result.part,
        )  # fmt: skip
        try:
            self._consult(step, told)
        except NotSaveable:
            self.source.discard(self._saved.pop(step))
            raise

    def _outside(self, step: int) -> None:
        status, deadline = self.status, _clock.monotonic() + self.config.finish_timeout
        status.look()
        while status.inside and not status.broken and _clock.monotonic() < deadline:
            threading.Event().wait(LOOK)
            status.look()
        if status.broken or status.inside or status.step != step:
            why = status.broken or ("inside its update" if status.inside else f"on step {status.step}")
            raise NotSaveable(f"MindIO wants step {step}, and rank {self.place.rank} is {why}")

    def _consult(self, step: int, saved: m.Saved | None) -> m.Consulted:
        """What our own controller keeps; without it this rank's own part, which is all where there is one shard."""
        answer = self.processor.consult(step, saved, CONSULT_TIMEOUT)
        if answer is not None:
            return answer
        if saved is not None and len(self.place.replicas) > 1:
            raise NotSaveable("the controller that brings the shards of a checkpoint together is gone")
        own = {self.place.rank: saved.part} if saved is not None else {}
        return m.Consulted(step=step, aux={}, parts=own)

    def rename(self, step: int, _: Any) -> None:
        """All savers have saved: publish, manifest last. On one rank; again is harmless.

        Torch hands over `args` and MindSpore the registered ctx; neither is needed.
        """
        if step in self._published:
            return
        result = self._saved.get(step)
        if result is None:
            raise NotSaveable(f"rank {self.place.rank} has not saved step {step}")
        self._publish(step, result, self._parts(step))
        self._published.add(step)
        self.over(m.Ended(ending="saved", step=step, path=result.path, reason=""))

    def _parts(self, step: int) -> dict[int, bytes]:
        """What one rank has written of each shard.

        Of two the higher one was asked last: the lowest that can save is asked, and the other cannot any more.
        """
        known = {**self._consult(step, None).parts, self.place.rank: self._saved[step].part}
        writers = [max(set(group) & known.keys()) for group in self.place.replicas if set(group) & known.keys()]
        return {rank: known[rank] for rank in writers}

    def _publish(self, step: int, result: SaveResult, parts: dict[int, bytes]) -> None:
        if len(parts) != len(self.place.replicas):
            raise NotSaveable(f"{len(parts)} of {len(self.place.replicas)} shards of step {step} are known")
        if note := self.source.publish(result, parts):
            log.warning("%s", note)
            self.processor.tell(m.Noted(text=m.encodable(note)))

    def exit(self, ctx: Any) -> None:
        """MindSpore mode only: the end of the process, with a code that tells (torch mode: 2 after 10 s)."""
        self.leave()

    # -- in place ---------------------------------------------------------------------------------

    def renumber(self, place: Place) -> None:
        """This rank is at `place` among those that are there from now on."""
        self.place, self._members = place, ()
        if place.world_size == self._complete:
            self._there = ()

    def _in_place(self) -> InPlace:
        if self._there:  # and MindIO counts the ranks otherwise
            raise NotSaveable(FEWER)
        found = in_place_of(self.source)
        if found is None or not self.strategies.any_in_place:
            raise NotSaveable(self.strategies.refused.get("retry", "this adapter cannot continue in the same process"))
        return found

    def stop(self, args: Any, ctx: Any) -> None:
        """Abort what the device does, so that the training thread raises.

        Before a dump only where TTP_STOP_CLEAN_BEFORE_DUMP=1 asks for it: our saves read the state of a rank that is
        stuck in a collective as it is, so they need no stop, and are done earlier.
        """
        self.parking.stopped()
        stop_device()
        if (in_place := in_place_of(self.source)) is not None:
            in_place.stop()

    def clean(self, is_uce_error: bool, args: Any, ctx: Any) -> int:
        """0: good, 1: not, 2: memory is good without a repair; a plain int."""
        if (in_place := in_place_of(self.source)) is not None:
            found = int(in_place.clean(bool(is_uce_error)))
            restart_device()
            # A 1 would have MindX start this healthy process anew, and with it what it holds would be gone. The next
            # order to it fails instead, and a dump may follow (docs/facts/mindio_tft.md §7.1).
            return 0 if found == 1 and self.strategies.more else found
        return 1 if is_uce_error else 0

    def repair(
        self, step: int, need_rebuild: bool, error_ranks: Any, repair_info: Mapping[str, Any], args: Any, ctx: Any
    ) -> None:
        """On those that give state and those that take it.

        Where no rank is left that could give it, MindIO wants everybody to load the last checkpoint: that is what a
        restart does, with our verification.
        """
        if int(repair_info.get("repair_type", 0)) in package.LOADS:
            raise NotSaveable("no rank holds the state: the job must start again, from its newest good checkpoint")
        self.parking.repair(repair_info)
        self._in_place().repair(step, dict(repair_info), bool(need_rebuild))

    def _write_first(self, step: int) -> None:
        """All are to begin with a checkpoint: one holder writes each shard, that of the first one publishes them all.

        It is there when MindIO lets the first rank go on, which it does when all have answered. The training threads
        are parked meanwhile, so that where anything fails the state is there for the dump that follows.
        """
        deadline = _clock.monotonic() + int(os.environ[limits.ACTION]) - MARGIN
        groups, rank = self.place.replicas, self.place.rank
        shard = next(number for number, group in enumerate(groups) if rank in group)
        first = min(groups[shard])
        if self.status.durable >= step or not self.parking.stands_for(self._there[first] if self._there else first):
            return
        self._write(step, f"MindIO has all ranks begin again with step {step}")
        if shard:
            return
        while len(parts := self._parts(step)) < len(groups) and _clock.monotonic() < deadline:
            threading.Event().wait(ASK)
        self._publish(step, self._saved[step], parts)
        self.status.durable = step

    def rollback(self, step: int, args: Any, ctx: Any) -> None:
        """On all ranks; the status word goes back, too."""
        in_place = self._in_place()
        if in_place.from_files:
            self._write_first(step)
        in_place.rollback(step)
        self.status.step = self.status.begun = step
        self.status.inside = self.status.passing = False
        self.status.broken = "it has not got its state from another rank yet" if self.parking.takes else ""
        self.parking.rolled_back(step)

    def rebuild_group(self, fault_ranks: Any, args: Any, ctx: Any) -> None:
        """Ranks were started anew."""
        self.parking.stays()
        if not self.strategies.recover:
            raise NotSaveable(self.strategies.refused.get("recover", "no new process can take a lost rank's place"))
        lost = [int(rank) for rank in fault_ranks]
        self._in_place().rebuild(lost)
        self.parking.rebuilt(tuple(lost))

    def zit_downgrade_rebuild(self, dp_ranks: Any, world_ranks: Any, args: Any, zit_param: str) -> None:
        """These ranks go on without the others: no repair and no rollback follow (docs/facts/mindio_tft.md §7.4).

        MindIO names no step: it has had every rank reach the same one, and the ranks compare theirs.
        """
        self._in_place()
        in_place = self._resizes()
        members = scaled_in(world_ranks, dp_ranks, zit_param, self.place)
        self._resize(in_place, self.status.step, members)
        self._there = members

    def _resizes(self) -> GoesOnWithFewer:
        found = in_place_of(self.source)
        if not self.strategies.elastic or not isinstance(found, GoesOnWithFewer):
            raise NotSaveable(self.strategies.refused.get("elastic-training", "elastic-training was not asked for"))
        return found

    def _resize(self, in_place: GoesOnWithFewer, step: int, members: tuple[int, ...]) -> None:
        self._outside(step)
        in_place.resize(self.parking.number + 1, step, members, self.parking.gives)
        if in_place.from_files:
            self._write_first(step)
        self.status.begun = step
        self.parking.resized(step, members)

    def zit_upgrade_rebuild(self, rank_list: Any, args: Any, zit_param: str) -> None:
        """Ranks that were missing have new processes, which get this order as well (`early`)."""
        in_place = self._resizes()
        self._members = scaled_out(rank_list, zit_param, self._there, self._complete)
        lost = tuple(rank for rank, before in enumerate(self._members) if before == NEW)
        in_place.takes_in(lost)
        self.parking.rebuilt(lost)

    def zit_upgrade_repair(
        self, step: int, need_rebuild: bool, error_ranks: Any, repair_info: Mapping[str, Any], args: Any, zit_param: str
    ) -> None:
        """On those that give their state to a new process, and on that one. All has to be asked for in its order."""
        if int(repair_info.get("repair_type", 0)) in package.LOADS:
            raise NotSaveable("no rank holds the state: the job must start again, from its newest good checkpoint")
        self.parking.repair(repair_info)
        if self.parking.takes:
            raise NotSaveable(f"rank {self.place.rank} has gone on, and holds the state itself")

    def zit_upgrade_rollback(self, step: int, args: Any, zit_param: str) -> None:
        """On all ranks: with that step they go on, in the numbers of the complete job."""
        if not self._members:
            raise NotSaveable("no order has said which ranks are there again")
        self._resize(self._resizes(), step, self._members)

    def stream_sync(self) -> None:
        """After a pause took effect."""
        if (in_place := in_place_of(self.source)) is not None:
            in_place.synchronize()


def stop_device() -> None:
    """Torch mode's own way to end what hangs on the device; nothing where there is no NPU."""
    _device("stop_device")


def restart_device() -> None:
    """Make a device that was stopped usable again."""
    _device("restart_device")


def _device(name: str) -> None:
    if package.for_mindspore():
        return
    try:
        import torch_npu  # type: ignore[import-not-found, unused-ignore]

        npu = torch_npu.npu
        getattr(npu, name)(npu.current_device())
    except (ImportError, AttributeError) as error:
        log.warning("the device does not know %s: %s", name, error)

