"""A broadcast from rank 0 to the other ranks of its machine before they are connected, if the framework has none.

It uses an abstract unix socket whose name is known to all ranks of the job and to no other job. The socket ends with
the process that holds it, so an earlier attempt leaves nothing behind. Each side asks the kernel who its peer is.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import threading
import time
from typing import Any

from lastgasp import _clock
from lastgasp.errors import AuthenticationError, ConfigError

WAIT = 120.0
"""Seconds that the other ranks wait for rank 0, which may have more to import and build."""
PAUSE = 0.05
"""Seconds between two tries to reach it."""
LIMIT = 1 << 16
"""Greatest size of an answer in bytes."""
_CREDENTIALS = struct.Struct("3i")


class RankZero:
    """Passes rank 0's values to all ranks of one machine: a `connect.FromRank0`. All make the same calls in order.

    Args:
        key: the same on all ranks of the job, and unique on this machine while the job runs.
        rank, world_size: of the job.
        wait: seconds that a rank waits for rank 0.

    Raises (constructor):
        ConfigError: another process holds the name for all of that time.
    """

    def __init__(self, key: str, rank: int, world_size: int, wait: float = WAIT) -> None:
        name = hashlib.sha256(f"{os.geteuid()}:{key}".encode()).hexdigest()[:32]
        self._address, self._key, self._wait = f"\0lastgasp-{name}", key, wait
        self._rank, self._others = rank, world_size - 1
        self._values: list[bytes] = []
        self._told = threading.Condition()
        self._asked = 0
        self._server: socket.socket | None = None
        if rank == 0 and self._others:
            self._server = self._listen()
            threading.Thread(target=self._serve, args=(self._server,), name="lastgasp-rank-zero", daemon=True).start()

    def __call__(self, value: Any) -> Any:
        """Return rank 0's `value`, which must be representable in JSON; tuples become lists.

        Raises:
            ConfigError: rank 0 did not answer: it is on another machine, or has not reached this point.
            AuthenticationError: another user's process answered.
        """
        if not self._others:
            return value
        if self._server is not None:
            with self._told:
                self._values.append(json.dumps(value).encode())
                self._told.notify_all()
            return value
        number, self._asked = self._asked, self._asked + 1
        return json.loads(self._ask(number))

    def close(self) -> None:
        """Stop answering. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown(socket.SHUT_RDWR)
            server.close()
            with self._told:
                self._told.notify_all()

    # -- rank 0 -----------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        deadline = _clock.monotonic() + self._wait
        while True:
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                server.bind(self._address)
                break
            except OSError as error:
                server.close()
                if _clock.monotonic() > deadline:
                    remedy = "Another job with the same scheduler runs here: end it, or take another port."
                    raise ConfigError("scheduler", self._key, "one job at a time", remedy) from error
                time.sleep(PAUSE)
        server.listen(self._others)
        # A forked data worker that outlives a killed rank 0 would keep the name from the next attempt.
        os.register_at_fork(after_in_child=server.close)
        return server

    def _serve(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), name="lastgasp-answer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(self._wait)
            try:
                number = int(connection.recv(16) or b"-1")
                if number < 0 or _user(connection) != os.geteuid():
                    return
                with self._told:
                    self._told.wait_for(lambda: len(self._values) > number or self._server is None, self._wait)
                    answer = self._values[number] if len(self._values) > number else b""
                connection.sendall(answer)
            except (OSError, ValueError):
                return  # it will ask again, or has ended

    # -- the other ranks --------------------------------------------------------------------------

    def _ask(self, number: int) -> bytes:
        deadline = _clock.monotonic() + self._wait
        while _clock.monotonic() < deadline:
            answer = self._try(number, deadline)
            if answer:
                return answer
            time.sleep(PAUSE)
        raise ConfigError(
            "LASTGASP_CONTROLLER",
            os.environ.get("LASTGASP_CONTROLLER"),
            f"host:port of the controller, because rank 0 did not answer on this machine in {self._wait:g} s",
            "Start the job with `lastgasp run --framework mindspore`; if it spans several nodes, see there.",
        )

    def _try(self, number: int, deadline: float) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(max(0.01, deadline - _clock.monotonic()))
            try:
                link.connect(self._address)
                if _user(link) != os.geteuid():
                    raise AuthenticationError(f"user {_user(link)} answers in place of rank 0")
                link.sendall(b"%d" % number)
                return b"".join(iter(lambda: link.recv(LIMIT), b""))
            except OSError:
                return b""


def _user(connection: socket.socket) -> int:
    """Return the peer's user id as reported by the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
