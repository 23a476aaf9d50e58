"""A controller that follows a test's orders; for the rank's end of the connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from lastgasp import __version__
from lastgasp.gasp import messages as m
from lastgasp.gasp.groups import pack
from lastgasp.gasp.link import Link

M = TypeVar("M", bound=m.Message)
TOKEN = "t" * 64
STARTED_S = 1_700_000_000
# Nobody is taken for hung, and killed, because the machine is slow: it might be the tests' own process.
HELLO = m.Hello(
    protocol=m.PROTOCOL, version=__version__, nonce=b"", mac=b"", job="job", attempt=0, rank=1, world_size=2,
    replicas=pack(((0, 1),)), host="here", pid=1, directory="/nowhere", hang_timeout=0.0, save_timeout=600.0,
    finish_timeout=600.0,
)  # fmt: skip


class FakeController:
    """Listens on loopback and greets one rank on a thread; then `hear` and `say`. `behind` comes with the greeting.

    Behind the greeting comes also the answer to a Goodbye that a Session's end would wait for (`confirming`).
    """

    confirming = False

    def __init__(
        self, host: str = "elsewhere", token: str = TOKEN, answer: bytes | None = None, behind: bytes = b""
    ) -> None:
        self._host, self._token, self._answer, self._behind = host, token, answer, behind
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._peer: socket.socket | None = None
        self._thread = threading.Thread(target=self._greet)
        self._thread.start()

    def _greet(self) -> None:
        self._server.settimeout(20.0)
        try:
            peer, _ = self._server.accept()
        except OSError:
            return
        peer.settimeout(60.0)
        self._peer = peer
        if self._answer is not None:
            peer.sendall(self._answer)
            peer.shutdown(socket.SHUT_WR)
            return
        nonce = b"n" * 32
        self.say(m.Challenge(protocol=m.PROTOCOL, version=__version__, nonce=nonce, host=self._host))
        hello = self.hear(m.Hello)
        mac = m.proof(self._token, "controller", hello.nonce, hello.rank)
        peer.sendall(m.frame(m.Welcome(mac=mac, started_s=STARTED_S)) + self._behind)
        if self.confirming:
            self.say(m.Farewell())

    def link(self) -> Link:
        """Connect a rank."""
        link = Link(self.address, TOKEN, HELLO)
        self._thread.join(20.0)
        return link

    def say(self, message: m.Message) -> None:
        """Send one message."""
        assert self._peer is not None
        self._peer.sendall(m.frame(message))

    def next(self) -> m.FromRank:
        """The next message that is not a heartbeat."""
        while True:
            message = m.from_rank(self._exactly(m.body_size(self._exactly(m.HEADER), m.MAX_FRAME)))
            if not isinstance(message, m.Status):
                return message

    def hear(self, kind: type[M]) -> M:
        """The next message that is not a heartbeat, which must be of this kind."""
        message = self.next()
        assert isinstance(message, kind), message
        return message

    def _exactly(self, size: int) -> bytes:
        assert self._peer is not None
        data = b""
        while len(data) < size:
            more = self._peer.recv(size - len(data))
            if not more:
                raise EOFError("the rank closed the connection")
            data += more
        return data

    def hang_up(self) -> None:
        """Close the connection."""
        if self._peer is not None:
            self._peer.close()

    def __enter__(self) -> FakeController:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.close()
        self._thread.join(20.0)
        self.hang_up()


class ConfirmingController(FakeController):
    """One that knows of every end."""

    confirming = True


@dataclass(frozen=True)
class Wrote:
    """What a fake save wrote."""

    path: str
    nbytes: int = 1
    first_byte_ns: int = 2
    part: bytes = b"part"


class FakeSource:
    """A state that needs no disk; `gate` holds its saves back, `error` makes everything fail."""

    rank = 1
    buffer_fd = -1

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.saving = threading.Event()
        self.error: BaseException | None = None
        self.done: list[str] = []

    def capture(self, step: int) -> bytes:
        """As the port says."""
        self._fail()
        return f"small {step}".encode()

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> Wrote:
        """As the port says."""
        self.saving.set()
        self.gate.wait(60.0)
        self._fail()
        self.done.append(f"save {step}")
        return Wrote(f"step-{step}")

    def publish(self, result: object, parts: Mapping[int, bytes]) -> str | None:
        """As the port says."""
        self._fail()
        self.done.append(f"publish {sorted(parts)}")
        return None

    def discard(self, result: object) -> None:
        """As the port says."""
        self.done.append("discard")

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error
