"""Answers of the controller that some thread of the rank waits for."""

from __future__ import annotations

import threading

from . import messages as m

Key = tuple[str, str | int]
"""The answer's kind, and to what."""


class Mailbox:
    """Filled by the control thread. Once closed (the controller is lost) nobody waits any more."""

    def __init__(self) -> None:
        self._found: dict[Key, m.Message] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, key: Key, answer: m.Message) -> None:
        """An answer has come."""
        with self._changed:
            self._found[key] = answer
            self._changed.notify_all()

    def take(self, key: Key, seconds: float) -> m.Message | None:
        """Wait for an answer, and take it out; None where none came in time or the controller was lost."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._found or self._closed, seconds)
            return self._found.pop(key, None)

    def drop(self, key: Key) -> None:
        """Forget an answer to an earlier question."""
        with self._changed:
            self._found.pop(key, None)

    def close(self) -> None:
        """No more answers will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
