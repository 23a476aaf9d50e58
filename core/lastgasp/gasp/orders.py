"""The orders by which a plan is carried out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from lastgasp.events import Fault
from lastgasp.trailer import with_trailer

from . import messages as m
from .actions import Action, Send
from .arena_decision import ArenaLook
from .auxiliary import RankBuffers, auxiliary_states, carried_values
from .decision import SavePlan
from .members import Member
from .views import causes, orders_for


def save_orders(
    numbers: tuple[int, int],
    plan: SavePlan,
    faults: Sequence[Fault],
    members: Mapping[int, Member],
    buffers: RankBuffers,
    arenas: ArenaLook | None,
) -> list[Action]:
    """One order to each saver, and remarks on what is lost.

    Args:
        numbers: of the recovery and of the plan.
        faults: that led to it.
    """
    aux, remarks = auxiliary_states(plan.step, members, buffers, plan.arenas)
    values = carried_values(plan.step, members)
    aux = {rank: with_trailer(state, values.get(rank, b"")) for rank, state in aux.items()}
    order = m.Save(
        recovery=numbers[0], plan=numbers[1], step=plan.step, aux=aux, reason=causes(faults), common=plan.common
    )
    orders = orders_for(plan.savers, order, members)
    if plan.arenas and arenas is not None:
        orders = {rank: _with_arenas(each, rank, plan, arenas) for rank, each in orders.items()}
    return [*(Send(rank=rank, message=each) for rank, each in orders.items()), *remarks]


def _with_arenas(order: m.Save, rank: int, plan: SavePlan, arenas: ArenaLook) -> m.Save:
    mine = [owner for saver, owner in zip(plan.savers, plan.arenas, strict=True) if saver == rank]
    owners = dict.fromkeys(owner for owner in mine if owner >= 0)
    references = tuple(arenas.reference(owner, buddy=owner in plan.buddies) for owner in owners)
    return msgspec.structs.replace(order, own=-1 in mine, arenas=references)
