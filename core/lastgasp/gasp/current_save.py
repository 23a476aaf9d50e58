"""How far the save that the machine has decided on has got."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import messages as m
from .decision import SavePlan


@dataclass
class CurrentSave:
    """One plan and its savers' answers, each of which takes constant time: there may be as many savers as ranks.

    Attributes:
        told: whether the savers have got their orders.
        saved: answers, by rank.
        savers: of the plan; unsaved: those that have not saved yet.
    """

    plan: SavePlan
    told: bool = False
    saved: dict[int, m.Saved] = field(default_factory=dict)
    savers: frozenset[int] = field(init=False)
    unsaved: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.savers, self.unsaved = frozenset(self.plan.savers), set(self.plan.savers)

    def take(self, rank: int, answer: m.Saved) -> None:
        """One of them has saved."""
        self.saved[rank] = answer
        self.unsaved.discard(rank)

    @property
    def parts(self) -> dict[int, bytes]:
        """What the publisher puts together, by rank."""
        return {rank: saved.part for rank, saved in self.saved.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(saved.nbytes for saved in self.saved.values())
