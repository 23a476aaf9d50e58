"""The decision where shards have arenas: newest step of which every shard has a holder. Pure.

Holders are live ranks, arenas, and buddies: copies of arenas that a partner host keeps. A live rank comes before an
arena, that before a buddy, and all before a live rank whose own save has failed. The arena of a dead rank is written by
a rank of the same host that can still write, a buddy by one of the partner host; the arena of a live rank, which may
hold an older step than its parameters, by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

from lastgasp.topology import ReplicaGroups

from .arena_ref import ArenaRef
from .decision import Decision, GiveUp, NothingToSave, RankView, SavePlan, decide, newest_of_survivors, unused
from .members import Member

Steps = Mapping[int, tuple[int, ...]]
"""The steps that the arena of each rank holds."""
Buddies = Mapping[int, tuple[str, tuple[int, ...]]]
"""Of each rank whose arena has copies on another host: that host, and the steps."""


class ArenaLook(Protocol):
    """What the launchers know of the arenas that they keep."""

    @property
    def awaited(self) -> bool:
        """Whether the launcher of another host has been asked, and may still answer."""

    def steps(self) -> Steps:
        """The steps in the arena of each rank that has one."""

    def hosts(self) -> Mapping[int, str]:
        """The host of each rank that has an arena."""

    def buddies(self) -> Buddies:
        """The copies on partner hosts."""

    def reference(self, rank: int, *, buddy: bool = False) -> ArenaRef:
        """How a rank of the same host opens that arena, or of the partner host its copy."""


@dataclass(frozen=True)
class ArenasHeld:
    """The steps in the arena of each rank that has one, the hosts of these ranks, and the copies on other hosts."""

    steps: Steps = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    buddies: Buddies = field(default_factory=dict)


def arenas_held(
    look: ArenaLook | None, members: Mapping[int, Member], damaged: Collection[tuple[int, int, bool]]
) -> ArenasHeld:
    """What all arenas hold: as their ranks said themselves, else as their launchers see it; without damaged ones."""
    if look is None or not (known := look.steps()):
        return ArenasHeld()
    found = {}
    for rank, steps in known.items():
        member = members.get(rank)
        if member is not None and member.here and member.begun and member.prepared is not None:
            steps = member.prepared.arena  # a new process that has not begun does not know its predecessor's
        found[rank] = tuple(step for step in steps if (rank, step, False) not in damaged)
    buddies = {
        rank: (host, tuple(step for step in steps if (rank, step, True) not in damaged))
        for rank, (host, steps) in look.buddies().items()
    }
    return ArenasHeld(found, look.hosts(), buddies)


@dataclass
class _Situation:
    """What is known, and how many arenas each rank has been asked to write."""

    views: dict[int, RankView]
    arenas: Steps
    hosts: Mapping[int, str]
    buddies: Buddies
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
        return self._writers(self.hosts.get(owner))

    def _writers(self, host: str | None) -> list[int]:
        here = (rank for rank, view in self.views.items() if view.writes)
        return [rank for rank in here if self.hosts.get(rank) == host is not None]

    def partners(self, owner: int) -> list[int]:
        """Who can write the copy that a partner host has of that rank's arena."""
        host, steps = self.buddies.get(owner, (None, ()))
        return self._writers(host) if steps else []

    def held(self, shard: tuple[int, ...]) -> set[int]:
        """The steps that ranks or their own arenas hold, whoever can write them."""
        live = {self.views[rank].step for rank in shard if rank in self.views and self.views[rank].holds}
        return live.union(*(self.arenas.get(rank, ()) for rank in shard))

    def steps(self, shard: tuple[int, ...]) -> set[int]:
        live = {self.views[rank].step for rank in shard if rank in self.views and self.views[rank].holds}
        copies = (self.buddies[rank][1] for rank in shard if self.partners(rank))
        return live.union(*(self.arenas[rank] for rank in self.kept(shard)), *copies)

    def choose(self, shard: tuple[int, ...], step: int) -> tuple[int, int, bool]:
        """Who saves this shard, whose arena it writes for it, and whether that is a copy on a partner host.

        -1: it writes what it holds itself.
        """
        live = self.live(shard, step)
        if live and not live[0].faulty:
            return live[0].rank, -1, False
        kept = [rank for rank in self.kept(shard) if step in self.arenas[rank]]
        scribes = [(self.load[rank], rank, owner) for owner in kept for rank in self.scribes(owner)]
        copied = [rank for rank in shard if step in self.buddies.get(rank, ("", ()))[1]]
        partners = [(self.load[rank], rank, owner) for owner in copied for rank in self.partners(owner)]
        if live and not scribes and not partners:
            return live[0].rank, -1, False
        _, saver, owner = min(scribes or partners)
        self.load[saver] += 1
        return saver, owner, not scribes


def decide_with_arenas(
    views: tuple[RankView, ...], replicas: ReplicaGroups, durable: int, arenas: ArenasHeld
) -> Decision:
    """As `decide`, with arenas as further holders.

    A step counts as completed once every shard has completed it: what only some ranks have completed nobody could train
    on without the others.
    """
    plain = decide(views, replicas, durable)
    newest = isinstance(plain, SavePlan) and plain.step >= newest_of_survivors(views)
    if newest or not (arenas.steps or arenas.buddies):
        return plain
    situation = _Situation({view.rank: view for view in views}, arenas.steps, arenas.hosts, arenas.buddies)
    completed = _completed(situation, replicas)
    if completed <= durable:
        return NothingToSave(step=durable, unused=plain.unused)
    common = set.intersection(*(situation.steps(shard) for shard in replicas))
    step = max(common, default=-1)
    if step <= durable:
        reason = plain.reason if isinstance(plain, GiveUp) else "no step is held of every shard"
        held = max(set.intersection(*map(situation.held, replicas)), default=-1)
        return GiveUp(
            reason=f"{reason}; {_held(arenas)}", unused=plain.unused, lost=completed - durable,
            held=held if held > durable else -1, held_lost=max(0, completed - held),
        )  # fmt: skip
    if isinstance(plain, SavePlan) and plain.step >= step:
        return replace(plain, lost=max(0, completed - plain.step))
    chosen = [situation.choose(shard, step) for shard in replicas]
    savers = tuple(saver for saver, _, _ in chosen)
    return SavePlan(
        step=step,
        savers=savers,
        unused=unused(views, frozenset(savers)),
        lost=max(0, completed - step),
        arenas=tuple(owner for _, owner, _ in chosen),
        buddies=frozenset(owner for _, owner, buddy in chosen if buddy),
    )


def from_live_ranks(decision: Decision) -> bool:
    """Whether live ranks hold what is decided; if not, they may still come to hold a newer step together."""
    return not isinstance(decision, GiveUp) and not (isinstance(decision, SavePlan) and decision.arenas)


def _completed(situation: _Situation, replicas: ReplicaGroups) -> int:
    """The newest step that some holder of every shard has completed, dead ones included."""
    views, held = situation.views, dict[int, list[int]]()
    for rank in set(chain.from_iterable(replicas)):
        known = [views[rank].step] if rank in views else []
        held[rank] = [*known, *situation.arenas.get(rank, ()), *situation.buddies.get(rank, ("", ()))[1]]
    known = [max(max(held[rank], default=-1) for rank in shard) for shard in replicas if not _gone(situation, shard)]
    return min(known or [max(max(held[rank], default=-1) for rank in shard) for shard in replicas])


def _gone(situation: _Situation, shard: tuple[int, ...]) -> bool:
    """All its holders went with their hosts, so that what they had completed last is not known, but what others had."""
    views, arenas = situation.views, situation.arenas
    dead = not any(views[rank].alive for rank in shard if rank in views)
    return dead and not any(arenas.get(rank) for rank in shard) and any(rank in situation.buddies for rank in shard)


def _held(arenas: ArenasHeld) -> str:
    texts = [f"rank {rank} {', '.join(map(str, steps)) or 'none'}" for rank, steps in sorted(arenas.steps.items())]
    more = [f"rank {rank} {', '.join(map(str, steps))}" for rank, (_, steps) in sorted(arenas.buddies.items()) if steps]
    copies = "; partner hosts hold copies: " + "; ".join(more[:16]) if more else ""
    return "arenas hold: " + "; ".join(texts[:16]) + copies
