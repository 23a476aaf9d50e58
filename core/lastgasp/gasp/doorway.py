"""Accepts the controller's connections, with bounds on unauthenticated ones: number, lifetime and log lines.

Anyone on the machine or the training network can connect. An unauthenticated connection costs one descriptor, and their
number is bounded: when the limit is reached the oldest one is closed. A rank authenticates within milliseconds, so it
gets in past any number of connections that only wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lastgasp import _clock

from . import messages as m

log = logging.getLogger("lastgasp.controller")

STRANGERS, STRANGERS_PER_ADDRESS = 4096, 2048
"""Limit of unauthenticated connections. All ranks of a large job connect within a second, and closing one that then
reconnects costs more than keeping it."""
DESCRIPTORS = 65536
"""The soft descriptor limit is raised up to this, as the hard limit allows, once connections use a quarter of it."""
AT_ONCE = 64
"""Connections accepted in one turn of the event loop."""
LINES, PER_SECONDS = 5, 10.0
"""Log lines about unauthenticated connections; further ones are only counted."""
CANCEL_AGAIN = 1.0
"""Seconds that a task gets to end before it is cancelled once more."""
_BUSY = m.frame(m.Refused(reason=m.BUSY))
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class LimitedLog:
    """Limits log lines per time span, then reports how many were suppressed.

    Args:
        lines, seconds: at most `lines` lines in `seconds` seconds.
    """

    def __init__(self, lines: int = LINES, seconds: float = PER_SECONDS) -> None:
        self._lines, self._seconds = lines, seconds
        self._since, self._written, self._withheld = -seconds, 0, 0

    def warning(self, text: str, *values: object) -> None:
        """Log it, or count it."""
        now = _clock.monotonic()
        if now - self._since >= self._seconds:
            withheld, self._since, self._written, self._withheld = self._withheld, now, 0, 0
            if withheld:
                log.warning("%d more lines like the following were left out", withheld)
        if self._written >= self._lines:
            self._withheld += 1
            return
        self._written += 1
        log.warning(text, *values)


@dataclass(eq=False)
class _Stranger:
    """An unauthenticated connection; its writer is set on its first turn, after the TLS handshake."""

    address: str
    connection: socket.socket
    begun: bool = False
    writer: asyncio.StreamWriter | None = None


class Doorway:
    """Listens, and runs `serve` in a separate task for each connection.

    Args:
        serve: handles a connection; it calls `known` once the peer has authenticated, and closes the writer.
        secure: the TLS context; handshake: seconds allowed for a handshake.

    All methods run on the event loop.
    """

    def __init__(self, serve: Serve, secure: ssl.SSLContext | None, handshake: float) -> None:
        self._serve, self._secure, self._handshake = serve, secure, handshake
        self._strangers: dict[asyncio.Task[None], _Stranger] = {}
        self._of_address: dict[str, dict[asyncio.Task[None], None]] = {}
        self._count = 0
        self._listener: socket.socket | None = None
        self.log = LimitedLog()

    def open(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=STRANGERS)
        self._listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening; the caller closes the connections. Idempotent."""
        if self._listener is not None and self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def known(self) -> None:
        """Mark the calling task's connection as authenticated."""
        task = asyncio.current_task()
        if task is not None:
            self._forget(task)

    def is_stranger(self) -> bool:
        """Whether the calling task's connection is still unauthenticated."""
        return asyncio.current_task() in self._strangers

    # -- connections ------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Accept all waiting connections. Not a task: cancelling it could leak a connection just accepted."""
        assert self._listener is not None
        for _ in range(AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self.log.warning("no connection can be taken: %s", error)
                if error.errno in _EXHAUSTED:
                    self._loop.remove_reader(self._listener)
                    self._loop.call_later(1.0, self._accept_again)
                return
            connection.setblocking(False)
            self._take(connection, str(address[0]))

    def _accept_again(self) -> None:
        if self._listener is not None and self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _take(self, connection: socket.socket, address: str) -> None:
        self._make_room(address)
        stranger = _Stranger(address, connection)
        task = asyncio.create_task(self._greet(stranger))
        self._strangers[task] = stranger
        self._of_address.setdefault(address, {})[task] = None
        self._count += 1
        task.add_done_callback(lambda task: self._ended(task, stranger))
        _raise_limit(self._count)

    def _ended(self, task: asyncio.Task[None], stranger: _Stranger) -> None:
        self._count -= 1
        self._forget(task)
        if not stranger.begun:  # its task has not run yet
            with contextlib.suppress(OSError), stranger.connection:
                stranger.connection.send(_BUSY if self._secure is None else b"")

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Remove it from the unauthenticated connections."""
        stranger = self._strangers.pop(task, None)
        if stranger is not None:
            same = self._of_address[stranger.address]
            del same[task]
            if not same:
                del self._of_address[stranger.address]

    def _make_room(self, address: str) -> None:
        """Close the oldest unauthenticated connection, of the same address or of all, when the limit is exceeded."""
        most = min(STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        same = self._of_address.get(address, {})
        if len(same) >= min(STRANGERS_PER_ADDRESS, most):
            self._evict(next(iter(same)))
        elif len(self._strangers) >= most:
            self._evict(next(iter(self._strangers)))

    def _evict(self, task: asyncio.Task[None]) -> None:
        stranger = self._strangers[task]
        self._forget(task)
        if stranger.writer is not None:
            stranger.writer.write(_BUSY)
        elif stranger.begun and self._secure is None:  # asyncio is about to take the socket, and will close it
            with contextlib.suppress(OSError):
                stranger.connection.send(_BUSY)
        task.cancel()
        self.log.warning("too many connections prove nothing: the oldest, from %s, was closed", stranger.address)

    async def _greet(self, stranger: _Stranger) -> None:
        stranger.begun = True
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        limit = self._handshake if self._secure is not None else None
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, stranger.connection, ssl=self._secure, ssl_handshake_timeout=limit
            )
        except OSError as error:  # ssl.SSLError is one
            self.log.warning("no TLS with %s: %s", stranger.address, error)
            return
        stranger.writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        await self._serve(reader, stranger.writer)


async def end_all_others() -> None:
    """Cancel all other tasks of this loop, and wait until they have ended."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        # Again after a while: in Python 3.11 `wait_for` may swallow a cancellation that comes with its result.
        done, _ = await asyncio.wait(others, timeout=CANCEL_AGAIN)
        for task in done:
            if not task.cancelled():
                task.exception()  # or asyncio logs that nobody asked


def _raise_limit(connections: int) -> None:
    """Raise the descriptor limit once connections use a quarter of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if connections >= soft // 4 and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
