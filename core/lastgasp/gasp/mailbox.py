"""Answers of the controller for which threads of the rank wait."""

from __future__ import annotations

import threading

from . import messages as m

Key = tuple[str, str | int]
"""The kind of answer, and what it answers."""


def key_of(message: m.Message) -> Key | None:
    """What a message answers; None if no thread waits for it."""
    if isinstance(message, m.Gathered):
        return "gathered", message.tag
    if isinstance(message, m.Consulted):
        return "consulted", message.step
    if isinstance(message, m.Farewell):
        return "farewell", 0
    if isinstance(message, m.ResizeNoted):
        return "resize", message.incarnation
    return ("left", 0) if isinstance(message, m.Left) else None


class Mailbox:
    """Filled by the control thread. Closing it (the controller is lost) ends all waits."""

    def __init__(self) -> None:
        self._found: dict[Key, m.Message] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, key: Key, answer: m.Message) -> None:
        """Deliver an answer."""
        with self._changed:
            self._found[key] = answer
            self._changed.notify_all()

    def take(self, key: Key, seconds: float) -> m.Message | None:
        """Wait for an answer and remove it; None if none arrived in time or the controller was lost."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._found or self._closed, seconds)
            return self._found.pop(key, None)

    def drop(self, key: Key) -> None:
        """Discard an answer to an earlier question."""
        with self._changed:
            self._found.pop(key, None)

    def close(self) -> None:
        """End all waits: no more answers will arrive."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
