"""When a step's shards are copied into the arena: every step, every N-th one, or none."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Literal

import msgspec

from lastgasp import _clock
from lastgasp import arena as arenas
from lastgasp.arena import Arena
from lastgasp.errors import LastgaspError
from lastgasp.ports import Gather
from lastgasp.testing import faults
from lastgasp.topology import ReplicaGroups, host_identity

log = logging.getLogger("lastgasp")

ArenaMode = int | Literal["auto"]
"""Steps between two copies; 0 copies none; auto chooses."""
BuddyMode = int | Literal["auto"]
"""Steps between two copies that go to a partner host; 0: none go there; auto: all that are made."""
BUDGET = 0.01
"""The part of a step's time that copies may take where N is chosen."""
WARM_UP, MEASURED = 2, 8
"""Copies that are not measured, and those that are before N is chosen."""
ROOM = 1 << 16
"""Bytes by which a payload may grow (names, counters) before the arena must."""


class _Memory(msgspec.Struct, frozen=True, array_like=True):
    host: str
    size: int
    """Of what is to be copied, where more memory is needed for it; else 0."""
    available: int | None
    buddy: str


class _Wish(msgspec.Struct, frozen=True, array_like=True):
    host: str
    buddy: bool


def lost_with_a_host(replicas: ReplicaGroups, gather: Gather, buddy: BuddyMode) -> bool:
    """Whether copies are to go to partner hosts, and one of several hosts has all holders of a shard.

    All ranks call it together, and find the same.

    Args:
        gather: among all ranks; buddy: this rank's setting.

    Raises:
        ControlError, DeadlineExceeded: as `gather`.
    """
    parts = gather("arenas/hosts", msgspec.json.encode(_Wish(host_identity(), buddy != 0)))
    said = [msgspec.json.decode(part, type=_Wish) for part in parts]
    several = len({one.host for one in said}) > 1
    alone = any(len({said[rank].host for rank in shard}) == 1 for shard in replicas)
    return several and alone and any(one.buddy for one in said)


class Filling:
    """Fills this rank's arena. All methods are called on the training thread, by all ranks at the same steps.

    Args:
        arena: this rank's.
        mode: which steps are copied; buddy: which of these go to a partner host, where there is one.
        gather: among all ranks; note: tells people.

    Attributes:
        every: steps between two copies; 0 copies none.
        why_off: why none is copied although it was asked for; empty if that is not so.
    """

    def __init__(
        self,
        arena: Arena,
        mode: ArenaMode,
        gather: Gather,
        note: Callable[[str], None],
        rank: int,
        *,
        buddy: BuddyMode = 0,
    ) -> None:
        self._arena, self._gather, self._note, self._rank = arena, gather, note, rank
        self._buddy, arena.buddy, arena.rank = buddy, buddy != 0, rank
        self.every = 1 if mode == "auto" else mode
        self._choosing, self.why_off = mode == "auto", ""
        self._checked = False
        self._fills = 0
        self._copies: list[float] = []
        self._steps: list[float] = []
        self._began = _clock.monotonic()

    def fill(
        self, step: int, pieces: Callable[[], Sequence[bytes | memoryview]], settle: Callable[[], None] | None = None
    ) -> None:
        """Copy the state of `step`, if it is one of those that are copied. Never raises: training goes on without.

        Args:
            pieces: returns the payload; settle: waits for what the step itself has queued on a device, which is no
                part of the copy's time.
        """
        self._fills += 1
        if self._choosing and settle is not None:
            settle()
        began = _clock.monotonic()
        try:
            if self.every and step % self.every == 0:
                self._copy(step, pieces())
        except (OSError, ValueError, MemoryError) as error:
            if not self._checked:  # the other ranks wait for this one's answer
                self._checked = True
                with contextlib.suppress(LastgaspError):
                    self._too_little(step, 0)
            self._off(f"the arena of rank {self._rank} cannot be filled ({error})")
        if not self._choosing:
            return
        now = _clock.monotonic()
        self._copies.append(now - began)
        self._steps.append(began - self._began)
        self._began = now
        if self._fills == WARM_UP + MEASURED:
            self._choose(step)

    def _copy(self, step: int, payload: Sequence[bytes | memoryview]) -> None:
        size = sum(memoryview(piece).nbytes for piece in payload)
        if not self._checked:
            self._checked = True
            try:
                why = self._too_little(step, size + ROOM)
            except LastgaspError as error:  # a rank has just died, mostly: the step before may be what is saved
                self._off(f"the ranks could not compare their memory ({error})", forget=False)
                return
            if why:
                self._off(why)
                return
        self._reserve(size)
        apart = self.apart
        self._arena.copy(step, _with_fault(payload, step), buddy=apart > 0 and step % apart == 0)

    def _reserve(self, size: int) -> None:
        if size > self._arena.capacity:
            self._arena.reserve(size + ROOM)

    def copy_now(self, step: int, payload: Sequence[bytes | memoryview]) -> None:
        """Copy `step` whether it is one of those or not, once others have been. No other rank is needed for it.

        Raises:
            OSError, ValueError: it cannot be copied.
        """
        self._reserve(sum(memoryview(piece).nbytes for piece in payload))
        self._arena.copy(step, payload)

    @property
    def cannot(self) -> str:
        """Why `copy_now` cannot be called; empty if it can."""
        if not self.every:
            return self.why_off or "arena=off"
        return "" if self._arena.capacity else f"only every {self.every}th step is copied, and none was yet"

    @property
    def apart(self) -> int:
        """Steps between two copies that go to a partner host, a multiple of `every`; 0: none go."""
        if not self._buddy or not self.every:
            return 0
        return self.every if self._buddy == "auto" else self.every * -(-self._buddy // self.every)

    def _too_little(self, step: int, size: int) -> str:
        """Why the arenas of this host cannot be had; empty if they can. Asked of all ranks before any takes its own.

        Raises:
            LastgaspError: the ranks could not agree.
        """
        own = _Memory(
            host_identity(), size if size - ROOM > self._arena.capacity else 0, arenas.available(), str(self._buddy)
        )
        parts = self._gather(f"loop/arena/{step}", msgspec.json.encode(own))
        said = [msgspec.json.decode(part, type=_Memory) for part in parts]
        here = [one for one in said if one.host == own.host]
        self._pair(said, one_host=len(here) == len(said))
        total = sum(arenas.needed(one.size, self._arena.slots) for one in here if one.size)
        known = [one.available for one in here if one.available is not None]
        if self._rank == 0:
            log.info("arenas: %.0f MB of memory on each host with as many ranks as this one, so that a killed rank's "
                     "shard outlives it", total / 1e6)  # fmt: skip
        if known and total > arenas.SHARE * min(known):
            needs, has = f"{total / 1e6:.0f} MB", f"{min(known) / 1e6:.0f} MB"
            return f"the arenas of this host's {len(here)} ranks need {needs}, and {has} of memory are available"
        return ""

    def _pair(self, said: Sequence[_Memory], one_host: bool) -> None:
        """Whether copies go to a partner host: all ranks find the same."""
        asked = {one.buddy for one in said}
        if len(asked) > 1 and self._rank == 0:
            self._note(f"LASTGASP_BUDDY differs between ranks ({', '.join(sorted(asked))}; 0 is off): no copies go to "
                       "partner hosts, and the loss of a host costs the steps since the last checkpoint")  # fmt: skip
        if one_host or len(asked) > 1:
            self._buddy = 0
        self._arena.slots = arenas.BUDDY_SLOTS if self._buddy else arenas.SLOTS
        if self._buddy and self._rank == 0:
            which = "each copied step" if self._buddy == "auto" else f"the first copied step of each {self._buddy}"
            log.info("arenas: %s goes to a partner host, too, which takes as much memory there", which)

    def _off(self, why: str, forget: bool = True) -> None:
        """From now on none is copied. What is held of a training that was begun with it may be kept."""
        self.every, self.why_off = 0, why
        if forget:
            self._arena.forget()
        self._note(f"{why}: if a rank there is killed, training resumes from the last checkpoint before")

    def stop(self, why: str) -> None:
        """Copy nothing from now on, and ask no other rank. All ranks call it at the same step."""
        if self.every:
            self._arena.forget()
        self.every, self.why_off, self._choosing = 0, why, False

    def _choose(self, step: int) -> None:
        """Choose N by the slowest copy of all ranks, as a part of its steps; who copies nothing is asked, too."""
        self._choosing = False
        own = median(self._copies[WARM_UP:]) / max(median(self._steps[WARM_UP:]), 1e-9) if self.every else 0.0
        try:
            parts = self._gather(f"loop/arena/every/{step}", repr(own).encode())
        except LastgaspError as error:
            log.debug("how often arenas are filled was not agreed on: %s", error)
            return
        if not self.every:
            return
        worst = max(map(float, parts))
        self.every = every_of(worst)
        if self._rank == 0:
            which = "each step" if self.every == 1 else f"every {self.every}th step"
            log.info("arenas: a copy takes %.2g %% of a step, so %s is copied; a killed rank costs at most %d "
                     "completed steps", 100 * worst, which, self.every - 1)  # fmt: skip


def every_of(part: float) -> int:
    """N, by the part of a step that one copy takes."""
    return max(1, math.ceil(part / BUDGET - 1e-9))


def _with_fault(payload: Sequence[bytes | memoryview], step: int) -> Iterator[bytes | memoryview]:
    half = (len(payload) + 1) // 2
    yield from payload[:half]
    faults.fire_at("arena_copy", step - 1)
    yield from payload[half:]
