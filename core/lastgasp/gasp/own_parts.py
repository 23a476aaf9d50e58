"""Whether a training of which each rank alone holds a part can be entered again, each rank with its own. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from .arena_decision import ArenaLook, ArenasHeld
from .arena_ref import ArenaRef
from .members import Member

BACK = "all ranks go back to step {step}, the newest of which every part is held: {lost} completed steps are done again"


def has_arenas(look: ArenaLook | None, world_size: int) -> bool:
    """Every rank has an arena, filled or not."""
    return look is not None and look.steps().keys() >= set(range(world_size))


def arenas_to_take(
    step: int, lost: tuple[int, ...], members: Mapping[int, Member], held: ArenasHeld, look: ArenaLook
) -> tuple[ArenaRef, ...] | str:
    """The arenas that the new processes of `lost` begin with, or why `step` is not held of every part.

    A rank that stays has it in its live state or in its arena. What is held on partner hosts does not count: their
    launchers cannot give it to a process of another host.
    """
    for rank, member in sorted(members.items()):
        prepared = member.prepared
        live = prepared is not None and prepared.usable and prepared.step == step
        if rank not in lost and not live and step not in held.steps.get(rank, ()):
            return f"rank {rank} does not hold step {step} in memory any more"
    for rank in lost:
        if step not in (steps := held.steps.get(rank, ())):
            there = f"holds {', '.join(map(str, steps))}" if steps else "holds nothing"
            return f"the arena of rank {rank} does not hold step {step}: it {there}"
    found = tuple(look.reference(rank) for rank in lost)
    unknown = [one.rank for one in found if one.fd < 0]
    return f"the arena of rank {unknown[0]} is out of reach" if unknown else found
