"""Survivors agree without a controller, by small files in the checkpoint directory that they share.

Where each rank holds a part of its own, none can save alone: the launcher was killed and its ranks train on, or the
first host of three or more is lost, and each of the others has the parts of its own ranks and the copies of one other
host's. So each rank writes down what it and its host hold. The first that finds a step of which every
shard is held writes the plan, which only one can; the ranks that it names save, and the first of these publishes. Every
wait has a deadline; whoever falls over one gives up, as without this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from lastgasp import _clock
from lastgasp._fs import DISK, STALE_AFTER_S, make_directory, read_bounded, write_all, write_atomically
from lastgasp.errors import DeadlineExceeded, NotSaveable
from lastgasp.topology import Place, ReplicaGroups

from .arena_decision import ArenasHeld, decide_with_arenas
from .decision import Decision, GiveUp, RankView, SavePlan

log = logging.getLogger("lastgasp")

MEET = 90.0
"""Seconds to hear of the others. A kernel takes 13 s to find that a host is lost, and a rank that waits for that host
in a collective gives it as long again."""
HERE = 20.0
"""The same where no host has copies of another one's shards, so that only those that live hold anything."""
SETTLED = 1.0
"""Seconds without another rank after which the plan is made; ranks of one host come within milliseconds."""
LOOK = 0.02
"""Seconds between two looks at the files."""
_BEGIN = ".survivors-"
_PLAN, _PUBLISHED = "plan", "published"
_LONGEST = 64 << 20
_File = TypeVar("_File")


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """What one survivor holds, and what it finds at its host's launcher.

    Attributes:
        why: why its own state cannot be saved; empty where it can.
        arenas: of ranks of its host, with their steps; copies: of ranks of another host.
    """

    rank: int
    host: str
    step: int
    durable: int
    why: str = ""
    arenas: dict[int, tuple[int, ...]]
    copies: dict[int, tuple[int, ...]]


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What one saver has written; `why` says why not."""

    part: bytes = b""
    nbytes: int = 0
    why: str = ""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Where the checkpoint of `step` stands; `why` says why there is none.

    elsewhere: it is the one that the controller's side has saved.
    """

    step: int = -1
    path: str = ""
    elsewhere: bool = False
    nbytes: int = 0
    why: str = ""


def decide_together(seats: Mapping[int, Seat], replicas: ReplicaGroups, world_size: int) -> Decision:
    """What these survivors can save together: `decide_with_arenas` with all that they have said. Pure."""
    views = tuple(_view(rank, seats.get(rank)) for rank in range(world_size))
    arenas: dict[int, tuple[int, ...]] = {}
    hosts: dict[int, str] = {}
    copies: dict[int, tuple[str, tuple[int, ...]]] = {}
    for seat in seats.values():
        arenas |= seat.arenas
        hosts |= dict.fromkeys((*seat.arenas, seat.rank), seat.host)
        copies |= {rank: (seat.host, steps) for rank, steps in seat.copies.items()}
    arenas |= {rank: seat.arenas[rank] for rank, seat in seats.items() if rank in seat.arenas}  # its own word counts
    durable = max((seat.durable for seat in seats.values()), default=0)
    decision = decide_with_arenas(views, replicas, durable, ArenasHeld(arenas, hosts, copies))
    return or_lost(decision, max((seat.step for seat in seats.values()), default=-1), durable)


def or_lost(decision: Decision, step: int, durable: int) -> Decision:
    """The decision, but that a step which a live rank has completed is lost where nobody else is known to have it.

    Args:
        step: the newest that a live rank has completed; durable: that is on disk.
    """
    if isinstance(decision, SavePlan | GiveUp) or step <= durable:
        return decision
    reason = f"step {step} is held of some shards only: nothing is known of the other ranks"
    return GiveUp(reason=reason, unused=decision.unused, lost=step - durable)


def unknown(rank: int) -> RankView:
    """A rank of which nothing is known."""
    return RankView(rank=rank, step=-1, holds=False, alive=False, why="unknown: the controller is gone")


def _view(rank: int, seat: Seat | None) -> RankView:
    if seat is None:
        return unknown(rank)
    return RankView(rank=rank, step=seat.step, holds=not seat.why, why=seat.why, writes=True)


class Meeting:
    """Where the survivors of one incarnation meet. Called on a thread of its own, for which nobody waits without end.

    Args:
        directory: of the checkpoints; place: who this rank is.
        since_s: when the lost controller had started: of another run of the same job nothing is taken.
    """

    def __init__(self, directory: Path, place: Place, since_s: int) -> None:
        self._place = place
        name = f"{prefix_of(place.job)}{since_s}-{place.attempt}.{place.incarnation}"
        self._folder = directory / name

    def join(self, seat: Seat) -> None:
        """Say what this rank holds. Raises OSError."""
        make_directory(self._folder)
        self._put(f"rank-{seat.rank}", seat)

    def agree(self, seconds: float, look_elsewhere: Callable[[], None]) -> Decision:
        """The plan, which is the same for all who have one; or why there is none.

        Args:
            seconds: to wait for others.
            look_elsewhere: called about once a second; what it raises ends the wait.

        Raises:
            OSError: the files cannot be read or written.
        """
        begun = now = changed = looked = _clock.monotonic()
        known: set[int] = set()
        world = self._place.world_size
        while True:
            if (plan := self._get(_PLAN, SavePlan)) is not None:
                return plan
            seats = self._seats()
            if seats.keys() != known:
                known, changed = set(seats), now
            decision = decide_together(seats, self._place.replicas, world)
            whole = len(seats) == world
            if isinstance(decision, SavePlan) and (whole or now - changed >= SETTLED):
                return self._claim(decision)
            if whole:
                return decision
            if now - begun >= seconds:
                return self._leave() or decision
            if now - looked >= SETTLED:
                looked = now
                look_elsewhere()
            threading.Event().wait(LOOK)
            now = _clock.monotonic()

    def called(self) -> bool:
        """Whether a rank has come. Never raises; may wait for the disk."""
        try:
            return any(name.startswith("rank-") for name in os.listdir(self._folder))
        except OSError:
            return False

    def _leave(self) -> SavePlan | None:
        """No plan counts on this rank from now on; returns one that has done so already."""
        (self._folder / f"rank-{self._place.rank}").unlink(missing_ok=True)
        return self._get(_PLAN, SavePlan)

    def wrote(self, written: Written) -> None:
        """This rank has done its part of the plan, or could not."""
        self._put(f"part-{self._place.rank}", written)

    def parts(self, savers: Collection[int], deadline: float) -> dict[int, Written]:
        """What all savers have written.

        Raises:
            NotSaveable: one could not.
            DeadlineExceeded: one has said nothing by `deadline`, monotonic seconds.
        """
        found: dict[int, Written] = {}
        for rank in sorted(set(savers)):
            found[rank] = self._await(f"part-{rank}", Written, deadline)
            if found[rank].why:
                raise NotSaveable(f"rank {rank}: {found[rank].why}")
        return found

    def publish(self, published: Published) -> None:
        """Tell the others how it ended."""
        self._put(_PUBLISHED, published)

    def published(self, deadline: float) -> Published:
        """How it ended. Raises DeadlineExceeded."""
        return self._await(_PUBLISHED, Published, deadline)

    # -- files ------------------------------------------------------------------------------------

    def _claim(self, plan: SavePlan) -> SavePlan:
        """Make it the plan, unless there is one; returns that which counts."""
        try:
            fd = DISK.create(self._folder / _PLAN)
        except FileExistsError:
            return self._await(_PLAN, SavePlan, _clock.monotonic() + MEET)
        try:
            write_all(fd, memoryview(msgspec.msgpack.encode(plan)), 0)
            DISK.fsync(fd)
        finally:
            os.close(fd)
        return plan

    def _seats(self) -> dict[int, Seat]:
        names = [name for name in os.listdir(self._folder) if name.startswith("rank-")]
        found = [seat for name in names if (seat := self._get(name, Seat)) is not None]
        return {seat.rank: seat for seat in sorted(found, key=lambda seat: seat.rank)}

    def _put(self, name: str, what: msgspec.Struct) -> None:
        write_atomically(self._folder / name, msgspec.msgpack.encode(what))

    def _get(self, name: str, kind: type[_File]) -> _File | None:
        """None where it is not there yet, or not to its end."""
        try:
            return msgspec.msgpack.decode(read_bounded(self._folder / name, _LONGEST), type=kind)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _await(self, name: str, kind: type[_File], deadline: float) -> _File:
        begun = _clock.monotonic()
        while (found := self._get(name, kind)) is None:
            if _clock.monotonic() >= deadline:
                waited = deadline - begun
                raise DeadlineExceeded(f"{name} of {self._folder}", waited, "Do all hosts see this directory?")
            threading.Event().wait(LOOK)
        return found


def remove_meetings(directory: Path, job: str) -> None:
    """Remove what earlier recoveries of this job have left, and what is a day old of any. Never raises."""
    for folder in directory.glob(f"{_BEGIN}*"):
        with contextlib.suppress(OSError):
            old = _clock.wall_ns() / 1e9 - folder.stat().st_mtime > STALE_AFTER_S
            if old or folder.name.startswith(prefix_of(job)):
                shutil.rmtree(folder, ignore_errors=True)


def prefix_of(job: str) -> str:
    """Begins the names of the folders in which ranks of that job meet."""
    return f"{_BEGIN}{xxhash.xxh3_64_hexdigest(job.encode())}-"
