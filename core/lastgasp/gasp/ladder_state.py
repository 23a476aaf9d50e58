"""What the ladder of recoveries knows, and what it asks of that. It does nothing.

Fields and questions of `ladder.Ladder`, which chooses and acts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from . import messages as m
from .again import Again, Offer
from .late import may_come, only_killed, only_late
from .machine import Machine
from .own_parts import has_arenas


@dataclass
class LadderState(Machine):
    """What is known about one incarnation of an attempt.

    Args:
        incarnation: how often ranks of this attempt have been entered again.
        offer: what the launcher can do now; None where it can do nothing, or has yet to say; offering: it will.
        enter_by: when all ranks must have begun, monotonic seconds; infinite where all begin with files, for which
            they may take long.
        loads: so it is; absent: for whom all others have waited in vain then, at this monotonic second.
        holders: ranks that have entered again with the step in memory, as far as they get.
        elsewhere: why ranks of other hosts cannot get new processes now, or empty; by how many launchers there are.
        missing: how many of those launchers cannot be reached; address: by which a rank has reached the controller.
        weary: why no further exception is answered in place; empty while they are.
        slow: why no rank is replaced, since a new process would take too long; unwise: why nothing is answered in place
            any more. Empty while it is.
        in_vain: the incarnation before had been entered again as well, and has led to no new step.

    Attributes:
        again: what was agreed for a recovery in place; None where there was none.
        not_in_place: why there was none.
        shrunk: why ranks are missing from now on, and how many; grown: how many are there again. Empty where none are.
        not_grown: why ranks that wait are not taken in by this incarnation; empty while they may be.
    """

    incarnation: int = 0
    offer: Offer | None = None
    offering: Callable[[], bool] = lambda: False
    enter_by: float = math.inf
    loads: bool = False
    absent: Callable[[float], frozenset[int]] = lambda now: frozenset()
    holders: frozenset[int] = frozenset()
    elsewhere: Callable[[int], str] = lambda others: ""
    missing: Callable[[int], int] = lambda others: 0
    address: Callable[[int], str] = lambda rank: ""
    weary: str = ""
    slow: str = ""
    unwise: str = ""
    in_vain: bool = False
    again: Again | None = None
    not_in_place: str = ""
    shrunk: str = ""
    grown: str = ""
    not_grown: str = ""
    stayed: tuple[int, ...] = ()
    """Ranks that have got new processes as they did not leave their training."""
    began_at: int = -1
    """The greatest step from which a rank of this incarnation began."""
    _recovery: dict[int, str] = field(default_factory=dict)
    _from_files: bool = False
    """Ranks that are entered again begin with what was saved."""
    _entered: set[int] = field(default_factory=set)
    _once_saved: Again | None = None
    """What follows the save of a step that only one rank holds."""
    _late: bool = False
    """Ranks that did not enter in time are known."""
    _fewer: dict[int, m.Fewer] = field(default_factory=dict)
    """Whether ranks can go on with fewer."""
    _stubborn: set[int] = field(default_factory=set)
    """Ranks that raised what would come again."""
    _growing: tuple[int, ...] = ()
    """While ranks are stopped without a fault: `Again.members` of what is to follow."""
    _grow_after: float = 0.0
    _grow_by: float = 0.0
    _offer_by: float = math.inf
    _cause_by: float = math.inf
    _stopped_since: dict[int, float] = field(default_factory=dict)
    """Ranks that were to enter again with files, and whose processes are stopped."""

    @property
    def wanted(self) -> bool:
        """Some rank may be entered again: the launcher should make an offer."""
        return any(cap not in ("", "restart", "save") for cap in self._recovery.values())

    @property
    def leaves(self) -> bool:
        """Some rank asked that the job ends after the save."""
        return "save" in self._recovery.values()

    def next_training(self) -> None:
        """A rank comes to the script's next training, which nobody enters again."""
        self.holders, self.began_at, self.enter_by, self._entered = frozenset(), -1, math.inf, set()
        self.loads = False

    @property
    def _once_more(self) -> bool:
        """All may begin again with the step that they have begun with: survivors are late, or ranks were killed.

        Only once: the next incarnation is `unwise`, or `in_vain`.
        """
        if not (self.holders or self._all_from_files) or not self._here or self._by_handlers:
            return False
        if self._late and not self._entered:
            return only_late(self.faults, self.members, self.holders)
        return not self.in_vain and only_killed(self.faults)

    @property
    def _all_from_files(self) -> bool:
        return self.incarnation > 0 and self._from_files and len(self.members) == self.world_size

    @property
    def _elastic(self) -> set[int]:
        """Ranks that can go on with fewer."""
        return {rank for rank, said in self._fewer.items() if said.may}

    @property
    def _may_come(self) -> bool:
        if self._late:
            return False
        if self._once_more and any(self._comes(rank) for rank in self.holders):
            return True
        return any(may_come(shard, self._here, self.members, self.holders) for shard in self.replicas)

    def _comes(self, rank: int) -> bool:
        """Whether a rank that holds the step has yet to join, or to say so; then it says what it can do besides."""
        member = self.members.get(rank)
        return member is None or (member.here and not member.begun)

    @property
    def _in_parts(self) -> bool:
        """Each rank alone holds a part of the state, and begins with its own."""
        return not self._from_files and has_arenas(self.arenas, self.world_size)

    @property
    def _by_handlers(self) -> bool:
        """Its ranks hand their shards over by handlers, which know them by the numbers of the complete job (MindIO)."""
        return bool(self._here) and all(self.members[rank].together for rank in self._here)

    def _no_process(self) -> str:
        """Why a dead rank cannot get a new process."""
        assert self.offer is not None
        cap = min((self._recovery[rank] for rank in self._here or self._recovery), default="")
        if cap in ("retry", "fewer"):
            return f"recovery={cap}: no rank is replaced"
        if self.slow and not self._from_files:  # those who begin with files may take as long as they like
            return self.slow
        return self.offer.no_process or self.elsewhere(self.offer.others)

    def _lost_ranks(self) -> tuple[int, ...]:
        return tuple(r for r in range(self.world_size) if r not in self.members or self.members[r].lost)
