"""A process that MindIO has take the place of a lost rank (`recover`, or scale out), before it has a process group or a
session.

TaskD's agent starts it like any other: only MindIO can say that it is a new one. What it needs to know of the others
(where their controller is, and where all meet for a new process group) goes through the store of torch's agent, which
outlives the ranks. The job's secret does not (`gasp.secret`).
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lastgasp.backends import choose_backend
from lastgasp.deferred_source import TOO_LATE
from lastgasp.errors import LastgaspError
from lastgasp.gasp.again import INCARNATION, LED, Again
from lastgasp.gasp.joining import Code, code_of_this_process, different
from lastgasp.gasp.rank_status import gone_on
from lastgasp.launch.bounded import BoundedStore
from lastgasp.pytorch.loop.memory import Held
from lastgasp.pytorch.loop.succession import Succession
from lastgasp.session import Contact
from lastgasp.topology import Place

log = logging.getLogger("lastgasp")

LIMIT = 15.0
"""Seconds for the store to answer."""
LATER = 5.0
"""Seconds more, in which it says itself that a key is not there."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""With older versions of torch, and with TaskD's patch, part of the name by which ranks find each other."""
CONTACT, CODE, NUMBER, JOINS, PORT = "contact", "code", "number", "joins", "port"


class Job(msgspec.Struct, frozen=True):
    """How a new process joins the job's controller."""

    address: str
    name: str
    attempt: int
    restarts: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """What torch and lastgasp read in a process that joins. Its agent may be younger, and count otherwise."""
        found = {"LASTGASP_CONTROLLER": self.address, "LASTGASP_JOB": self.name, "LASTGASP_ATTEMPT": str(self.attempt)}
        return found | ({RESTARTS: self.restarts} if self.restarts else {})


class Meeting:
    """The store of torch's agent, as far as the ranks use it.

    A recovery is numbered by those who go on. Each order of MindIO's goes to all ranks, and the next one only after all
    have answered: what `rebuild` writes is there for `look`, and is that of this recovery.

    Attributes:
        joins: the controller's incarnation that new processes join, as text.
        succession: of this process's rank.

    Raises (constructor):
        RuntimeError: the store does not answer.
    """

    def __init__(self) -> None:
        env = os.environ
        self._host, self._rank = env.get("MASTER_ADDR", "127.0.0.1"), int(env["RANK"])
        limit = timedelta(seconds=LIMIT)
        store = TCPStore(self._host, int(env["MASTER_PORT"]), None, False, limit, wait_for_workers=False)
        self._store = BoundedStore(PrefixStore("lastgasp", store), LIMIT + LATER)
        self.succession = Succession(self._store, self._rank)
        self._own: TCPStore | None = None
        self._lost = tuple[int, ...]()
        self._found = 0, 0
        self.joins = "0"

    def tell(self, contact: Contact, place: Place) -> None:
        """How this attempt's controller is reached."""
        job = Job(contact.address, place.job, place.attempt, os.environ.get(RESTARTS, ""))
        self._store.set(CONTACT, msgspec.json.encode(job).decode())

    def job(self) -> Job:
        """What `tell` has told."""
        return msgspec.json.decode(self._store.get(CONTACT), type=Job)

    def tell_code(self) -> None:
        """What the ranks of this attempt run; rank 0 says it before it trains. Without it nobody is taken in."""
        try:
            self._store.set(CODE, msgspec.json.encode(code_of_this_process()).decode())
        except RuntimeError as error:
            log.warning("no new process can be taken in: the store of torch's agent does not answer (%s)", error)

    def runs_other_code(self) -> str:
        """In what this process, which has taken a rank's place, differs from rank 0; empty if in nothing."""
        told = self._store.get(CODE) if self._store.check(CODE) else "{}"
        return different(msgspec.json.decode(told, type=Code), code_of_this_process())

    def rebuild(self, lost: tuple[int, ...], grows: bool = False) -> None:
        """`rebuild_group` came: those who go on say which recovery this is, rank 0 where all will meet.

        Args:
            grows: these ranks were missing, and the others join the controller anew with them.
        """
        self._lost = lost
        if self._rank not in lost:
            number = int(os.environ.get(INCARNATION) or 0) + 1
            self._store.set(NUMBER, str(number))
            self._store.set(JOINS, str(number) if grows else os.environ.get(LED) or "0")
        if self._rank == 0:
            self._own = TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False, multi_tenant=True)
            self._store.set(PORT, str(self._own.port))

    def look(self) -> None:
        """`repair` or `rollback` came, so that all have rebuilt."""
        self._found = int(self._store.get(NUMBER)), int(self._store.get(PORT))
        self.joins = self._store.get(JOINS).decode()

    def of(self, again: Again) -> Again:
        """`again`, with what was agreed here."""
        number, port = self._found
        return msgspec.structs.replace(again, incarnation=number, lost=self._lost, port=port, host=self._host)


_meeting: list[Meeting] = []
_refused: list[str] = []


def meeting() -> Meeting | None:
    """Of this process, if it has joined MindIO before its process group is made."""
    return _meeting[0] if _meeting else None


def why_not() -> str:
    """Why no new process could join this one's job; empty where one could."""
    return "" if _meeting else _refused[0] if _refused else TOO_LATE


def join(fewer: bool = False, moved: bool = True) -> Held | None:
    """Join MindIO now where it may have single processes started anew.

    Args:
        fewer: the training may go on with fewer ranks, as far as is known before it begins.
        moved: a rank of it may be moved to another node (hot switch).

    Returns:
        For a process that has taken the place of a dead one: what it begins with, once the others have agreed.

    Raises:
        RuntimeError: MindIO did not take it into the running job.
    """
    if _meeting or _refused or os.environ.get("WORLD_SIZE", "1") == "1" or choose_backend().backend != "ascend":
        return None
    from lastgasp.backends.ascend.mindio import early

    if not early.is_asked_for(os.environ, fewer):
        return None
    why, place = early.why_not_early(os.environ), None
    try:
        place = None if why else Meeting()
        joined = None if why else early.start_early(fewer)
    except early.AloneError:
        raise
    except (LastgaspError, ValueError, KeyError, RuntimeError, OSError) as error:
        why, joined = f"{type(error).__name__}: {error}", None
    if place is None or joined is None:
        _refused[:] = [why]
        return None
    _meeting[:] = [place]
    joined.meeting = place
    if not joined.anew:
        if joined.rank == 0:
            place.tell_code()
        return None
    if joined.moves and not moved:  # before MindIO hears that it waits, so that nobody leaves a step for it
        raise RuntimeError(f"hot switch: rank {joined.rank} stays where it is, LastGasp moves none of this framework's")
    again = gone_on(joined.joins(place)).again
    assert again is not None
    joined.given = os.environ.get(early.CONTROLLER, "")
    os.environ.update(place.job().environment)
    held = Held(place.of(again))
    os.environ.update(held.again.environment | {LED: place.joins})
    return held
