"""The writer of the marks ring in Python, used if `_ring.c` could not be compiled: the same, but slower.

It takes no lock. CPython releases the GIL, and runs signal handlers, only after a call, at a backward jump and at
the start of a function (since 3.10), and collects garbage only when a container is created. So lines that merely
index, add, compare and assign are atomic; they are between `# as one` and `# so far`.
"""

from __future__ import annotations

import threading
from struct import Struct
from time import monotonic_ns
from typing import Any

from . import format as layout

DEPTH = 64
_MASK = layout.OFFSETS["mask"] // 4
_HEAD, _TAIL, _DROPPED, _NEXT_ID = (layout.OFFSETS[field] // 8 for field in ("head", "tail", "dropped", "next_id"))
_NOTHING = memoryview(bytes(layout.PAGE)).cast("I")
"""The mask of a ring that was released."""
_pack = Struct("<QQQq16xII8x").pack
"""`format.RECORD` without device times."""


class _Own(threading.local):
    """This thread's open ranges, all marks' in one list: (mark, id or 0 for not recorded, value, begin).

    The list begins with the thread's number in the kernel, asked for once, as it is a system call. What a thread
    has left open goes with it.
    """

    def __init__(self) -> None:
        self.opened: list[tuple[Any, ...]] = [(None, threading.get_native_id())]


_own = _Own()


def _forget_detached(opened: list[tuple[Any, ...]]) -> None:
    """Discard ranges of released rings: their ends may still come, and do nothing."""
    opened[1:] = [entry for entry in opened[1:] if entry[0]._ring.memory is not None]


def forget_thread() -> None:
    """In a forked child: the only thread has another id now, and the open ranges belong to the parent."""
    _own.opened = [(None, threading.get_native_id())]


class Ring:
    """Writes records of finished ranges.

    Args:
        memory: a ring with its header filled in.
        records_at: where its records begin.
    """

    def __init__(self, memory: Any, records_at: int) -> None:
        self.memory: Any = memoryview(memory)
        self.masks, self.words = self.memory[: layout.PAGE].cast("I"), self.memory[: layout.PAGE].cast("Q")
        capacity, size = self.words[layout.OFFSETS["capacity"] // 8], layout.RECORD.size
        self.wrap = capacity - 1
        # Made beforehand: in 3.11 creating a slice may collect garbage, which can run any code.
        self.places = [slice(at, at + size) for at in range(records_at, records_at + capacity * size, size)]

    def detach(self) -> None:
        """Release the memory; the marks are off for good."""
        self.masks, self.memory, self.places = _NOTHING, None, []
        self.words = memoryview(bytearray(layout.PAGE)).cast("Q")
        _forget_detached(_own.opened)  # otherwise they, and this ring, would live as long as this thread

    @property
    def mask(self) -> int:
        """What is on; 0 once detached."""
        return self.masks[_MASK]

    def take_id(self) -> int:
        """The next range's id, for a row that no mark makes; 0 once the memory is released."""
        words = self.words  # as one
        if self.memory is None:
            return 0
        number = words[_NEXT_ID]
        words[_NEXT_ID] = number + 1  # so far
        return number

    def write(self, record: bytes) -> bool:
        """False: the ring is full or released, and the record is lost."""
        words, memory = self.words, self.memory  # as one
        if memory is None:
            return False
        head = words[_HEAD]
        if head - words[_TAIL] > self.wrap:
            words[_DROPPED] += 1
            return False
        memory[self.places[head & self.wrap]] = record
        words[_HEAD] = head + 1  # so far
        return True


class Mark:
    """A range that is begun and ended repeatedly; see `marks.Mark`."""

    __slots__ = ("_open", "_ring", "bit", "name", "value")

    def __init__(self, ring: Ring, name: int, bit: int) -> None:
        self._ring, self.name, self.bit, self.value = ring, name, bit, 0
        self._open = 0
        """How many are open in all threads; too high if threads ended inside a range, never too low."""

    def __enter__(self) -> None:
        ring = self._ring
        if ring.masks[_MASK] & self.bit:
            if self._open >= DEPTH and not self._has_room():
                return
            words = ring.words  # as one
            number = words[_NEXT_ID]
            words[_NEXT_ID] = number + 1
            self._open += 1  # so far
            _own.opened.append((self, number, self.value, monotonic_ns()))
        elif self._open:
            self._begin_unrecorded()

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        if self._open:
            self._end(monotonic_ns())

    def _end(self, end: int, ends_as: int | None = None) -> None:
        opened = _own.opened
        if opened[-1][0] is self:
            _, number, value, begin = opened.pop()
            self._open -= 1
        else:
            _, number, value, begin = self._take_out()
        if number:
            record = _pack(begin, end, number, value if ends_as is None else ends_as, self.name, opened[0][1])
            ring = self._ring
            words = ring.words
            head = words[_HEAD]  # as one
            if head - words[_TAIL] <= ring.wrap and ring.memory is not None:
                ring.memory[ring.places[head & ring.wrap]] = record
                words[_HEAD] = head + 1  # so far
            else:
                ring.write(record)

    begin = __enter__

    def end(self) -> None:
        """This thread's innermost range ends."""
        self.__exit__()

    def end_as(self, value: int, /) -> None:
        """The same, with this value instead of the one that it began with."""
        if self._open:
            self._end(monotonic_ns(), value)

    def cancel(self) -> bool:
        """Forget this thread's innermost range; False: there is none."""
        return self._take_out() != _NONE

    def put(self, begin: int, end: int, value: int, device_begin: int, device_end: int, /) -> bool:
        """A range timed elsewhere; False: dropped."""
        ring, thread = self._ring, _own.opened[0][1]
        fields = (begin, end, ring.take_id(), value, device_begin, device_end, self.name, thread)
        return ring.write(layout.RECORD.pack(*fields))

    def _take_out(self) -> tuple[Any, ...]:
        opened = _own.opened
        for at in range(len(opened) - 1, 0, -1):
            if opened[at][0] is self:
                self._open -= 1
                return opened.pop(at)
        return _NONE

    def _begin_unrecorded(self) -> None:
        """Note it all the same: its end must not be taken for that of the recorded range around it."""
        if self._depth():
            _own.opened.append((self, 0, 0, 0))
            self._open += 1

    def _has_room(self) -> bool:
        _forget_detached(_own.opened)
        if self._depth() < DEPTH:
            return True
        self._ring.words[_DROPPED] += 1
        self._begin_unrecorded()
        return False

    def _depth(self) -> int:
        """Recorded ranges of this mark that this thread has open."""
        return sum(entry[0] is self and entry[1] > 0 for entry in _own.opened)


_NONE = (None, 0, 0, 0)
