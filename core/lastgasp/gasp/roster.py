"""What the controller shows operators about each rank: its card and last heartbeat. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import messages as m
from .attempt import Attempt
from .cards import JobState, RankRow, RankState, WorkerCard
from .members import Member
from .peers import CLOSED


@dataclass
class _Entry:
    heard: float
    card: WorkerCard | None = None
    status: m.Status | None = None
    ended: str = ""
    """How its connection ended; empty while it has not."""


class Roster:
    """The ranks of one attempt; `begin` starts the next attempt."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def begin(self) -> None:
        """Start another attempt: forget all ranks."""
        self._entries.clear()

    def joined(self, rank: int, now: float) -> None:
        """A rank has authenticated; forget what an earlier process of that rank reported."""
        self._entries[rank] = _Entry(heard=now)

    def heard(self, rank: int, message: m.FromRank, now: float) -> None:
        """Handle a message of a rank."""
        entry = self._entries.get(rank)
        if entry is None:
            return
        entry.heard = now
        if isinstance(message, m.Status):
            entry.status = message
        elif isinstance(message, m.Register):
            entry.card = message.card

    def gone(self, rank: int, why: str) -> None:
        """Its connection has ended."""
        if (entry := self._entries.get(rank)) is not None:
            entry.ended = why

    def on_host(self, rank: int) -> str:
        """Where it runs, as the beginning of a text; empty where all run on one host, or that is not known."""
        nodes = {number: entry.card.node for number, entry in self._entries.items() if entry.card is not None}
        return f"on {nodes[rank]}: " if rank in nodes and len(set(nodes.values())) > 1 else ""

    def rows(self, attempt: Attempt, now: float) -> tuple[RankRow, ...]:
        """Return one row for each rank that the job should have."""
        members = attempt.machine.members
        ranks = sorted(set(range(attempt.hello.world_size)) | set(members))
        return tuple(self._row(rank, members.get(rank), now) for rank in ranks)

    def _row(self, rank: int, member: Member | None, now: float) -> RankRow:
        entry = self._entries.get(rank)
        if member is None or entry is None:
            return RankRow(rank=rank, state="awaited")
        status = entry.status
        free = entry.card is not None and not entry.card.protected
        return RankRow(
            rank=rank,
            state=_free_state(entry.ended) if free else rank_state(member),
            why=entry.ended if free else member.gone,
            card=entry.card,
            step=member.step if member.step >= 0 else None,
            phase=status.phase if status is not None else "",
            marks=status.marks if status is not None and status.marks >= 0 else None,
            heard_s=round(now - entry.heard, 3),
        )


def rank_state(member: Member) -> RankState:
    """In one word."""
    if member.left:
        return "left"
    if member.gone:
        return "dead"
    return "hung" if member.hung else "running"


def _free_state(ended: str) -> RankState:
    """Of an unprotected rank, which says goodbye as soon as it has registered."""
    return "running" if not ended else "left" if ended == CLOSED else "dead"


def job_state(attempt: Attempt | None, rows: Sequence[RankRow] = ()) -> JobState:
    """In one word.

    Args:
        rows: of its ranks; an unprotected rank runs although it has said goodbye.
    """
    if attempt is None:
        return "waiting"
    machine = attempt.machine
    if machine.state == "over":
        return "over"
    if machine.state != "running":
        return "recovering"
    if any(row.state == "running" for row in rows):
        return "running"
    everybody = len(machine.members) >= machine.world_size
    return "ended" if everybody and all(member.left for member in machine.members.values()) else "running"
