"""An arena: a copy of what one rank alone holds, in memory that outlives its SIGKILL.

The memory is a memfd with two slots, which take turns; each holds the payload of one step and its digest
(`arena_digest`), computed while copying. A process with a descriptor of it (the launcher opens `/proc/PID/fd/N` while
the rank lives) can read it after the rank's death. A slot is marked as torn before its first byte changes, and as
complete after its last one, so a kill in mid-copy leaves the other slot. The digest covers step, length and identity as
well. What does not verify is never returned, and never counts.

Where a partner host gets copies (a buddy), there are four slots: two for the steps that go there, so that this host
still holds such a step once it has arrived, and two for those in between.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lastgasp.arena_digest import Check, Digest
from lastgasp.errors import LastgaspError
from lastgasp.memory_file import memory_file

ID_BYTES = 16
NAME = "lastgasp-arena"
"""Of the memory, as /proc/PID/fd shows it."""
SLOTS, BUDDY_SLOTS = 2, 4
"""Of an arena, and of one whose steps go to a partner host."""
CHUNK = 1 << 19
"""Bytes that are copied and digested at a time: small enough to be still in a core's cache for the digest."""
SHARE = 0.8
"""The part of a host's available memory that arenas may take."""
_PAGE = 4096
_MAGIC = int.from_bytes(b"LGARENA2", "little")
_FILE = struct.Struct("<qq16sqqq")  # magic, bytes of one slot, identity, slots, rank, is a copy of another
_SLOT = struct.Struct("<qqq16sqq")  # seq_begin, step, length, digest, for the buddy, seq_end
_BEGIN, _STEP, _LENGTH, _DIGEST, _BUDDY, _END = 0, 1, 2, slice(3, 5), 5, 6
_MEMINFO = Path("/proc/meminfo")
_GROUPS, _CGROUP = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
_FILES_2 = "memory.max", "memory.current", "inactive_file"
"""Limit, use, and the name in `memory.stat` of what can be dropped, of both versions of control groups."""


class DamagedArena(LastgaspError):
    """What an arena holds is not what was copied into it, or not what was asked for."""


class Arena:
    """The writer's end; one per rank, and one thread at a time.

    Attributes:
        fd: descriptor of the memory.
        identity: random bytes that tell this arena from all others, so that a descriptor number that now belongs to
            something else is noticed.
        capacity: greatest payload, bytes; 0 until `reserve`.
        slots: how many `reserve` makes.
        buddy: steps that are marked for it are to go to a partner host.
        rank: whose it is, for who finds it without being told; -1 where that is not known.

    Args:
        identity, rank: of the arena that this one is a copy of; by default the identity is its own.
    """

    def __init__(self, identity: bytes = b"", rank: int = -1) -> None:
        self.fd = memory_file(NAME)
        self.identity, self._copy = identity or os.urandom(ID_BYTES), bool(identity)
        self.capacity, self.slots, self.buddy, self.rank = 0, SLOTS, False, rank
        self._seq = 0
        self._closed = False
        self._file = memoryview(bytearray(_FILE.size)).cast("q")
        self._headers: list[memoryview] = []
        self._payloads: list[memoryview] = []

    def reserve(self, capacity: int, *, touch: bool = True) -> None:
        """Make room for payloads of `capacity` bytes, and touch it: the first touch costs ten times the copy.

        The memory only grows, and growing loses what it held.

        Args:
            touch: False where the first copy may take its time.

        Raises:
            OSError: there is no such memory.
        """
        if capacity <= self.capacity:
            return
        size = _PAGE + -(-capacity // _PAGE) * _PAGE
        total = _PAGE + self.slots * size
        self._file[0] = 0  # readers find nothing until the new slots are in place
        os.posix_fallocate(self.fd, 0, total)  # a host without the memory says so here, not by SIGBUS in the copy
        memory = self._map(mmap.mmap(self.fd, total, mmap.MAP_SHARED), size)
        for header in self._headers:
            header[_BEGIN], header[_END] = 0, -1
        for at in range(0, total, _PAGE) if touch else ():
            memory[at] = memory[at]
        _FILE.pack_into(memory, 0, 0, size, self.identity, self.slots, self.rank, self._copy)
        self._file[0] = _MAGIC
        self.capacity = size - _PAGE

    def _map(self, mapped: mmap.mmap, size: int) -> memoryview:
        memory = memoryview(mapped)
        starts = [_PAGE + size * i for i in range(self.slots)]
        self._headers = [memory[at : at + _SLOT.size].cast("q") for at in starts]
        self._payloads = [memory[at + _PAGE : at + size] for at in starts]
        self._file = memory[: _FILE.size].cast("q")
        return memory

    def adopt(self, fd: int, identity: bytes, step: int) -> None:
        """Go on with the memory of another arena, that of this rank's predecessor; it keeps `step` and nothing else.

        What else it holds is of steps that will be done again.

        Args:
            fd: opened for writing, and from here on this arena's. The caller has verified that it holds `step`.

        Raises:
            DamagedArena: it does not; this arena is as it was.
            OSError: it cannot be mapped.
        """
        starts = _starts(fd, identity)
        found = [_slot(fd, at) for at in starts]
        kept = next((i for i, slot in enumerate(found) if slot.complete and slot.step == step), -1)
        if kept < 0:
            raise DamagedArena(f"the arena does not hold step {step}")
        size, self.slots = starts[1] - starts[0], len(starts)
        self._map(mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE), size)
        self._seq = found[kept].begin
        for i, header in enumerate(self._headers):
            if i != kept:
                header[_END] = -1
        os.close(self.fd)
        self.fd, self.identity, self.capacity = fd, identity, size - _PAGE

    def copy(self, step: int, pieces: Iterable[memoryview | bytes], *, buddy: bool = False) -> None:
        """Copy the state of `step` over the oldest slot of its kind.

        Args:
            pieces: contiguous bytes, all together at most `capacity`.
            buddy: this step is to go to a partner host.

        Raises:
            ValueError: they are more than that; the other slots are unharmed.
        """
        header, payload = self._begin(buddy)
        digest, at = Digest(self.identity, step), 0
        for each in pieces:
            piece = memoryview(each)
            size = piece.nbytes
            if at + size > self.capacity:
                raise ValueError(f"an arena of {self.capacity} bytes cannot hold {at + size}")
            for begin in range(0, size, CHUNK):
                part = piece[begin : begin + CHUNK]
                payload[at : at + len(part)] = part
                digest.update(part)
                at += len(part)
        header[_BUDDY] = buddy
        self._end(header, step, at, digest.end())

    def receive(self, step: int, length: int, digest: bytes, fill: Callable[[memoryview], None]) -> None:
        """Put the state of `step` from another host over the oldest slot.

        Args:
            length: of it, at most `capacity`; digest: that it must have.
            fill: fills what it is given, a chunk; called until all has come.

        Raises:
            DamagedArena: it has another digest; the other slots are unharmed.
        """
        header, payload = self._begin(False)
        found = Digest(self.identity, step)
        for begin in range(0, length, CHUNK):
            part = payload[begin : min(begin + CHUNK, length)]
            fill(part)
            found.update(part)
        if found.end() != digest:
            raise DamagedArena(f"what has come of step {step} does not match its digest")
        header[_BUDDY] = False
        self._end(header, step, length, digest)

    def _begin(self, buddy: bool) -> tuple[memoryview, memoryview]:
        self._seq += 1
        slot = self._oldest(buddy)
        self._headers[slot][_BEGIN] = self._seq
        return self._headers[slot], self._payloads[slot]

    def _end(self, header: memoryview, step: int, length: int, digest: bytes) -> None:
        header[_STEP], header[_LENGTH] = step, length
        header[_DIGEST] = memoryview(digest).cast("q")
        header[_END] = self._seq

    def _oldest(self, buddy: bool) -> int:
        """The slot that the next copy takes: a torn one, else the oldest of its kind, which has half of them."""
        held = [(header[_BEGIN], bool(header[_BUDDY]), i) for i, header in enumerate(self._headers)]
        for i, header in enumerate(self._headers):
            if header[_BEGIN] != header[_END]:
                return i
        same, others = [one for one in held if one[1] == buddy], [one for one in held if one[1] != buddy]
        idle = buddy and same and others and max(others) < min(same)  # all steps that are copied go there now
        return min(same if len(same) >= len(held) // 2 and not idle else others)[2]

    def forget(self) -> None:
        """Empty both slots: what they hold is of a training that is over."""
        for header in self._headers:
            header[_END] = -1

    def close(self) -> None:
        """Close the descriptor. The memory lives on while somebody else has one. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)


@dataclass(frozen=True)
class _Slot:
    begin: int
    step: int
    length: int
    digest: bytes
    buddy: int
    end: int

    @property
    def complete(self) -> bool:
        return 0 < self.begin == self.end


def steps(fd: int, identity: bytes, *, buddy: bool = False) -> tuple[int, ...]:
    """The steps that the arena behind `fd` holds, newest first; none if it is another arena, or none yet.

    Reads the headers alone, in microseconds: the payload is verified by who reads it.

    Args:
        buddy: only those that are to go to a partner host.
    """
    try:
        found = [_slot(fd, at) for at in _starts(fd, identity)]
    except (OSError, DamagedArena):
        return ()
    wanted = (slot.step for slot in found if slot.complete and (slot.buddy or not buddy))
    return tuple(sorted(wanted, reverse=True))


def whose(fd: int) -> tuple[int, bytes, bool] | None:
    """Rank and identity of the arena behind `fd`, and whether it is a copy on a partner host; None if it is none."""
    raw = os.pread(fd, _FILE.size, 0)
    if len(raw) < _FILE.size:
        return None
    magic, _, identity, _, rank, copy = _FILE.unpack(raw)
    return (rank, identity, bool(copy)) if magic == _MAGIC and rank >= 0 else None


@dataclass(frozen=True)
class Found:
    """Where the payload of a step lies in an arena's file, what digest it must have, and how much a slot can hold."""

    at: int
    length: int
    digest: bytes
    capacity: int


def find(fd: int, identity: bytes, step: int) -> Found | None:
    """Where `step` lies; None if the arena does not hold it (any more). Reads headers alone.

    Raises:
        DamagedArena: another arena, or none yet.
        OSError: `fd` cannot be read.
    """
    starts = _starts(fd, identity)
    capacity = starts[1] - starts[0] - _PAGE
    for at in starts:
        slot = _slot(fd, at)
        if slot.complete and slot.step == step and 0 <= slot.length <= capacity:
            return Found(at + _PAGE, slot.length, slot.digest, capacity)
    return None


class Reading(NamedTuple):
    """A payload, and what returns once it is known to be what was copied; that raises DamagedArena, each time."""

    payload: memoryview
    verify: Callable[[], None]


@contextlib.contextmanager
def verified(fd: int, identity: bytes, step: int) -> Iterator[memoryview]:
    """The payload of `step`, verified; at the end it is checked again, since its writer may be alive.

    Raises:
        DamagedArena: another arena, no such step, or not the bytes that were copied. At the end too: then what was
            made of the payload must be thrown away.
        OSError: `fd` cannot be read.
    """
    with reading(fd, identity, step) as found:
        found.verify()
        yield found.payload


@contextlib.contextmanager
def reading(fd: int, identity: bytes, step: int) -> Iterator[Reading]:
    """The same, but it is verified beside the caller, who may do until then what can be thrown away.

    The end of the block verifies in any case. Nothing of the payload may be unpickled before.

    Raises:
        DamagedArena, OSError: as `verified`.
    """
    for at in _starts(fd, identity):
        slot = _slot(fd, at)
        if slot.complete and slot.step == step:
            break
    else:
        raise DamagedArena(f"the arena does not hold step {step}, but {list(steps(fd, identity)) or 'none'}")
    if slot.length < 0 or os.fstat(fd).st_size < at + _PAGE + slot.length:
        raise DamagedArena(f"the arena's slot of step {step} says that it is longer than the arena")
    # A private mapping: nobody can change the arena through it, and torch takes its bytes without a warning. It is
    # unmapped when the last view of it is gone, which may be one of the caller's.
    payload = memoryview(mmap.mmap(fd, at + _PAGE + slot.length, access=mmap.ACCESS_COPY))[at + _PAGE :]
    with Check(payload, identity, step) as check:

        def verify() -> None:
            if check.result() != slot.digest:
                raise DamagedArena(f"the arena's copy of step {step} does not match its digest")

        yield Reading(payload, verify)
        verify()
    if _slot(fd, at) != slot:
        raise DamagedArena(f"the arena's copy of step {step} was overwritten while it was read")


def _starts(fd: int, identity: bytes) -> list[int]:
    """Where the slots begin. Raises DamagedArena for something else than the arena of that identity."""
    raw = os.pread(fd, _FILE.size, 0)
    if len(raw) < _FILE.size:
        raise DamagedArena("the arena holds nothing yet")
    magic, size, found, slots, _, _ = _FILE.unpack(raw)
    if magic != _MAGIC or found != identity or size <= 0 or slots not in (SLOTS, BUDDY_SLOTS):
        raise DamagedArena("it is another arena, or one that is being enlarged")
    return [_PAGE + size * i for i in range(slots)]


def _slot(fd: int, at: int) -> _Slot:
    raw = os.pread(fd, _SLOT.size, at)
    return _Slot(*_SLOT.unpack(raw)) if len(raw) == _SLOT.size else _Slot(0, -1, 0, b"", 0, -1)


# -- memory ---------------------------------------------------------------------------------------


def needed(payload: int, slots: int = SLOTS) -> int:
    """Bytes of memory that an arena for such payloads takes."""
    return _PAGE + slots * (_PAGE + -(-payload // _PAGE) * _PAGE)


def in_use(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Bytes of all arenas on this host, and how many there are, as far as this user may see their processes."""
    found: dict[int, int] = {}
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if Path(os.readlink(link)).name.removeprefix("memfd:").startswith(NAME):
                        stat = link.stat()
                        found[stat.st_ino] = stat.st_blocks * 512
    return sum(found.values()), len(found)


def available(meminfo: Path = _MEMINFO, groups: Path = _GROUPS, mounted: Path = _CGROUP) -> int | None:
    """Bytes that may still be taken on this host without swapping or a limit; None if it does not say."""
    found = [_host(meminfo), *_limits(groups, mounted)]
    return min((each for each in found if each is not None), default=None)


def _host(meminfo: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _limits(groups: Path, mounted: Path) -> Iterator[int | None]:
    """What the limits of this process's control groups leave, those of Slurm and systemd inside of others included."""
    with contextlib.suppress(OSError, ValueError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                roots = [mounted / "memory"] if controllers else [mounted, mounted / "unified"]
                names = _FILES_1 if controllers else _FILES_2
                parts = [part for part in path.split("/") if part not in ("", "..")]  # ..: outside of the container
                for root in roots:
                    yield from (_left(root.joinpath(*parts[:depth]), *names) for depth in range(len(parts) + 1))


def _left(group: Path, most: str, used: str, cached: str) -> int | None:
    """What the limit of one control group leaves; its file cache can be dropped."""
    with contextlib.suppress(OSError, ValueError):
        limit, taken = int((group / most).read_text()), int((group / used).read_text())
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = next((int(value) for name, value in lines if name == cached), 0)
        return max(0, limit - taken + cache)
    return None
