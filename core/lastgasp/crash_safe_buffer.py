"""A crash-safe buffer: the last few auxiliary states of a rank, in memory that outlives its SIGKILL.

The memory is a memfd. A process with a descriptor of it (the controller opens `/proc/PID/fd/N` while the rank
lives) can read it after the rank's death. Writing takes no lock and no system call: each record goes to the next
of a few slots between two sequence numbers, so that a torn record is detected and never returned.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import struct

from lastgasp.errors import ConfigError
from lastgasp.memory_file import memory_file

_PAGE = 4096
_HEADER = 64
_MAGIC = int.from_bytes(b"LGBBOX01", "little")
_FILE = struct.Struct("<qqq")  # magic, number of slots, bytes of one slot
_SLOT = struct.Struct("<qqqqqq")  # magic, seq_begin, step, settled, length, seq_end
_BEGIN, _STEP, _SETTLED, _LENGTH, _END = 1, 2, 3, 4, 5


class CrashSafeBuffer:
    """Rotating slots of records, each for one step. One writer; any number of readers, of any process.

    Settled records rotate through all slots; after the first unsettled one each kind has half of them, so that a step
    with many unsettled records overwrites no settled one, and a killed writer leaves the previous unsettled one.

    Args:
        capacity: greatest payload of one record, bytes.
        slots: how many records are kept. Four hold the settled records of two steps and two unsettled ones.

    Raises:
        ConfigError: files, and so this memory, may not be as large (`ulimit -f`).

    All memory is touched here, because the first touch costs ten times the copy (docs/facts/limits.md §5).
    """

    def __init__(self, capacity: int, slots: int = 4) -> None:
        if capacity < 0 or slots < 2:
            raise ValueError(f"capacity={capacity}, slots={slots}: expected capacity >= 0 and slots >= 2")
        self.fd = memory_file("lastgasp-blackbox")
        self.slots = slots
        self.slot = 0
        self.payloads: list[memoryview] = []
        self._seq = 0
        self._order: list[list[int]] = [[], list(range(slots))]  # of unsettled and settled records, oldest first
        self._closed = False
        try:
            self._map(capacity)
        except BaseException:
            self.close()
            raise

    def _map(self, capacity: int) -> None:
        size = -(-(_HEADER + capacity) // _PAGE) * _PAGE
        self.capacity = size - _HEADER
        total = _PAGE + size * self.slots
        os.ftruncate(self.fd, 0)  # readers see no magic until the new layout is complete
        self._resize(total)
        memory = memoryview(mmap.mmap(self.fd, total, mmap.MAP_SHARED))
        memory[:] = bytes(total)
        starts = [_PAGE + size * i for i in range(self.slots)]
        self._headers = [memory[at : at + _HEADER].cast("q") for at in starts]
        self.payloads = [memory[at + _HEADER : at + size] for at in starts]
        for header in self._headers:
            header[0] = _MAGIC
        _FILE.pack_into(memory, 0, _MAGIC, self.slots, size)

    def _resize(self, total: int) -> None:
        try:
            os.posix_fallocate(self.fd, 0, total)  # a file system that is full says so here, not by SIGBUS
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            remedy = "Files of checkpoints could not be larger either: see `ulimit -f`, and set it to unlimited."
            raise ConfigError("RLIMIT_FSIZE", limit, f"at least {total} bytes", remedy) from error

    def grow(self, capacity: int) -> None:
        """Make room for payloads of `capacity` bytes, under the same descriptor. All records are lost.

        Views of the old slots stay valid memory but are no longer read.
        """
        self._map(capacity)

    def begin(self, step: int, settled: bool) -> memoryview:
        """Open the next slot for a record of `step` and return its payload, `capacity` bytes.

        Its number is `slot`. It still contains an earlier record, so that unchanged parts need not be written
        again. Until `end` the slot counts as torn.

        Args:
            step: completed optimizer updates.
            settled: True when captured at the boundary of `step`, False when captured just before the
                update that makes `step`.
        """
        self._seq = seq = self._seq + 1
        order = self._order[settled] or self._share()
        slot = order.pop(0)
        order.append(slot)
        self.slot, header = slot, self._headers[slot]
        header[_BEGIN] = seq
        header[_STEP] = step
        header[_SETTLED] = settled
        return self.payloads[slot]

    def _share(self) -> list[int]:
        """Reserve the oldest slots for unsettled records."""
        order = self._order[True]
        unsettled = order[: self.slots - self.slots // 2]
        del order[: len(unsettled)]
        self._order[False] = unsettled
        return unsettled

    def end(self, length: int) -> None:
        """Close the slot that `begin` opened; its record is the first `length` bytes of the payload."""
        header = self._headers[self.slot]
        header[_LENGTH] = length
        header[_END] = self._seq

    def close(self) -> None:
        """Close the descriptor. The memory lives on while a reader holds another one. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)

    @staticmethod
    def read(fd: int, step: int) -> bytes | None:
        """Return the record of `step` in the buffer behind `fd`, or None if there is no complete one.

        Settled records take precedence over unsettled ones, then newer over older. Safe while the writer writes.

        Raises:
            OSError: `fd` cannot be read.
        """
        layout = os.pread(fd, _FILE.size, 0)
        if len(layout) < _FILE.size:
            return None
        magic, slots, size = _FILE.unpack(layout)
        if magic != _MAGIC:
            return None
        starts = [_PAGE + size * i for i in range(slots)]
        found = [_header(fd, at) for at in starts]
        ranked = sorted(
            ((h[_SETTLED], h[_END], at) for h, at in zip(found, starts, strict=True) if _whole(h, step)),
            reverse=True,
        )
        for _, _, at in ranked:
            if (payload := _payload(fd, at, step)) is not None:
                return payload
        return None


def newest_step(fd: int) -> int | None:
    """Return the newest step whose boundary is recorded in the buffer behind `fd`, or None."""
    layout = os.pread(fd, _FILE.size, 0)
    if len(layout) < _FILE.size or _FILE.unpack(layout)[0] != _MAGIC:
        return None
    _, slots, size = _FILE.unpack(layout)
    headers = [_header(fd, _PAGE + size * i) for i in range(slots)]
    return max((h[_STEP] for h in headers if h[_SETTLED] and _whole(h, h[_STEP])), default=None)


def _header(fd: int, at: int) -> tuple[int, ...]:
    raw = os.pread(fd, _SLOT.size, at)
    return _SLOT.unpack(raw) if len(raw) == _SLOT.size else (0,) * 6


def _whole(header: tuple[int, ...], step: int) -> bool:
    return header[0] == _MAGIC and 0 < header[_BEGIN] == header[_END] and header[_STEP] == step


def _payload(fd: int, at: int, step: int) -> bytes | None:
    before = _header(fd, at)
    payload = os.pread(fd, before[_LENGTH], at + _HEADER)
    same = _whole(before, step) and before == _header(fd, at)
    return payload if same and len(payload) == before[_LENGTH] else None
