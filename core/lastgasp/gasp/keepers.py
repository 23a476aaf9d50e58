"""The controller's side of the keepers, which run in the launchers of other hosts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from lastgasp import __version__, _clock
from lastgasp.errors import AuthenticationError, ControlError, ProtocolError, VersionMismatch
from lastgasp.exitcodes import REFUSED

from . import messages as m
from .operator import NOBODY
from .peers import read_frame
from .process_monitor import describe_exit

ANSWER = 2.0
"""Seconds for a keeper to report what it keeps of a dead rank; the save waits for it."""


class Keepers:
    """All methods run on the event loop.

    Args:
        died_at: called with the step that a dead rank had completed.
        exited: called with how a process ended that was to be a rank, before it joined.

    Attributes:
        connected, most: how many launchers are connected, and the most there have been; read by other threads.
        on_buddy: called with what is said about copies on partner hosts: host, its address, message.
        refused: attempts in which a rank has refused to start, and its launcher has said so.
        own_address: by which the launchers of other hosts reach this one; empty before the first has connected.
    """

    def __init__(
        self, died_at: Callable[[int, int], None], exited: Callable[[m.Exited], None] = lambda exited: None
    ) -> None:
        self._died_at, self._exited = died_at, exited
        self.connected = self.most = 0
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._buffers: dict[int, tuple[str, m.Keep]] = {}
        self._asked: dict[int, float] = {}
        self._states: dict[int, dict[int, bytes]] = {}
        self._arenas: dict[int, m.Kept] = {}
        self._forks: dict[asyncio.StreamWriter, m.Forks | None] = {}
        self._agreed: m.Agreed | None = None
        self._completed = -1
        self.refused: set[int] = set()
        self._over: m.JobOver | None = None
        self._put_off: list[m.Exited] = []
        self.on_buddy: Callable[[str, str, m.Listens | m.Copied | m.Remarked], None] = lambda *said: None
        self.own_address = ""

    @staticmethod
    def admit(hello: m.Keeper, token: str, nonce: bytes) -> None:
        """Raise an error if this keeper must be refused; the token is checked first."""
        if not m.proven(token, "keeper", nonce, NOBODY, hello.mac):
            raise AuthenticationError("wrong token: the launcher does not belong to this job")
        if hello.protocol != m.PROTOCOL or hello.version != __version__:
            raise VersionMismatch(f"lastgasp version {hello.version} on {hello.host}, but {__version__} here")

    async def serve(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one keeper until it disconnects; the newest of a host counts."""
        self._writers[host], self.own_address = writer, str(writer.get_extra_info("sockname")[0])
        for where, order in self._buffers.values():
            if where == host:
                writer.write(m.frame(order))
        if self._agreed is not None:
            writer.write(m.frame(self._agreed))
        writer.write(m.frame(m.Completed(attempt=self._completed)))
        for attempt in self.refused:
            writer.write(m.frame(m.RefusedToStart(attempt=attempt)))
        if self._over is not None:
            writer.write(m.frame(self._over))
        self._forks[writer] = None
        self.connected += 1
        self.most = max(self.most, self.connected)
        try:
            while True:
                message = m.from_keeper(await read_frame(reader, m.MAX_FRAME))
                if isinstance(message, m.Listens | m.Copied | m.Remarked):
                    self.on_buddy(host, str(writer.get_extra_info("peername")[0]), message)
                else:
                    self._heard(writer, message)
        finally:
            self.connected -= 1
            del self._forks[writer]
            if self._writers.get(host) is writer:
                del self._writers[host]

    def _heard(self, writer: asyncio.StreamWriter, message: m.FromKeeper) -> None:
        if isinstance(message, m.Forks):
            self._forks[writer] = message
        elif isinstance(message, m.Exited):
            self.rank_ended(message.attempt, message.how)
            self._exited(message)
        elif isinstance(message, m.Kept):
            self._asked.pop(message.rank, None)
            self._states[message.rank] = dict(zip(message.steps, message.states, strict=False))
            self._arenas[message.rank] = message
            if message.steps:
                self._died_at(message.rank, message.steps[0])
        else:
            raise ProtocolError(f"{type(message).__name__} after the greeting")

    def rank_ended(self, attempt: int | None, how: str) -> None:
        """A rank of any host has ended; where it has refused to start, no launcher need wait for its host."""
        if attempt is None or how != describe_exit(REFUSED):
            return
        self.refused.add(attempt)
        self._tell_all(m.RefusedToStart(attempt=attempt))

    def put_off(self, exited: m.Exited) -> None:
        """Keep it until the attempt and incarnation that it is of have begun."""
        self._put_off = [one for one in self._put_off if _order_of(one) == _order_of(exited)] + [exited]

    def were_put_off(self, attempt: int, incarnation: int) -> list[m.Exited]:
        """Those of an attempt and incarnation that have begun; all others are forgotten."""
        found, self._put_off = self._put_off, []
        return [one for one in found if _order_of(one) == (attempt, incarnation)]

    def no_process(self, attempt: int, others: int) -> str:
        """Why ranks of other hosts cannot get new processes; empty where all can. May be read by other threads.

        Args:
            others: how many launchers the job has besides this one.
        """
        if not others:
            return ""
        known = [one for one in list(self._forks.values()) if one is not None and one.attempt == attempt]
        if missing := self.missing(attempt, others):
            return f"{missing} of {others} launchers of other hosts cannot be reached"
        return next((f"another host: {one.cannot}" for one in known if one.cannot), "")

    def missing(self, attempt: int, others: int) -> int:
        """How many of the `others` launchers cannot be reached. May be read by other threads."""
        return others - self.taking_part(attempt)

    def taking_part(self, attempt: int) -> int:
        """How many launchers that are connected have ranks in this attempt. May be read by other threads.

        One that has come back says so only once its ranks were taken in.
        """
        return sum(one is not None and one.attempt == attempt for one in list(self._forks.values()))

    def lost(self, host: str) -> None:
        """A rank's host does not answer any more; its launcher's connection will end as well."""
        for writer in [writer for where, writer in self._writers.items() if where == host]:
            self._forks[writer] = None

    def agreed(self, agreed: m.Agreed) -> None:
        """Tell all how a recovery has ended; who comes back after a lost connection is told, too."""
        self._agreed = agreed
        self._tell_all(agreed)

    def completed(self, attempt: int) -> None:
        """Tell all of which attempt all ranks have completed their training, or -1, where that has changed."""
        if attempt != self._completed:
            self._completed = attempt
            self._tell_all(m.Completed(attempt=attempt))

    def job_over(self, over: m.JobOver) -> None:
        """Tell all that the first launcher ends the job, and with which code."""
        self._over = over
        self._tell_all(over)

    def _tell_all(self, message: m.Message) -> None:
        for writer in self._forks:
            with contextlib.suppress(ControlError):
                writer.write(m.frame(message))

    def begin(self, attempt: int) -> None:
        """Start another attempt or training, whose ranks have buffers of their own."""
        if self._agreed is not None and (self._agreed.attempt, self._agreed.again) == (attempt, None):
            self.agreed(m.Agreed(attempt=attempt, ending="open"))  # the script has handled what ended the one before
        self._buffers, self._asked, self._states, self._arenas = {}, {}, {}, {}

    def keep(self, host: str, order: m.Keep) -> None:
        """Register the buffer of a rank on another host."""
        self._buffers[order.rank] = (host, order)
        if (writer := self._writers.get(host)) is not None:
            writer.write(m.frame(order))

    def send(self, host: str, message: m.Message) -> None:
        """To the launcher of that host, if it is connected."""
        if (writer := self._writers.get(host)) is not None:
            with contextlib.suppress(ControlError):
                writer.write(m.frame(message))

    def ask(self, rank: int) -> None:
        """Ask for the states of a dead rank; no effect for a rank without a buffer on another host."""
        host, _ = self._buffers.get(rank, ("", None))
        writer = self._writers.get(host)
        if writer is None or rank in self._asked or rank in self._states:
            return
        self._asked[rank] = _clock.monotonic() + ANSWER
        with contextlib.suppress(ControlError):
            writer.write(m.frame(m.AskKept(rank=rank)))

    @property
    def awaited(self) -> bool:
        """Whether a keeper may still answer."""
        now = _clock.monotonic()
        return any(deadline > now for deadline in self._asked.values())

    def has_buffer(self, rank: int) -> bool:
        """Whether this rank of another host has a buffer."""
        return rank in self._buffers

    def aux(self, rank: int, step: int) -> bytes | None:
        """The auxiliary state of a dead rank, as reported by its host's launcher."""
        return self._states.get(rank, {}).get(step)

    def arena(self, rank: int) -> m.Kept | None:
        """What its host's launcher has said about the arena of a rank; None before it was asked."""
        return self._arenas.get(rank)


def _order_of(exited: m.Exited) -> tuple[int, int]:
    return exited.attempt, exited.incarnation
