"""Calls of the rendezvous store with a deadline: its host may have stopped answering, without being gone."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

LIMIT = 1.5
"""Seconds for the store to answer a launcher that watches its ranks meanwhile. In a network it takes milliseconds."""


class Unanswered(RuntimeError):
    """The store has not answered in time; what was asked may still be done."""


class Bounded:
    """Makes calls one at a time: while one is under way, no other is made. Its thread lives as long as it does."""

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit = limit
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._owed = 0
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._calls.put, None)

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what `call` returns.

        Raises:
            Unanswered: it takes longer than `limit` seconds, or an earlier one still does.
            BaseException: what `call` raises.
        """
        while self._owed and not self._answers.empty():
            self._answers.get()
            self._owed -= 1
        if self._owed:
            raise Unanswered("the store of the rendezvous still owes an earlier answer")
        if self._thread is None:
            self._thread = threading.Thread(
                target=_answer, args=(self._calls, self._answers), name="lastgasp-store", daemon=True
            )
            self._thread.start()
        self._calls.put(call)
        self._owed = 1
        try:
            value, error = self._answers.get(timeout=self._limit)
        except queue.Empty:
            raise Unanswered(f"the store of the rendezvous has not answered in {self._limit:g} s") from None
        self._owed = 0
        if error is not None:
            raise error
        found: T = value
        return found


def _answer(calls: Any, answers: Any) -> None:
    while (call := calls.get()) is not None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # raised where it was asked for
            answers.put((None, error))
        del call


class BoundedStore:
    """What a launcher needs of torch's store while ranks run. Raises as the store does, and `Unanswered`."""

    def __init__(self, store: Any) -> None:
        self._store, self._bounded = store, Bounded()

    def check(self, key: str) -> bool:
        """Whether it has that key."""
        return bool(self._bounded(lambda: self._store.check([key])))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return bytes(self._bounded(lambda: self._store.get(key)))

    def set(self, key: str, value: str) -> None:
        """Set a value. If it is not answered in time it may be set later."""
        self._bounded(lambda: self._store.set(key, value))
