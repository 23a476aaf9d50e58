"""Marks of one process: named ranges that cost next to nothing, written to a ring that survives the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from lastgasp.errors import ConfigError

from . import bits, ringfile, writer
from . import format as layout
from .ring import Name, View

HOST_ONLY = frozenset({"dataloader", "save_checkpoint"})
"""Names of the domain `default` that make two rows instead of four (docs/facts/taskd.md §6)."""
KEPT_SLOTS = 16
"""Name slots kept for the `other` of each kind, once the names have run out."""
OTHER = "other"


class Mark(Protocol):
    """A named range that any thread begins and ends repeatedly; each thread ends the range that it began.

    A range that begins while the mark is off is not recorded; one that begins while it is on is recorded at its
    end, even if switched off meanwhile. At most 64 ranges of one mark are open at once.
    """

    value: int
    """Printed in place of `{}` in the name, 64 bits with sign; taken when the range begins."""

    @property
    def name(self) -> int:
        """Slot of the name in the ring."""

    @property
    def bit(self) -> int:
        """Which bit of the mask switches it."""

    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...

    def begin(self) -> None:
        """As entering a `with`."""

    def end(self) -> None:
        """As leaving the `with`; without a begin it does nothing."""

    def end_as(self, value: int, /) -> None:
        """The same, with this value instead of the one that the range began with."""

    def cancel(self) -> bool:
        """Forget this thread's innermost range; False: there is none."""

    def put(self, begin: int, end: int, value: int, device_begin: int, device_end: int, /) -> bool:
        """See `Marks.put`."""


class Marks:
    """The marks of this process; make it with `Marks.open`, close it with `close`.

    In a forked child they are off for good: the ring belongs to the parent.

    Attributes:
        mark: `mark("forward")` is the mark of that name, always the same object; in the domain `default` for names in
            `bits.BIT_OF_MARK`, in `user` for others.
        path: the ring file; None where there was no room for one.
    """

    mark: Callable[[str], Mark]
    path: Path | None

    def __init__(self, file: ringfile.RingFile) -> None:
        make = writer.choose()
        self._file, self.path = file, file.path
        self._view = View(memoryview(file.mapping))
        self._make = make
        self._ring: writer.Ring = make.Ring(file.mapping, layout.RECORDS_AT)
        self._lock = threading.RLock()
        self._defined: dict[Name, Mark] = {}
        self._closed = False
        self._step = self.define("step {}", bit=bits.STEP, stream=True)
        self.mark = _Table(self).__getitem__
        _live.add(self)

    @classmethod
    def open(
        cls,
        *,
        rank: int,
        world_size: int,
        mask: int = bits.DEFAULT_ON,
        capacity: int = layout.DEFAULT_CAPACITY,
        directory: str = "",
        device: int = -1,
    ) -> Marks:
        """A new ring.

        Args:
            rank, world_size: of this process in its job.
            mask: what is on (`bits`).
            capacity: finished ranges that may wait for the flusher, a power of two.
            directory: the rank's profiling directory, for the recovery of the last marks; see `set_directory`.
            device: this rank's device on its host, -1 for none.

        Raises:
            ConfigError: a wrong mask, capacity or directory.
        """
        if capacity <= 0 or capacity.bit_count() != 1:
            raise ConfigError("capacity", capacity, "a power of two", "Leave it out for 16384.")
        directory = _fitting(directory)
        header = {"rank": rank, "world_size": world_size, "mask": _checked(mask), "device": device}
        marks = cls(ringfile.create(header, capacity))
        marks.set_directory(directory)
        return marks

    @property
    def mask(self) -> int:
        """What is on (`bits`); setting it is the switch. 0 once closed, and in a forked child.

        Raises:
            ConfigError: set to what is not a set of bits.
        """
        return self._ring.mask

    @mask.setter
    def mask(self, value: int) -> None:
        value = _checked(value)
        with self._lock:
            if not self._closed:
                self._view["mask"] = value

    def switch(self, on: int, off: int) -> int:
        """Turn marks on and off (`bits`), leaving all others as they are; from any thread.

        Returns:
            What is on now.
        """
        with self._lock:
            if not self._closed:
                self._view["mask"] = (self._view["mask"] & ~_checked(off)) | _checked(on)
            return self.mask

    def define(self, text: str, *, domain: str = "default", bit: int, stream: bool) -> Mark:
        """The mark of that name and kind, always the same object; `other` of its kind once 496 names are in use.

        Args:
            text: shown in the report; a `{}` in it stands for `Mark.value`. Cut at about 500 bytes.
            domain: the rows' domain.
            bit: what switches it (`bits`).
            stream: four rows (host and device) instead of two.
        """
        name = Name(text, domain, bit, stream)
        known = self._defined.get(name)
        return known if known is not None else self._intern(name)

    def step(self, number: int) -> None:
        """End the open step range and begin that of step `number`."""
        self._step.end()
        self._step.value = number
        self._step.begin()

    def step_begin(self, number: int) -> None:
        """Begin the range of step `number`; one whose end was skipped by an exception is discarded."""
        self._step.cancel()
        self._step.value = number
        self._step.begin()

    def step_end(self) -> None:
        """End the open step range."""
        self._step.end()

    def put(self, mark: Mark, begin_ns: int, end_ns: int, value: int = 0, device: tuple[int, int] = (0, 0)) -> bool:
        """Record a range timed elsewhere, regardless of the mask, which was checked when it was timed.

        Args:
            begin_ns, end_ns: CLOCK_MONOTONIC, nanoseconds.
            value: in place of `{}` in the name.
            device: begin and end on the device, converted to the same clock; 0 for not measured.

        Returns:
            False: dropped, the ring is full (it was counted) or closed.
        """
        return mark.put(begin_ns, end_ns, value, *device)

    @property
    def head(self) -> int:
        """Number of ranges recorded since the start."""
        return self._view["head"]

    @property
    def tail(self) -> int:
        """How many of them are on disk."""
        return self._view["tail"]

    @property
    def dropped(self) -> int:
        """Ranges lost since the start: the ring was full, or too many were open at once."""
        return self._view["dropped"]

    @property
    def wall_offset(self) -> int:
        """Nanoseconds to add to the records' times to get the time since the epoch."""
        return self._view["wall_offset"]

    def take_id(self) -> int:
        """An id of its own for a row that no mark makes."""
        return self._ring.take_id()

    def names(self, first: int = 0) -> list[Name]:
        """All names from slot `first` on, in the order of their slots; records refer to them by slot."""
        with self._lock:
            return self._view.names(first)

    def records(self, limit: int) -> bytes:
        """At most `limit` records (`format.RECORD`) that are not on disk yet, oldest first; a copy."""
        with self._lock:
            return b"" if self._closed else self._view.records(limit)

    def consumed(self, count: int) -> None:
        """The oldest `count` records are on disk: their places are free.

        Raises:
            ValueError: more than there are.
        """
        with self._lock:
            if not self._closed:
                self._view.consumed(count)

    def set_directory(self, directory: str) -> None:
        """Store where this rank's rows go, for the recovery.

        Raises:
            ConfigError: longer than a path can be.
        """
        directory = _fitting(directory)
        with self._lock:
            if not self._closed:
                self._view.directory = directory

    def close(self, remove: bool) -> None:
        """Switch the marks off for good; idempotent.

        Args:
            remove: also remove the ring file. False leaves it to the recovery, with everything that is not on disk yet.
        """
        with self._lock:
            if not self._closed:
                self._let_go(remove)

    def _let_go(self, remove: bool) -> None:
        """Release the memory; the counters can still be read, from a copy."""
        self._closed = True
        self._ring.detach()
        self._view = self._view.without_records()
        self._file.close(remove)

    def _forked(self) -> None:
        """In a forked child, which has one thread: the lock may be held by a thread that does not exist here."""
        self._lock = threading.RLock()
        self.close(remove=False)

    def _by_name(self, text: str) -> Mark:
        bit = bits.BIT_OF_MARK.get(text, bits.STEP)
        # Outside of `default`, where a reader would take `substep 3` for a step.
        domain = "default" if text in bits.BIT_OF_MARK or text == OTHER else "user"
        return self.define(text, domain=domain, bit=bit, stream=text not in HOST_ONLY)

    def _intern(self, name: Name) -> Mark:
        with self._lock:
            if name in self._defined:
                return self._defined[name]
            names = len(self._defined)
            if names >= layout.NAMES_MAX - KEPT_SLOTS and name.text != OTHER:
                return self.define(OTHER, bit=name.bit, stream=name.stream)
            slot = min(names, layout.NAMES_MAX - 1)
            if slot == names and not self._closed:
                self._view.put_name(slot, name)
            mark: Mark = self._make.Mark(self._ring, slot, name.bit)
            self._defined[name] = mark
            return mark


class _Table(dict[str, Mark]):
    """Marks by name; looked up without running Python once they exist."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def __missing__(self, text: str) -> Mark:
        if not isinstance(text, str):
            raise TypeError(f"mark({text!r}): a mark's name is a str, such as mark('forward')")
        mark = self._marks._by_name(text)
        if len(self) < layout.NAMES_MAX:
            self[text] = mark
        return mark


def _checked(mask: int) -> int:
    if not isinstance(mask, int) or mask & ~bits.ALL:
        raise ConfigError("mask", mask, f"a set of bits, 0 to {bits.ALL}", "See lastgasp.steps.bits.")
    return mask


def _fitting(directory: str) -> str:
    if len(os.fsencode(directory)) > layout.DIRECTORY_MAX:
        raise ConfigError("directory", directory, f"at most {layout.DIRECTORY_MAX} bytes", "Use a shorter path.")
    return directory


_live: WeakSet[Marks] = WeakSet()


def _in_forked_child() -> None:
    for marks in list(_live):
        marks._forked()
    _live.clear()
    writer.forget_thread()


os.register_at_fork(after_in_child=_in_forked_child)
