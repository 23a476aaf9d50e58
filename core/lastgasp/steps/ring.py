"""The marks ring as its flusher, its recovery and its tests see it: header, names, records (`format`).

About locks: a POSIX record lock is lost when its process closes *any* descriptor of the file. A
process that opened its own ring and closed it again would appear dead, so `RingReader` reads such a ring through
the existing mapping.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from weakref import WeakValueDictionary

from lastgasp.errors import LastgaspError

from . import format as layout

own: WeakValueDictionary[tuple[int, int], mmap.mmap] = WeakValueDictionary()
"""This process's own rings by device and inode."""


class RingDamaged(LastgaspError):
    """A file that is not a marks ring, or not one that this version can read.

    Args:
        path: the file.
        reason: what is wrong with it.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path} is not a marks ring of version {layout.VERSION}: {reason}. Remove it.")


@dataclass(frozen=True)
class Name:
    """What a range is called.

    Attributes:
        text: a `{}` in it stands for the record's value.
        domain: `default`, `communication`, or whatever its owner chose.
        bit: what switches it (`bits`).
        stream: four rows instead of two.
    """

    text: str
    domain: str
    bit: int
    stream: bool


CONSTANT = {"magic": layout.MAGIC, "version": layout.VERSION, "record_size": layout.RECORD.size}
"""Fields that every ring of this version has alike."""
_WORDS = {name: at // 8 for name, at in layout.OFFSETS.items() if at < 64 and name not in ("version", "record_size")}
_HALVES = {name: at // 4 for name, at in layout.OFFSETS.items() if name not in _WORDS}
_SIGNED = {"wall_offset": 1 << 64, "device": 1 << 32}


class View:
    """Header, directory, names and records of a ring in memory: what `format` describes, as Python values.

    Args:
        memory: the entire ring; writable if something is to be written.
    """

    _memory = _words = _halves = memoryview(b"")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        # One load or store each, so that no other process sees a partial number.
        self._words, self._halves = memory[: layout.PAGE].cast("Q"), memory[: layout.PAGE].cast("I")

    def __getitem__(self, field: str) -> int:
        """A field of the header: any of `format.OFFSETS`."""
        raw = self._words[_WORDS[field]] if field in _WORDS else self._halves[_HALVES[field]]
        modulus = _SIGNED.get(field, 0)
        return raw - modulus if modulus and raw >= modulus // 2 else raw

    def __setitem__(self, field: str, value: int) -> None:
        if field in _WORDS:
            self._words[_WORDS[field]] = value % (1 << 64)
        else:
            self._halves[_HALVES[field]] = value % (1 << 32)

    @property
    def directory(self) -> str:
        """The rank's profiling directory; empty if not known yet."""
        at = layout.DIRECTORY_AT
        length = int.from_bytes(self._memory[at : at + 2], "little")
        return os.fsdecode(bytes(self._memory[at + 2 : at + 2 + min(length, layout.DIRECTORY_MAX)]))

    @directory.setter
    def directory(self, text: str) -> None:
        raw, at = os.fsencode(text), layout.DIRECTORY_AT
        self._memory[at : at + 2] = bytes(2)
        self._memory[at + 2 : at + 2 + len(raw)] = raw
        self._memory[at : at + 2] = len(raw).to_bytes(2, "little")

    def names(self, first: int = 0) -> list[Name]:
        """All names from slot `first` on, in the order of their slots."""
        return [self._name(slot) for slot in range(first, min(self["names"], layout.NAMES_MAX))]

    def _name(self, slot: int) -> Name:
        at = layout.NAMES_AT + slot * layout.NAME_SIZE
        bit, flags, domain, text = layout.NAME.unpack_from(self._memory, at)
        raw = bytes(self._memory[at + layout.NAME.size : at + layout.NAME_SIZE])
        return Name(
            text=raw[domain : domain + text].decode("utf-8", "replace"),
            domain=raw[:domain].decode("utf-8", "replace"),
            bit=bit,
            stream=bool(flags & layout.STREAM),
        )

    def put_name(self, slot: int, name: Name) -> None:
        """Write one; a text that does not fit is cut at a character."""
        domain = name.domain.encode("utf-8", "replace")
        text = name.text.encode("utf-8", "replace")[: layout.NAME_SIZE - layout.NAME.size - len(domain)]
        text = text.decode("utf-8", "ignore").encode()
        at = layout.NAMES_AT + slot * layout.NAME_SIZE
        flags = layout.STREAM if name.stream else 0
        layout.NAME.pack_into(self._memory, at, name.bit, flags, len(domain), len(text))
        at += layout.NAME.size
        self._memory[at : at + len(domain) + len(text)] = domain + text
        self["names"] = max(self["names"], slot + 1)

    def records(self, limit: int) -> bytes:
        """At most `limit` records that are not on disk yet, oldest first; a copy."""
        capacity, tail = self["capacity"], self["tail"]
        count = min(limit, self["head"] - tail)
        first = tail % capacity
        before_the_end = min(count, capacity - first)
        parts = (first, before_the_end), (0, count - before_the_end)
        size, at = layout.RECORD.size, layout.RECORDS_AT
        return b"".join(bytes(self._memory[at + a * size : at + (a + n) * size]) for a, n in parts)

    def consumed(self, count: int) -> None:
        """The oldest `count` records are on disk: their places are free.

        Raises:
            ValueError: more than there are.
        """
        tail = self["tail"]
        if not 0 <= count <= self["head"] - tail:
            raise ValueError(f"{count} records on disk of {self['head'] - tail} that there are")
        self["tail"] = tail + count

    def without_records(self) -> View:
        """A copy of all but the records."""
        return View(memoryview(bytearray(self._memory[: layout.RECORDS_AT])))

    def release(self) -> None:
        """Release the memory."""
        for view in (self._words, self._halves, self._memory):
            view.release()


class RingReader(View):
    """A ring file of any process, alive or dead. It writes only the count of `consumed`, and only after `claim`.

    Args:
        path: the ring file.

    Raises:
        RingDamaged: another user's file, wrong magic, version or sizes.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = -1
        status = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            # In a directory where anyone may write, such a file could send our rows anywhere.
            raise RingDamaged(path, "not a regular file of this user")
        mapping = own.get((status.st_dev, status.st_ino))
        self.mine = mapping is not None
        try:
            super().__init__(memoryview(mapping if mapping is not None else self._map()))
            self._check()
        except BaseException:
            self.close()
            raise

    def _map(self) -> mmap.mmap:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        size = os.fstat(self._descriptor).st_size
        if size < layout.size_of(1):
            raise RingDamaged(self.path, f"only {size} bytes")
        return mmap.mmap(self._descriptor, size)

    def _check(self) -> None:
        for field, expected in CONSTANT.items():
            if self[field] != expected:
                raise RingDamaged(self.path, f"{field} is {self[field]:#x}, expected {expected:#x}")
        # This process's own threads may write between the two reads. Another process may, too, but it holds the lock.
        capacity, waiting = self["capacity"], 0 if self.mine else self["head"] - self["tail"]
        if capacity.bit_count() != 1 or layout.size_of(capacity) > self._memory.nbytes:
            raise RingDamaged(self.path, f"a capacity of {capacity} in {self._memory.nbytes} bytes")
        if not 0 <= waiting <= capacity or self["names"] > layout.NAMES_MAX:
            raise RingDamaged(self.path, f"{waiting} records of {capacity}, {self['names']} names")

    def claim(self) -> bool:
        """Take the dead owner's place until `close`; False if the owner lives or another process has claimed it."""
        if self.mine:
            return False
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return os.fstat(self._descriptor).st_nlink > 0

    def close(self) -> None:
        """Close the file; idempotent."""
        self.release()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RingReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
