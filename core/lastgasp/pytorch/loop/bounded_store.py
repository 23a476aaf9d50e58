"""A store of torch's that never holds up its caller: its client waits for ever for a server that is stopped, whatever
its timeout (torch 2.13: `check`, `add` and `get`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Says(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None:
        """Write."""

    def get(self, key: str, /) -> bytes:
        """Read; waits until it is there."""

    def add(self, key: str, amount: int, /) -> int:
        """Count; returns the new number."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all are there."""

    def delete_key(self, key: str, /) -> bool:
        """Whether it was there."""


class BoundedStore:
    """All methods raise RuntimeError where `store` raises one, has not answered in time, or has not done so before.

    Args:
        store: whose methods may block; each call is made on a thread of its own.
        limit: seconds for an answer.
    """

    def __init__(self, store: Says, limit: float) -> None:
        self._store, self._limit, self._gone = store, limit, False

    def _ask(self, call: Callable[[], T]) -> T:
        if self._gone:
            raise RuntimeError("the store of torch's agent has stopped to answer")
        found, errors, done = list[T](), list[Exception](), threading.Event()

        def ask() -> None:
            try:
                found.append(call())
            except Exception as error:
                errors.append(error)
            finally:
                done.set()

        threading.Thread(target=ask, name="lastgasp-store", daemon=True).start()
        if not done.wait(self._limit):
            self._gone = True  # another call would only leave another thread behind
            raise RuntimeError(f"the store of torch's agent has not answered in {self._limit:g} s")
        if errors:
            raise errors[0] if isinstance(errors[0], RuntimeError) else RuntimeError(str(errors[0]))
        return found[0]

    def set(self, key: str, value: str, /) -> None:
        """As of `store`."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str, /) -> bytes:
        """As of `store`."""
        return self._ask(lambda: self._store.get(key))

    def add(self, key: str, amount: int, /) -> int:
        """As of `store`."""
        return self._ask(lambda: self._store.add(key, amount))

    def check(self, keys: list[str], /) -> bool:
        """As of `store`."""
        return self._ask(lambda: self._store.check(keys))

    def delete_key(self, key: str, /) -> bool:
        """As of `store`."""
        return self._ask(lambda: self._store.delete_key(key))
