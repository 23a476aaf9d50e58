"""The decision where shards have arenas: newest step that a live rank or an arena holds of every shard. Pure.

A live rank comes before an arena, an arena before a live rank whose own save has failed. The arena of a dead rank is
written by a rank of the same host that can still write; that of a live one, which may hold an older step than its
parameters, by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from lastgasp.topology import ReplicaGroups

from .decision import Decision, GiveUp, NothingToSave, RankView, SavePlan, decide, unused
from .keeping import ArenaRef
from .members import Member

Steps = Mapping[int, tuple[int, ...]]
"""The steps that the arena of each rank holds."""


class ArenaLook(Protocol):
    """What the launchers know of the arenas that they keep."""

    @property
    def awaited(self) -> bool:
        """Whether the launcher of another host has been asked, and may still answer."""

    def steps(self) -> Steps:
        """The steps in the arena of each rank that has one."""

    def hosts(self) -> Mapping[int, str]:
        """The host of each rank that has an arena."""

    def reference(self, rank: int) -> ArenaRef:
        """How a rank of the same host opens that arena."""


@dataclass(frozen=True)
class ArenasHeld:
    """The steps in the arena of each rank that has one, and the hosts of these ranks."""

    steps: Steps = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)


def arenas_held(
    look: ArenaLook | None, members: Mapping[int, Member], damaged: Collection[tuple[int, int]]
) -> ArenasHeld:
    """What all arenas hold: as their ranks said themselves, else as their launchers see it; without damaged ones."""
    if look is None or not (known := look.steps()):
        return ArenasHeld()
    found = {}
    for rank, steps in known.items():
        member = members.get(rank)
        if member is not None and member.here and member.prepared is not None:
            steps = member.prepared.arena
        found[rank] = tuple(step for step in steps if (rank, step) not in damaged)
    return ArenasHeld(found, look.hosts())


@dataclass
class _Situation:
    """What is known, and how many arenas each rank has been asked to write."""

    views: dict[int, RankView]
    arenas: Steps
    hosts: Mapping[int, str]
    load: Counter[int] = field(default_factory=Counter)

    def live(self, shard: tuple[int, ...], step: int) -> list[RankView]:
        found = [self.views[rank] for rank in shard if rank in self.views]
        return sorted((v for v in found if v.holds and v.step == step), key=lambda v: (v.faulty, v.rank))

    def kept(self, shard: tuple[int, ...]) -> list[int]:
        """Ranks whose arena somebody can write."""
        return [rank for rank in shard if self.arenas.get(rank) and self.scribes(rank)]

    def scribes(self, owner: int) -> list[int]:
        """Who can write that rank's arena: itself, else the ranks of its host."""
        own = self.views.get(owner)
        if own is not None and own.writes:
            return [owner]
        host = self.hosts.get(owner)
        return [rank for rank, view in self.views.items() if view.writes and self.hosts.get(rank) == host is not None]

    def steps(self, shard: tuple[int, ...]) -> set[int]:
        live = {self.views[rank].step for rank in shard if rank in self.views and self.views[rank].holds}
        return live.union(*(self.arenas[rank] for rank in self.kept(shard)))

    def choose(self, shard: tuple[int, ...], step: int) -> tuple[int, int]:
        """Who saves this shard, and whose arena it writes for it; -1 where it writes what it holds itself."""
        live = self.live(shard, step)
        kept = [rank for rank in self.kept(shard) if step in self.arenas[rank]]
        if live and (not live[0].faulty or not kept):
            return live[0].rank, -1
        scribes = [(self.load[rank], rank, owner) for owner in kept for rank in self.scribes(owner)]
        _, saver, owner = min(scribes)
        self.load[saver] += 1
        return saver, owner


def decide_with_arenas(
    views: tuple[RankView, ...], replicas: ReplicaGroups, durable: int, arenas: ArenasHeld
) -> Decision:
    """As `decide`, with arenas as further holders.

    A step counts as completed once every shard has completed it: what only some ranks have completed nobody could train
    on without the others.
    """
    plain = decide(views, replicas, durable)
    if not arenas.steps or (isinstance(plain, SavePlan) and not plain.lost):
        return plain
    situation = _Situation({view.rank: view for view in views}, arenas.steps, arenas.hosts)
    completed = _completed(situation, replicas)
    if completed <= durable:
        return NothingToSave(step=durable, unused=plain.unused)
    common = set.intersection(*(situation.steps(shard) for shard in replicas))
    step = max(common, default=-1)
    if step <= durable:
        reason = plain.reason if isinstance(plain, GiveUp) else "no step is held of every shard"
        return GiveUp(reason=f"{reason}; {_held(arenas.steps)}", unused=plain.unused, lost=completed - durable)
    if isinstance(plain, SavePlan) and plain.step >= step:
        return replace(plain, lost=max(0, completed - plain.step))
    chosen = [situation.choose(shard, step) for shard in replicas]
    savers = tuple(saver for saver, _ in chosen)
    return SavePlan(
        step=step,
        savers=savers,
        unused=unused(views, frozenset(savers)),
        lost=max(0, completed - step),
        arenas=tuple(owner for _, owner in chosen),
    )


def from_live_ranks(decision: Decision) -> bool:
    """Whether live ranks hold what is decided; if not, they may still come to hold a newer step together."""
    return not isinstance(decision, GiveUp) and not (isinstance(decision, SavePlan) and decision.arenas)


def _completed(situation: _Situation, replicas: ReplicaGroups) -> int:
    """The newest step that some holder of every shard has completed, dead ones included."""
    views, arenas = situation.views, situation.arenas
    known = {rank: max([views[rank].step if rank in views else -1, *arenas.get(rank, ())])
             for shard in replicas for rank in shard}  # fmt: skip
    return min(max(known[rank] for rank in shard) for shard in replicas)


def _held(arenas: Steps) -> str:
    texts = [f"rank {rank} {', '.join(map(str, steps)) or 'none'}" for rank, steps in sorted(arenas.items())]
    return "arenas hold: " + "; ".join(texts[:16])
