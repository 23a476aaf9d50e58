"""A launcher keeps copies of another host's arenas: what it receives counts only once its digest was verified.

A connection of its own, with the proof of the job's token and TLS as any other between hosts. Nothing here runs on a
thread that anybody waits for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial

from lastgasp import __version__, arena
from lastgasp.arena import Arena, DamagedArena
from lastgasp.errors import AuthenticationError, ControlError, LastgaspError, VersionMismatch
from lastgasp.topology import host_identity

from . import messages as m
from .lifeline import keep_alive
from .operator import NOBODY
from .secret import WRONG_TOKEN
from .tls import TlsFiles

log = logging.getLogger("lastgasp.launch")

GREETING = 10.0
"""Seconds within which a connection must prove that it knows the token."""
STALLED = 15.0
"""Seconds after which a transfer of which nothing has come counts as broken off."""
HELD = "held already"
"""The answer where a sender has come back, and repeats a step."""
STRANGERS = 8
"""Connections at a time that have not proven anything yet; further ones are closed at once."""

Copied = Callable[[m.Copied], None]


class Receiver:
    """Listens, in threads of its own, until it is closed. The copies are freed by `expect` and `close`.

    Args:
        host: the address to listen on; token: the job's.
        copied: called, on some thread, whenever a step has come.

    Attributes:
        port: where it listens.

    Raises (constructor):
        OSError: it cannot listen there.
        ConfigError: the TLS files.
    """

    def __init__(self, host: str, token: str, copied: Copied) -> None:
        self._token, self._copied = token, copied
        files = TlsFiles.from_environment()
        self._secure = files.server() if files is not None else None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self._lock, self._copying = threading.Lock(), threading.Lock()
        self._arenas: dict[int, Arena] = {}
        self._pair = 0
        self._closed = False
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._connections: set[socket.socket] = set()
        self._sender: socket.socket | None = None
        threading.Thread(target=self._run, name="lastgasp-buddy-listen", daemon=True).start()

    def expect(self, pair: int) -> None:
        """From now on take copies of this pair alone, and free those of others. Does not wait."""
        with self._lock:
            if pair == self._pair:
                return
            old, self._arenas, self._pair = self._arenas, {}, pair
        if old:  # giving gigabytes back takes a while
            threading.Thread(target=_free, args=(old,), name="lastgasp-buddy-free", daemon=True).start()

    def held(self) -> list[m.Copied]:
        """All copies."""
        with self._lock:
            return [self._told(rank) for rank in self._arenas]

    def _told(self, rank: int) -> m.Copied:
        kept = self._arenas[rank]
        steps = arena.steps(kept.fd, kept.identity)
        return m.Copied(
            pair=self._pair, rank=rank, steps=steps, pid=os.getpid(), fd=kept.fd, identity=kept.identity
        )  # fmt: skip

    def close(self) -> None:
        """End all connections, and free all copies. Idempotent."""
        with self._lock:
            self._closed = True
            self._pair = -1
            ends = [self._listener, *self._connections]
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            _free(self._arenas)

    # -- connections ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed or self._listener.fileno() < 0:
                    return
                threading.Event().wait(1.0)  # no descriptors left
                continue
            if self._strangers.acquire(blocking=False):
                work = threading.Thread(target=self._serve, args=(connection,), name="lastgasp-buddy", daemon=True)
                work.start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        stranger = True
        try:
            connection.settimeout(GREETING)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._secure is not None:
                connection = self._secure.wrap_socket(connection, server_side=True)
            with self._lock:
                self._connections.add(connection)
            pair = self._greet(connection)
            self._strangers.release()
            stranger = False
            keep_alive(connection)
            self._take_all(connection, pair)
        except (OSError, EOFError, LastgaspError) as error:
            log.debug("the connection of a partner host ended: %s", error)
        finally:
            if stranger:
                self._strangers.release()
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> int:
        """Authenticate mutually.

        Raises:
            ControlError: it does not belong to this job, or to no pair of now.
        """
        nonce = os.urandom(32)
        challenge = m.Challenge(protocol=m.PROTOCOL, version=__version__, nonce=nonce, host=host_identity())
        connection.sendall(m.frame(challenge))
        hello = _next(connection)
        if not isinstance(hello, m.Sender):
            raise ControlError(f"{type(hello).__name__} before the greeting")
        try:
            if not m.proven(self._token, "sender", nonce, NOBODY, hello.mac):
                raise AuthenticationError(WRONG_TOKEN)
            if (hello.protocol, hello.version) != (m.PROTOCOL, __version__):
                raise VersionMismatch(f"lastgasp version {hello.version}, but {__version__} here")
            with self._lock:
                if hello.pair != self._pair:
                    raise ControlError(f"this host takes copies for pair {self._pair}, not {hello.pair}")
                before, self._sender = self._sender, connection
        except ControlError as error:
            connection.sendall(m.frame(m.Refused(reason=str(error))))
            raise
        if before is not None:
            with contextlib.suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)  # the newest one counts
        mac = m.proof(self._token, "receiver", hello.nonce, NOBODY)
        connection.sendall(m.frame(m.Welcome(mac=mac, started_s=0)))
        return hello.pair

    def _take_all(self, connection: socket.socket, pair: int) -> None:
        while True:
            connection.settimeout(None)  # the kernel ends it where the other host is lost
            message = _next(connection)
            connection.settimeout(STALLED)
            if isinstance(message, m.Offers):
                why = self._make_room(message, pair)
                connection.sendall(m.frame(m.Took(why=why, full=bool(why))))
            elif isinstance(message, m.Sends):
                self._take(connection, message, pair)
            else:
                raise ControlError(f"{type(message).__name__} after the greeting")

    # -- copies -----------------------------------------------------------------------------------

    def _make_room(self, offers: m.Offers, pair: int) -> str:
        """Why there is too little memory; empty where there is enough, and then it is taken."""
        with self._lock:
            offered = zip(offers.owners, offers.sizes, offers.identities, strict=True)
            fresh = [one for one in offered if self._lacks(*one)]
            gone = [self._arenas.pop(rank) for rank, _, _ in fresh if rank in self._arenas]
        while gone:
            gone.pop().close()  # no name may hold its memory any longer
        needed, has = sum(arena.needed(size) for _, size, _ in fresh), arena.available()
        names = ", ".join(str(rank) for rank, _, _ in fresh)
        why = (f"copies of the arenas of ranks {names} need {needed / 1e6:.0f} MB "
               f"on their partner host, and {(has or 0) / 1e6:.0f} MB of memory are available there")  # fmt: skip
        if has is not None and needed > arena.SHARE * has:
            return why
        made: dict[int, Arena] = {}
        try:
            for rank, size, identity in fresh:
                made[rank] = Arena(identity, rank)
                made[rank].reserve(size, touch=False)
        except OSError as error:
            for each in made.values():
                each.close()
            return f"{why} ({error})"
        with self._lock:
            if pair == self._pair:
                self._arenas |= made
                return ""
        for each in made.values():
            each.close()
        return "another pair has begun"

    def _lacks(self, rank: int, size: int, identity: bytes) -> bool:
        own = self._arenas.get(rank)
        return own is None or own.identity != identity or own.capacity < size

    def _take(self, connection: socket.socket, sends: m.Sends, pair: int) -> None:
        """Receive one payload.

        Raises:
            OSError, EOFError: it has not come to its end.
        """
        with self._lock:
            kept = self._arenas.get(sends.rank) if pair == self._pair else None
            why = "not wanted" if kept is None or not 0 <= sends.length <= kept.capacity else ""
            if kept is not None and sends.step in arena.steps(kept.fd, kept.identity):
                why = HELD
        if kept is None or why:
            connection.sendall(m.frame(m.Took(why=why)))
            return
        try:
            with self._copying:  # its sender may have come back while the one before was not known to be gone
                connection.sendall(m.frame(m.Took()))
                kept.receive(sends.step, sends.length, sends.digest, partial(_fill, connection))
        except DamagedArena as error:
            connection.sendall(m.frame(m.Took(why=str(error))))
            return
        with self._lock:
            told = self._told(sends.rank) if self._arenas.get(sends.rank) is kept and pair == self._pair else None
        if told is not None:
            self._copied(told)
        connection.sendall(m.frame(m.Took()))


def _free(arenas: dict[int, Arena]) -> None:
    while arenas:
        arenas.popitem()[1].close()


def _fill(connection: socket.socket, part: memoryview) -> None:
    at = 0
    while at < len(part):
        count = connection.recv_into(part[at:])
        if not count:
            raise EOFError("the partner host has closed the connection")
        at += count


def _next(connection: socket.socket) -> m.FromSender:
    header = bytearray(m.HEADER)
    _fill(connection, memoryview(header))
    body = bytearray(m.body_size(bytes(header), m.MAX_GREETING))
    _fill(connection, memoryview(body))
    return m.from_sender(bytes(body))
