"""What the controller's state machine knows about each rank, and how the recovery ended."""

from __future__ import annotations

from dataclasses import dataclass

from lastgasp.events import Ending, Fault, Unused

from . import messages as m
from .decision import SavePlan


@dataclass(slots=True)
class Member:
    """What is known about one rank that joined."""

    rank: int
    pid: int = 0
    """Its process, where it runs on the controller's host; else 0."""
    step: int = -1
    durable: int = 0
    begun: bool = False
    """Whether its training has begun; steps that it reports before that are ignored."""
    gone: str = ""
    left: bool = False
    hung: bool = False
    fault: Fault | None = None
    prepared: m.Prepared | None = None
    failures: int = 0
    moves: int = 0
    """How often its state advanced while it was being saved."""
    failed: str = ""
    """Why its last save failed."""
    together: tuple[tuple[int, ...], ...] = ()
    """Shards whose savers this rank has to know when it saves."""
    seeded: bool = False
    """It seeds its generators anew for each micro-batch (`ElasticLoader`): no state of theirs can be lost."""

    def begins(self, message: m.Begin) -> None:
        """Its training begins."""
        self.begun, self.together = True, message.together
        fewer = message.fewer.may and not message.fewer.parts and not message.from_files
        self.seeded = fewer and not message.together
        self.step, self.durable = message.step, message.durable

    def to_commit(self, finish: float, save: float) -> float:
        """Seconds to publish a checkpoint: as many as for a save where its files are read back for their manifest."""
        return save if self.together else finish

    def reached(self, step: int, durable: int) -> None:
        """Record the steps that the rank reports itself."""
        if self.begun or step > 0:
            self.step = max(self.step, step)
        self.durable = max(self.durable, durable)

    @property
    def here(self) -> bool:
        """Whether it is connected and can answer."""
        return not self.gone and not self.left and not self.hung

    @property
    def lost(self) -> bool:
        """Whether it cannot be entered again: its process has ended or hangs, or it has not answered."""
        return bool(self.gone) or self.hung or self.prepared is None

    def holds(self, step: int) -> bool:
        """Whether it has answered that it holds this step, and can write it."""
        return self.prepared is not None and self.prepared.usable and self.prepared.step == step

    @property
    def must_be_killed(self) -> bool:
        """Whether it is hung, or not even its control thread answered: it will not exit on its own."""
        return not self.gone and not self.left and (self.hung or self.prepared is None)


@dataclass
class Outcome:
    """How the recovery ended, for the incident record."""

    ending: Ending = "open"
    reason: str = ""
    step: int | None = None
    lost: int | None = None
    path: str = ""
    nbytes: int = 0
    first_byte_ns: int | None = None
    savers: tuple[int, ...] = ()
    unused: tuple[Unused, ...] = ()
    arenas: tuple[int, ...] = ()
    """Ranks whose shards were written from their arenas."""
    buddies: tuple[int, ...] = ()
    """Ranks whose shards were written from the copies of their arenas on partner hosts."""

    def planned(self, plan: SavePlan) -> None:
        """This is going to be saved."""
        self.step, self.lost, self.savers = plan.step, plan.lost, plan.savers
        self.arenas = tuple(sorted({owner for owner in plan.arenas if owner >= 0} - plan.buddies))
        self.buddies = tuple(sorted(plan.buddies))

    def release(self, recovery: int) -> m.Release:
        """The order that tells it to all ranks."""
        step = -1 if self.step is None else self.step
        return m.Release(recovery=recovery, ending=self.ending, step=step, path=self.path, reason=self.reason)
