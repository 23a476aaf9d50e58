"""Convert what is known about a rank into what the decision takes, and about faults into what orders carry. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import starmap

import msgspec

from lastgasp.events import Fault
from lastgasp.topology import ReplicaGroups

from . import messages as m
from .decision import RankView
from .members import Member

SAVE_TRIES = 2
"""How often a rank may try to save once every other holder has failed as well; a late one not again."""
NAMED = 16
"""Most faults that an order names: each rank of a large job may report one, and every rank gets the order."""


def view(rank: int, member: Member | None) -> RankView:
    """One rank that has joined, or has not (None)."""
    if member is None:
        return RankView(rank=rank, step=-1, holds=False, alive=False, why="never joined")
    prepared = member.prepared
    objections = member.gone or member.left or member.hung or member.failures or member.fault or not member.begun
    if not objections and prepared is not None and prepared.usable:
        return RankView(rank=rank, step=prepared.step, holds=True, writes=True)  # the common case
    why = why_unusable(member)
    holds = prepared is not None and prepared.usable and not why
    step = prepared.step if prepared is not None else member.step
    alive = member.here and prepared is not None
    return RankView(
        rank=rank,
        step=step,
        holds=holds,
        faulty=member.fault is not None or member.failures > 0,
        alive=alive,
        why=why or (f"its save failed: {member.failed}" if member.failures else ""),
        writes=alive and member.begun and member.failures < SAVE_TRIES,
    )


def views_of(members: Mapping[int, Member], world_size: int) -> tuple[RankView, ...]:
    """All ranks that the job should have, and strangers."""
    strangers = sorted(members.keys() - range(world_size)) if members else []
    ranks = (*range(world_size), *strangers)
    return tuple(map(view, ranks, map(members.get, ranks)))


def meeting_step(members: Mapping[int, Member], replicas: ReplicaGroups) -> int | None:
    """The newest step, if every shard has a holder and they stopped at different steps."""
    steps = {one.rank: one.step for one in starmap(view, members.items()) if one.holds}
    complete = all(steps.keys() & set(group) for group in replicas)
    return max(steps.values()) if complete and len(set(steps.values())) > 1 else None


def why_unusable(member: Member) -> str:
    """Why it cannot save; empty if it can."""
    if member.gone:
        return f"gone: {member.gone}"
    if member.left:
        return "had finished training and let go of its state; a checkpoint at its end would have the last step"
    if member.hung:
        return "hung"
    if member.failures >= SAVE_TRIES:
        return f"its save failed: {member.failed}"
    if member.prepared is None:
        return "did not answer in time"
    if not member.begun:
        return "its training had not begun"
    return "" if member.prepared.usable else member.prepared.why


def named(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """The first ones, including one that is not a SIGTERM if there is any: ranks look for that."""
    others = [fault for fault in faults[NAMED:] if fault.kind != "sigterm"]
    return (*faults[:NAMED], *others[:1])


def later(fault: Fault, step: int) -> Fault:
    """Set the step that a dead rank had completed: its last heartbeat may be older. What it reported itself is kept."""
    told = fault.kind in ("exception", "sigterm", "interrupt", "peer")
    return fault if told else msgspec.structs.replace(fault, step=max(fault.step, step))


def nothing_new(step: int, begun: bool) -> str:
    """Why there is nothing to save.

    Args:
        step: the newest that a committed checkpoint holds, as far as this attempt knows.
        begun: some rank's training has begun.
    """
    if step > 0:
        return f"step {step} is the newest and is on disk"
    return "no step had been completed" if begun else "training had not begun"


def safe_step(step: int, begun: bool) -> int | None:
    """The newest step on disk; None if this attempt has not got far enough to know."""
    return step if begun or step > 0 else None


def orders_for(savers: Sequence[int], order: m.Save, members: Mapping[int, Member]) -> dict[int, m.Save]:
    """The order to save for each saver; those that write together are told of one another (`ports.SavesTogether`)."""
    return {rank: _with_others(order, members[rank].together, savers) for rank in savers}


def _with_others(order: m.Save, together: tuple[tuple[int, ...], ...], savers: Sequence[int]) -> m.Save:
    if not together:
        return order
    known = range(len(savers))
    found = (tuple(savers[shard] for shard in part if shard in known) for part in together)
    return msgspec.structs.replace(order, together=tuple(found))


def causes(faults: Sequence[Fault]) -> str:
    """The causes of the recovery, in one line."""
    more = len(faults) - NAMED
    told = [f"rank {fault.rank}: {fault.cause}" for fault in faults[:NAMED]]
    return "; ".join(told + ([f"and {more} more"] if more > 0 else []))
