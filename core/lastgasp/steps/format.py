"""The marks ring in memory, version 1: the layout that the C writer, the Python writer and every reader share.

A ring is a file in shared memory (tmpfs), mapped by its rank. It survives the rank's SIGKILL, and suffices to write
the last marks to disk afterwards (`recover`): it names the rank's profiling directory.

    0        header (one page, `HEADER`)
    4096     texts: `directory`, the rank's profiling directory as the file system has it (`DIRECTORY_AT`, at most
             `DIRECTORY_MAX` bytes, 2-byte little-endian length first)
    8192     names: `NAMES_MAX` slots of `NAME_SIZE` bytes (`NAME`)
    RECORDS_AT  records: `capacity` (a power of two) slots of `RECORD.size` bytes

One record is one finished range, begin and end together, so that a range is never half on disk. Its slot is
`number % capacity`; the writer fills the slot and then stores `head = number + 1`. Where `head - tail ==
capacity` the ring is full: the range is dropped and counted in `dropped`. Only the flusher (or, after the
rank's death, the recovery) moves `tail`, and only once the rows are in the file.
"""

from __future__ import annotations

import struct

MAGIC = int.from_bytes(b"LGMARKS1", "little")
VERSION = 1
PAGE = 4096

HEADER = struct.Struct("<QIIQQQQQqIIIIIi")
"""magic, version, record size, capacity, head, tail, dropped, next id, wall offset (ns to add to a monotonic
time), mask of enabled bits (`bits`), number of names, pid, rank, world size, device id (-1: none)."""
OFFSETS = {
    "magic": 0,
    "version": 8,
    "record_size": 12,
    "capacity": 16,
    "head": 24,
    "tail": 32,
    "dropped": 40,
    "next_id": 48,
    "wall_offset": 56,
    "mask": 64,
    "names": 68,
    "pid": 72,
    "rank": 76,
    "world_size": 80,
    "device": 84,
}

DIRECTORY_AT = PAGE
DIRECTORY_MAX = PAGE - 2

NAMES_AT = 2 * PAGE
NAMES_MAX = 512
NAME_SIZE = 512
NAME = struct.Struct("<BBHHxx")
"""bit (`bits`), flags (`STREAM`), length of the domain, length of the text; both follow as UTF-8. A text may hold
one `{}`, in whose place the record's value is printed."""
STREAM = 1
"""A stream range: four rows (flags 16/32, host and device) instead of two (2/4)."""

RECORDS_AT = NAMES_AT + NAMES_MAX * NAME_SIZE
RECORD = struct.Struct("<QQQqQQII8x")
"""begin, end (monotonic ns), id, value, device begin, device end (monotonic ns; 0: not measured, the rows take the
host's), index of the name, thread id. 64 bytes: one cache line."""
DEFAULT_CAPACITY = 16384
"""1 MB: 16 s of 1000 ranges a second while the disk does not answer."""


def size_of(capacity: int) -> int:
    """Bytes of a ring of so many records."""
    return RECORDS_AT + capacity * RECORD.size
