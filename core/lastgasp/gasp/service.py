"""What the controller does for operators (`lastgasp ps`, `lastgasp switch`), on its event loop.

An operator is not a rank: it joins no gather, its end is not a fault, and what it asks for touches neither the machine
nor a recovery. A rank acknowledges each order by its number; one that leaves before that counts as gone at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lastgasp import __version__, _clock
from lastgasp.errors import AuthenticationError, ProtocolError, VersionMismatch
from lastgasp.steps import bits

from . import messages as m
from .admission import ended_by_all
from .attempt import Attempt
from .cards import SwitchResult
from .operator import NOBODY
from .roster import Roster, job_state

T = TypeVar("T")
IDLE = 60.0
"""Seconds that an operator may take to ask, or to take its answer."""
MAX_OPERATORS = 16
"""Operators connected at the same time; each is a person or a script."""
WAIT_LEAST, WAIT_MOST = 0.1, 600.0
"""Seconds that a switch may wait for its ranks."""
ENDED = "its training ended"


@dataclass
class _Order:
    """A switch that waits for ranks."""

    awaited: set[int]
    done: asyncio.Event = field(default_factory=asyncio.Event)
    results: dict[int, SwitchResult] = field(default_factory=dict)

    def settle(self, rank: int, mask: int | None, why: str) -> None:
        """Record the answer of one rank; the first one counts."""
        if rank in self.awaited:
            self.awaited.discard(rank)
            self.results[rank] = SwitchResult(rank=rank, mask=mask, why=why)
            if not self.awaited:
                self.done.set()


class Service:
    """Answers operators.

    Args:
        generation: returns the current attempt, None before the first rank.
        send: gives a rank a message; False where it is not connected.
        started_s: when the controller started, unix seconds.
    """

    def __init__(
        self, attempt: Callable[[], Attempt | None], send: Callable[[int, m.Message], bool], started_s: int
    ) -> None:
        self._attempt, self._send, self._started_s = attempt, send, started_s
        self.roster = Roster()
        self._orders: dict[int, _Order] = {}
        self._numbers = itertools.count(1)
        self._operators = 0

    # -- news from the ranks ----------------------------------------------------------------------

    def heard(self, rank: int, message: m.FromRank) -> None:
        """Handle a message of a rank."""
        self.roster.heard(rank, message, _clock.monotonic())
        if isinstance(message, m.Register) and not message.card.protected and (attempt := self._attempt()) is not None:
            attempt.unprotected = True
        if isinstance(message, m.Switched) and (order := self._orders.get(message.order)) is not None:
            refused = message.mask < 0
            why = message.why or "it did not say why" if refused else ""
            order.settle(rank, None if refused else message.mask, why)

    def gone(self, rank: int, why: str) -> None:
        """A rank will no longer answer."""
        attempt = self._attempt()
        self.roster.gone(rank, why)
        member = attempt.machine.members.get(rank) if attempt is not None else None
        for order in self._orders.values():
            order.settle(rank, None, f"gone: {ENDED if member is not None and member.left else why}")

    # -- operators --------------------------------------------------------------------------------

    def admit(self, hello: m.Operator, token: str, nonce: bytes) -> None:
        """Raise if this operator cannot be admitted; the token is checked first and never appears in a message."""
        if not m.proven(token, "operator", nonce, NOBODY, hello.mac):
            raise AuthenticationError("wrong token: the operator does not know this job's")
        if hello.protocol != m.PROTOCOL or hello.version != __version__:
            raise VersionMismatch(
                f"lastgasp version {hello.version} here, but {__version__} in the job: use the job's own installation"
            )
        if self._operators >= MAX_OPERATORS:
            raise ProtocolError(m.MANY_OPERATORS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one operator's questions until it goes; never raises for what an operator does."""
        self._operators += 1
        try:
            while True:
                answer = await self._next_answer(reader)
                writer.write(m.frame(answer))
                async with asyncio.timeout(IDLE):
                    await writer.drain()
                if isinstance(answer, m.Refused):
                    return
        except (TimeoutError, OSError, EOFError):
            pass  # it may go at any time
        finally:
            self._operators -= 1

    async def _next_answer(self, reader: asyncio.StreamReader) -> m.Message:
        try:
            async with asyncio.timeout(IDLE):
                question = await _read(reader)
            return await _while_connected(self._answer(question), reader)
        except ProtocolError as error:
            return m.Refused(reason=str(error))

    async def _answer(self, question: m.FromOperator) -> m.Message:
        if isinstance(question, m.AskRanks):
            return self._ranks(question.of)
        if isinstance(question, m.AskSwitch):
            return await self._switch(question)
        raise ProtocolError(f"{type(question).__name__} after the greeting")

    def _ranks(self, of: int | None) -> m.Ranks:
        attempt = self._attempt()
        hello = attempt.hello if attempt is not None else None
        rows = self.roster.rows(attempt, _clock.monotonic()) if attempt is not None else ()
        return m.Ranks(
            job=hello.job if hello is not None else "",
            directory=hello.directory if hello is not None else "",
            attempt=hello.attempt if hello is not None else 0,
            world_size=hello.world_size if hello is not None else 0,
            state=job_state(attempt, rows),
            started_s=self._started_s,
            rows=rows if of is None else tuple(row for row in rows if row.rank == of),
            incarnation=hello.incarnation if hello is not None else 0,
            replaced=attempt.replaced if attempt is not None else (),
            ended_by_all=attempt is not None and ended_by_all(attempt),
        )

    # -- the switch -------------------------------------------------------------------------------

    async def _switch(self, ask: m.AskSwitch) -> m.Message:
        attempt = self._attempt()
        if why := wrong_switch(ask) or ("" if attempt is not None else "no rank has joined the job yet"):
            return m.Refused(reason=why)
        assert attempt is not None
        everybody = range(attempt.hello.world_size)
        ranks = set(everybody if ask.ranks is None else ask.ranks)
        number, order = next(self._numbers), _Order(awaited=ranks)
        self._orders[number] = order
        try:
            self._give(number, order, ask, attempt)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ask.wait):
                    await order.done.wait()
        finally:
            del self._orders[number]
        for rank in list(order.awaited):
            order.settle(rank, None, f"no answer within {ask.wait:g} s")
        return m.SwitchDone(results=tuple(order.results[rank] for rank in sorted(order.results)))

    def _give(self, number: int, order: _Order, ask: m.AskSwitch, attempt: Attempt) -> None:
        message = m.SwitchOrder(order=number, on=ask.on, off=ask.off)
        for rank in sorted(order.awaited):
            if not self._send(rank, message):
                order.settle(rank, None, _not_here(rank, attempt))
        if not order.awaited:
            order.done.set()


def wrong_switch(ask: m.AskSwitch) -> str:
    """Why it is not allowed; empty if it is."""
    if not WAIT_LEAST <= ask.wait <= WAIT_MOST:
        return f"wait={ask.wait!r} is not allowed: expected {WAIT_LEAST:g} to {WAIT_MOST:g} seconds"
    if (ask.on | ask.off) & ~bits.ALL or ask.on < 0 or ask.off < 0:
        return f"on={ask.on}, off={ask.off} is not allowed: expected bits out of {bits.ALL}"
    if ask.on & ask.off:
        return f"on={ask.on}, off={ask.off} is not allowed: {bits.describe(ask.on & ask.off)} cannot be both"
    if not ask.on | ask.off or ask.ranks == ():
        return "nothing to switch: name at least one kind of marks and one rank"
    return ""


def _not_here(rank: int, attempt: Attempt) -> str:
    if not 0 <= rank < attempt.hello.world_size:
        return f"unknown rank: the job has 0 to {attempt.hello.world_size - 1}"
    member = attempt.machine.members.get(rank)
    if member is None:
        return "has not joined yet"
    return f"gone: {ENDED if member.left else member.gone or 'its connection closed'}"


async def _read(reader: asyncio.StreamReader) -> m.FromOperator:
    size = m.body_size(await reader.readexactly(m.HEADER), m.MAX_ASK)
    return m.from_operator(await reader.readexactly(size))


async def _while_connected(answer: Awaitable[T], reader: asyncio.StreamReader) -> T:
    """The answer, unless the operator disconnects first.

    Raises:
        EOFError: it disconnected.
        ProtocolError: it asked again before it got its answer.
    """
    answering, hearing = asyncio.ensure_future(answer), asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({answering, hearing}, return_when=asyncio.FIRST_COMPLETED)
        if hearing.done():
            if hearing.result():
                raise ProtocolError("one question at a time")
            raise EOFError("the operator went")
        return await answering
    finally:
        for task in (answering, hearing):
            task.cancel()
        await asyncio.gather(answering, hearing, return_exceptions=True)
