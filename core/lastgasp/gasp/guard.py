"""Keeps a thread or an event loop alive when its callees raise, because others rely on it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from lastgasp import _clock

EVERY = 60.0
"""Seconds between two log messages about the same thing."""


class Guard:
    """Logs what is raised, with its traceback and not too often, and counts it.

    Attributes:
        count: exceptions until now.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self.count = 0
        self._seen: dict[str, tuple[float, int]] = {}

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Suppress and log any exception of the body. Not for code that awaits.

        Args:
            what: what failed, for the log; from a small fixed set of texts.
        """
        try:
            yield
        except BaseException as error:  # SystemExit, too: it would silently end only this thread
            self.failed(what, error)

    def failed(self, what: str, error: BaseException) -> None:
        """Count and log it; never raises."""
        self.count += 1
        told, since = self._seen.get(what, (-EVERY, 0))
        now = _clock.monotonic()
        if now - told < EVERY:
            self._seen[what] = (told, since + 1)
            return
        self._seen[what] = (now, 0)
        again = f" ({since} times more since this was logged last)" if since else ""
        with contextlib.suppress(Exception):  # a logging handler of the user's may raise
            self._log.error("%s failed%s; it continues", what, again, exc_info=error)
