"""Decide which step is saved and by whom: a pure function of what is known about the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import msgspec

from lastgasp.events import Unused
from lastgasp.topology import ReplicaGroups

NOT_NEEDED = "not needed: another holder saves"
NO_SAVE = "it holds its part, but no step was saved"


class RankView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known about one rank when deciding.

    Attributes:
        step: the newest step that the rank completed, as far as known; -1 when nothing is known.
        holds: its state is the complete state of `step`, and it can write it now.
        faulty: it raised or was asked to stop, so it is a holder of last resort.
        why: why it cannot be used, or only as a last resort; empty when there is no objection.
        alive: it answers.
        writes: its training has begun, and it can write files, if not those of its own state, then of an arena.
    """

    rank: int
    step: int
    holds: bool
    faulty: bool = False
    alive: bool = True
    why: str = ""
    writes: bool = False


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """Save `step`; `savers[i]` writes shard i: its own state, or the arena of rank `arenas[i]` if that is not -1.

    Without arenas that is empty. `buddies`: of which of these ranks it is the copy on a partner host that is written.
    """

    step: int
    savers: tuple[int, ...]
    unused: tuple[Unused, ...]
    lost: int
    arenas: tuple[int, ...] = ()
    buddies: frozenset[int] = frozenset()

    def damaged(self, owner: int) -> tuple[int, int, bool]:
        """What cannot be used any more, where the arena of `owner` that this plan wanted is damaged."""
        return owner, self.step, owner in self.buddies

    @property
    def common(self) -> int:
        """The rank whose copy is saved of what all ranks have alike: the one whose shard is the first."""
        return self.arenas[0] if self.arenas and self.arenas[0] >= 0 else self.savers[0]


@dataclass(frozen=True, kw_only=True)
class NothingToSave:
    """The newest step is already on disk, or none was completed."""

    step: int
    unused: tuple[Unused, ...]


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """No step has a live holder for every shard.

    `held`: the newest step that arenas hold all the same, of hosts on which nobody is left to write them; -1: none. Who
    begins with it loses `held_lost` steps.
    """

    reason: str
    unused: tuple[Unused, ...]
    lost: int
    held: int = -1
    held_lost: int = 0


Decision = SavePlan | NothingToSave | GiveUp


def decide(views: tuple[RankView, ...], replicas: ReplicaGroups, durable: int) -> Decision:
    """Choose the newest step for which every shard has a live holder (docs/how-it-works.md §10.4).

    Args:
        views: one per rank of the job. Dead ranks do not count for the step.
        replicas: the holders of each shard.
        durable: the newest step that a committed checkpoint holds; 0 when there is none and no step
            was completed, since such a job has nothing to lose.
    """
    holding = {view.rank: view for view in views if view.holds}
    holders = [[rank for rank in group if rank in holding] for group in replicas]
    reached = _reached(views, replicas)
    step = _newest_common(holders, holding)
    if reached <= durable:
        return NothingToSave(step=durable, unused=unused(views, frozenset()))
    if step is None:
        reason = _why_not(holders, holding, replicas, {view.rank: view for view in views})
        return GiveUp(reason=reason, unused=unused(views, frozenset()), lost=max(0, reached - durable))
    if step <= durable:
        reason = f"the newest step that can be saved, {step}, is on disk already; " + _behind(views, step)
        return GiveUp(reason=reason, unused=unused(views, frozenset()), lost=max(0, reached - durable))
    savers = _savers(holders, holding, step)
    return SavePlan(step=step, savers=savers, unused=unused(views, frozenset(savers)), lost=max(0, reached - step))


def newest_of_survivors(views: tuple[RankView, ...]) -> int:
    """The newest step of any survivor; of everybody when nobody survived."""
    alive = [view.step for view in views if view.alive]
    return max(alive or [view.step for view in views], default=-1)


def _reached(views: tuple[RankView, ...], replicas: ReplicaGroups) -> int:
    """The newest step that survivors of every shard have completed.

    What they have completed of some shards only nobody could train on. Shards without a survivor do not count.
    """
    alive = {view.rank: view.step for view in views if view.alive}
    if len(set(alive.values())) < 2:  # the usual case, and there may be 100 000 shards
        return newest_of_survivors(views)
    shards = ([alive[rank] for rank in shard if rank in alive] for shard in replicas)
    return min((max(steps) for steps in shards if steps), default=newest_of_survivors(views))


def _newest_common(holders: list[list[int]], holding: dict[int, RankView]) -> int | None:
    steps = {holding[rank].step for rank in chain.from_iterable(holders)}
    if len(steps) > 1 or not all(holders):
        steps = set.intersection(*({holding[rank].step for rank in shard} for shard in holders))
    return max(steps, default=None)


def _savers(holders: list[list[int]], holding: dict[int, RankView], step: int) -> tuple[int, ...]:
    """For each shard the first holder without an objection, or simply the first holder."""
    if not any(view.faulty or view.step != step for view in holding.values()):
        return tuple(map(min, holders))  # the usual case, and there may be 100 000 shards
    return tuple(min(shard, key=lambda rank: _order(holding[rank], step)) for shard in holders)


def _order(view: RankView, step: int) -> tuple[bool, bool, int]:
    return view.step != step, view.faulty, view.rank


def unused(views: tuple[RankView, ...], savers: frozenset[int]) -> tuple[Unused, ...]:
    """The ranks that do not save, and why, by rank."""
    idle = NOT_NEEDED if savers else NO_SAVE
    found = [Unused(rank=v.rank, why=v.why or idle) for v in views if v.rank not in savers]
    found.sort(key=attrgetter("rank"))
    return tuple(found)


def _why_not(
    holders: list[list[int]], holding: dict[int, RankView], replicas: ReplicaGroups, by_rank: dict[int, RankView]
) -> str:
    empty = [i for i, shard in enumerate(holders) if not shard]
    if not empty:
        return "every shard has a live holder, but not at one common step: " + ", ".join(
            f"shard {i} at {sorted({holding[rank].step for rank in shard})}" for i, shard in enumerate(holders)
        )
    texts = []
    for i in empty:
        causes = "; ".join(f"rank {r}: {by_rank[r].why if r in by_rank else 'never joined'}" for r in replicas[i])
        texts.append(f"shard {i} of {len(replicas)} has no live holder ({causes})")
    return ", ".join(texts)


def _behind(views: tuple[RankView, ...], step: int) -> str:
    ahead = [v for v in sorted(views, key=lambda v: v.rank) if v.alive and v.step > step]
    return "; ".join(f"rank {v.rank} completed {v.step} but {v.why or 'cannot be used'}" for v in ahead)
