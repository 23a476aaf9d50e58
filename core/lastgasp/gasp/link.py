"""The other end of a control connection: a blocking socket with frames and the proof of the token."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import weakref
from typing import TypeVar

import msgspec

from lastgasp import __version__, _clock
from lastgasp.errors import (
    AuthenticationError,
    ControlError,
    DeadlineExceeded,
    LastgaspError,
    ProtocolError,
    VersionMismatch,
)

from . import messages as m
from .lifeline import keep_alive
from .new_process import joined
from .tls import TlsFiles

log = logging.getLogger("lastgasp")

M = TypeVar("M", bound=m.Message)
CONNECT_TIMEOUT = 30.0
"""Seconds to reach the controller, retries included."""
LATER_TRAINING = 1800.0
"""Seconds until all other ranks have ended an earlier training of the script; as torch waits in a collective."""
SEND_TIMEOUT = 10.0
"""Seconds a single send may block; a peer that blocks it longer counts as lost."""
SILENT = 2.0
"""Seconds after which a peer that has said nothing may be one that waits for TLS; one that has died ends at once."""
_NAMES: dict[m.Role, str] = {"controller": "the controller", "receiver": "the launcher of the partner host"}


class Channel:
    """Frames over a socket to a peer, with a proof of the token on both sides.

    `send` may be called from any thread; `receive` from one. Uses TLS if the environment names the files (`tls`).

    Args:
        seconds: limit for reaching the peer, and again for its greeting.
        retry: try again while nobody listens yet.

    Attributes:
        peer: who is at the other end.

    Raises (constructor):
        DeadlineExceeded: nobody listens at `address`, or the listener does not answer.
        ControlError: the TLS handshake failed.
        ConfigError: the TLS files.
    """

    peer: m.Role = "controller"

    def __init__(self, address: str, seconds: float, retry: bool) -> None:
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self._address, self._name = address, f"{_NAMES[self.peer]} at {address}"
        files = TlsFiles.from_environment()
        context = files.client() if files is not None else None
        self._socket = _connect(address, seconds, retry, self._name)
        if context is not None:
            self._socket = _secured(context, self._socket, self._name, seconds)
        self._deadline = (now := _clock.monotonic()) + seconds
        self._silent_until = now + SILENT
        _live.add(self)

    def _greet(
        self, token: str, role: m.Role, rank: int, hello: m.Greeting | m.Sender
    ) -> tuple[m.Challenge, m.Welcome]:
        """Authenticate mutually by the token; close the socket on failure."""
        try:
            challenge = self._expect(m.Challenge)
            nonce = os.urandom(32)
            mac = m.proof(token, role, challenge.nonce, rank)
            self.send(msgspec.structs.replace(hello, version=__version__, nonce=nonce, mac=mac))
            welcome = self._expect(m.Welcome)
            if not m.proven(token, self.peer, nonce, rank, welcome.mac):
                raise AuthenticationError(f"{self._name} does not know this job's token: another job's address?")
        except BaseException as error:
            self._socket.close()
            if isinstance(error, OSError | EOFError) and not isinstance(error, LastgaspError):
                raise ControlError(f"{self._name} broke the greeting off: {error}{self._hint()}") from error
            raise
        self._socket.settimeout(SEND_TIMEOUT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(self._socket)
        return challenge, welcome

    def _hint(self) -> str:
        """What may be wrong. A peer that uses TLS says nothing here, and closes the connection when it gives up."""
        if _clock.monotonic() < self._silent_until:
            return "; has its launcher just ended?"
        return "" if isinstance(self._socket, ssl.SSLSocket) else _HINT

    def _expect(self, kind: type[M], limit: int = m.MAX_GREETING) -> M:
        """The next message, which must be of this kind, within the deadline."""
        while not (body := self._next_frame(limit)):
            left = self._deadline - _clock.monotonic()
            if left <= 0:
                raise TimeoutError("no answer in time")
            self._socket.settimeout(left)
            self._read_more()
        message = m.from_controller(body)
        if isinstance(message, m.Refused):
            raise _refusal(message.reason, _NAMES[self.peer])
        if not isinstance(message, kind):
            raise ControlError(f"{type(message).__name__} instead of {kind.__name__}")
        return message

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    @property
    def own_address(self) -> str:
        """This host's address on this connection."""
        return str(self._socket.getsockname()[0])

    def send(self, message: m.Message) -> None:
        """Send one message; raises OSError when the peer is gone."""
        with self._lock:
            if isinstance(self._socket, ssl.SSLSocket):
                self._socket.settimeout(SEND_TIMEOUT)
            self._socket.sendall(m.frame(message))

    def receive(self) -> list[m.FromController]:
        """Return all received messages; call when readable, or while `unread`.

        Raises:
            OSError, EOFError: the peer is gone.
            ProtocolError: it sent something that is not a message.
        """
        if isinstance(self._socket, ssl.SSLSocket):
            self._read_secured(self._socket)
        elif not self.unread:
            self._read_more()
        found = []
        while body := self._next_frame(m.MAX_FRAME):
            found.append(m.from_controller(body))
        return found

    @property
    def unread(self) -> bool:
        """Whether messages arrived with the greeting: they have left the socket, so they wake no select."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        if len(self._buffer) < m.HEADER:
            return False
        try:
            return len(self._buffer) >= m.HEADER + m.body_size(bytes(self._buffer[: m.HEADER]), m.MAX_FRAME)
        except ProtocolError:
            return True  # `receive` reports it

    def _read_more(self) -> None:
        data = self._socket.recv(1 << 20)
        if not data:
            raise EOFError(f"{_NAMES[self.peer]} closed the connection")
        self._buffer += data

    def _read_secured(self, secured: ssl.SSLSocket) -> None:
        """Read all pending data: what TLS has buffered wakes no select. Never during a send, as OpenSSL demands."""
        with self._lock:
            secured.settimeout(0)
            try:
                while True:
                    self._read_more()
            except ssl.SSLWantReadError:
                pass

    def _next_frame(self, limit: int) -> bytes:
        if len(self._buffer) < m.HEADER:
            return b""
        end = m.HEADER + m.body_size(bytes(self._buffer[: m.HEADER]), limit)
        if len(self._buffer) < end:
            return b""
        body = bytes(self._buffer[m.HEADER : end])
        del self._buffer[:end]
        return body

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()


class Link(Channel):
    """The rank's end: connects, authenticates mutually, then sends and receives messages.

    Attributes:
        shares_host: the controller sees this rank's processes in /proc.
        started_s: when the controller started, unix seconds; the same for all ranks and attempts.

    Raises (constructor):
        DeadlineExceeded: nobody listens at `address`.
        AuthenticationError: one side does not know the token.
        VersionMismatch, ControlError: refused, with the controller's reason.
    """

    def __init__(self, address: str, token: str, hello: m.Hello) -> None:
        challenge, welcome = self._let_in(address, token, hello, _clock.monotonic() + CONNECT_TIMEOUT)
        self.shares_host, self.started_s = challenge.host == hello.host, welcome.started_s
        joined()

    def _let_in(self, address: str, token: str, hello: m.Hello, deadline: float) -> tuple[m.Challenge, m.Welcome]:
        """Greet, retrying while unauthenticated connections fill the controller's port, or others train elsewhere."""
        told = False
        while True:
            super().__init__(address, CONNECT_TIMEOUT, retry=True)
            try:
                return self._greet(token, "rank", hello.rank, hello)
            except Busy as error:
                over, more = _clock.monotonic() - deadline, LATER_TRAINING if m.NOT_YET in str(error) else 0.0
                if over > more:
                    raise
                if over > 0 and not told:
                    log.warning("this rank's next training waits, for %g minutes at most: %s", more / 60, m.NOT_YET)
                told = over > 0
                threading.Event().wait(0.1)


class Busy(ControlError):
    """The controller cannot have this rank, or operator, yet."""


_live: weakref.WeakSet[Channel] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Close it in forked children: a data-loader worker must not keep it open when its rank dies, since its end signals
        the death."""
    for channel in list(_live):
        channel.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _connect(address: str, seconds: float, retry: bool, name: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    deadline = _clock.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=min(5.0, seconds))
        except OSError as error:
            if not retry or _clock.monotonic() > deadline:
                which = "is this the address of this job's controller (LASTGASP_CONTROLLER), and "
                ours = which if name.startswith(_NAMES["controller"]) else ""
                remedy = f"Has its launcher ended, {ours}is there a firewall in between?"
                raise DeadlineExceeded(f"{name} ({error})", seconds, remedy) from error
            threading.Event().wait(0.1)  # the launcher may still be starting it


_HINT = "; where the job uses TLS, set LASTGASP_TLS_CERT, LASTGASP_TLS_KEY and LASTGASP_TLS_CA here as well"


def _secured(context: ssl.SSLContext, plain: socket.socket, name: str, seconds: float) -> socket.socket:
    plain.settimeout(seconds)
    try:
        return context.wrap_socket(plain)
    except OSError as error:
        plain.close()
        raise ControlError(
            f"no TLS with {name}: {error}. Do all nodes have certificates of the same CA, and "
            "LASTGASP_TLS_CERT, LASTGASP_TLS_KEY and LASTGASP_TLS_CA set?"
        ) from error


def _refusal(reason: str, by: str) -> ControlError:
    if reason.startswith("wrong token"):
        return AuthenticationError(f"refused by {by}: {reason}")
    if reason.startswith("lastgasp version"):  # a directory may have "version" in its name
        return VersionMismatch(f"refused by {by}: {reason}")
    return (Busy if reason in (m.BUSY, m.MANY_OPERATORS, m.NOT_YET) else ControlError)(f"refused by {by}: {reason}")
