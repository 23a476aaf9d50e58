"""How far the save that the machine has decided on has got."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import messages as m
from .decision import SavePlan


@dataclass
class CurrentSave:
    """One plan and its savers' answers.

    Attributes:
        told: whether the savers have got their orders.
        saved: answers, by rank.
    """

    plan: SavePlan
    told: bool = False
    saved: dict[int, m.Saved] = field(default_factory=dict)

    @property
    def unsaved(self) -> set[int]:
        """Savers that have not saved yet."""
        return set(self.plan.savers) - set(self.saved)

    @property
    def parts(self) -> dict[int, bytes]:
        """What the publisher puts together, by rank."""
        return {rank: saved.part for rank, saved in self.saved.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(saved.nbytes for saved in self.saved.values())
