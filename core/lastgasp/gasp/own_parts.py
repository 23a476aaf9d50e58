"""Whether a training of which each rank alone holds a part can be entered again, each rank with its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from lastgasp.topology import ReplicaGroups

from .actions import Remark
from .again import Again
from .arena_decision import ArenaLook, ArenasHeld
from .arena_ref import ArenaRef
from .auxiliary import LOST_STATE
from .decision import Decision, GiveUp
from .members import Member

BACK = "all ranks go back to step {step}, the newest of which every part is held: {lost} completed steps are done again"


def has_arenas(look: ArenaLook | None, world_size: int) -> bool:
    """Every rank has an arena, filled or not."""
    return look is not None and look.steps().keys() >= set(range(world_size))


def step_of(decision: Decision, in_parts: bool) -> tuple[int, int]:
    """The step that all would begin with again, -1 if there is none; and how many completed ones that costs.

    Where they begin with their own parts nobody has to write any: a host's launcher gives its arenas to new processes.
    """
    if not isinstance(decision, GiveUp):
        return decision.step, getattr(decision, "lost", 0)
    return (decision.held, decision.held_lost) if in_parts else (-1, 0)


def arenas_to_take(
    step: int, lost: tuple[int, ...], members: Mapping[int, Member], held: ArenasHeld, look: ArenaLook,
    replicas: ReplicaGroups,
) -> tuple[ArenaRef, ...] | str:  # fmt: skip
    """The arenas that the new processes of `lost` begin with, or why `step` is not held of every part.

    A rank that stays has it in its live state or in its arena, into which it copies the step before it begins again.
    So where a dead rank had not completed it, the arena of a replica on its host does. What is held on partner hosts
    does not count: their launchers cannot give it to a process of another host.
    """
    for rank, member in sorted(members.items()):
        prepared = member.prepared
        live = prepared is not None and prepared.usable and prepared.step == step
        if rank not in lost and not live and step not in held.steps.get(rank, ()):
            return f"rank {rank} does not hold step {step} in memory any more"
    owners = []
    for rank in lost:
        shard = next((shard for shard in replicas if rank in shard), ())
        alike = [one for one in shard if one not in lost and held.hosts.get(one) == held.hosts.get(rank)]
        steps = held.steps.get(rank, ())
        if step not in steps and not alike:
            there = f"holds {', '.join(map(str, steps))}" if steps else "holds nothing"
            return f"the arena of rank {rank} does not hold step {step}: it {there}"
        owners.append(rank if step in steps else min(alike))
    found = tuple(map(look.reference, owners))
    unknown = [one.rank for one in found if one.fd < 0]
    return f"the arena of rank {unknown[0]} is out of reach" if unknown else found


def states_to_hand(again: Again, aux: Mapping[int, bytes]) -> tuple[dict[int, bytes], list[Remark]]:
    """The auxiliary states of new processes that begin with a replica's arena, which has its own; what is lost."""
    borrow = [rank for rank, one in zip(again.lost, again.arenas or (), strict=False) if one.rank != rank]
    lost = [Remark(text=LOST_STATE.format(rank=rank, step=again.step)) for rank in borrow if rank not in aux]
    return {rank: aux[rank] for rank in borrow if rank in aux}, lost
