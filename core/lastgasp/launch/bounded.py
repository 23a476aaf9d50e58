"""Calls of torch's store with a deadline: its host may have stopped answering, without being gone.

Its client waits for ever for a server that is stopped, whatever its timeout (torch 2.13: `check`, `add` and `get`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from lastgasp import _clock

T = TypeVar("T")
log = logging.getLogger("lastgasp.launch")

LIMIT = 1.5
"""Seconds for the store to answer a launcher that watches its ranks meanwhile. In a network it takes milliseconds."""

ASK = 0.25
"""Seconds between two questions about who waits."""


_EARLIER = "torch's store still owes an earlier answer"


class Unanswered(RuntimeError):
    """The store has not answered in time; what was asked may still be done."""


class Bounded:
    """Makes calls one at a time, each on a thread of its own: while one has not come back, no other is made.

    Any thread may call; it waits for the calls of others.
    """

    def __init__(self, limit: float = LIMIT) -> None:
        self._limit, self._turn = limit, threading.Lock()
        self._under_way: threading.Thread | None = None

    def __call__(self, call: Callable[[], T]) -> T:
        """Return what `call` returns.

        Raises:
            Unanswered: it takes longer than `limit` seconds, or an earlier one still does; or no thread can be had.
            BaseException: what `call` raises.
        """
        if not self._turn.acquire(timeout=self._limit):
            raise Unanswered(_EARLIER)
        try:
            return self._make(call)
        finally:
            self._turn.release()

    def _make(self, call: Callable[[], T]) -> T:
        if self._under_way is not None and self._under_way.is_alive():
            raise Unanswered(_EARLIER)
        answers: list[tuple[Any, BaseException | None]] = []

        def make() -> None:
            try:
                answers.append((call(), None))
            except BaseException as error:  # raised where it was asked for
                answers.append((None, error))

        thread = threading.Thread(target=make, name="lastgasp-store", daemon=True)
        try:
            thread.start()
        except RuntimeError as full:  # a limit of processes is reached: that ends no job
            raise Unanswered(f"torch's store was not asked: {full}") from None
        self._under_way = thread
        thread.join(self._limit)
        if not answers:
            raise Unanswered(f"torch's store has not answered in {self._limit:g} s")
        value, error = answers[0]
        if error is not None:
            raise error
        found: T = value
        return found


class NodesWaiting:
    """How many launchers wait to join, for who asks at every check of its ranks, a hundred times a second.

    Args:
        ask: the rendezvous.
    """

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask, self._bounded, self._none_until = ask, Bounded(), 0.0

    def __call__(self) -> int:
        """None for `ASK` seconds after none was found, and where the store does not answer in time.

        Raises:
            BaseException: what the rendezvous raises.
        """
        if _clock.monotonic() < self._none_until:
            return 0
        self._none_until = _clock.monotonic() + ASK
        try:
            waiting = int(self._bounded(self._ask))
        except Unanswered as late:
            log.debug("%s", late)
            return 0
        if waiting:  # asked again at once: once they are in, a restart would be one too many
            self._none_until = 0.0
        return waiting


class BoundedStore:
    """What is needed of torch's store while ranks run. Raises as the store does, and `Unanswered`.

    Args:
        limit: seconds for an answer.
    """

    def __init__(self, store: Any, limit: float = LIMIT) -> None:
        self._store, self._bounded = store, Bounded(limit)

    def check(self, key: str) -> bool:
        """Whether it has that key."""
        return bool(self._bounded(lambda: self._store.check([key])))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return bytes(self._bounded(lambda: self._store.get(key)))

    def set(self, key: str, value: str) -> None:
        """Set a value. If it is not answered in time it may be set later."""
        self._bounded(lambda: self._store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Count; returns the new number."""
        return int(self._bounded(lambda: self._store.add(key, amount)))

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._bounded(lambda: self._store.delete_key(key))
