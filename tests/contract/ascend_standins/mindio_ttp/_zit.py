"""The controller's elastic training: scale in and scale out (mindio_tft.md §7.3, "Elastic shrink/grow").

Where the notes are silent: the controller tells MindX 201 and waits for no answer; it lists `upgrade` as soon as all
isolated ranks have said PREREPAIR_FINISH, once; a repair that failed in either direction is told as 406. A new
process that ends before or after that is not missed: the orders of an upgrade go to all ranks, and the first that is
not answered in time ends it. All have carried out one order before the next one is given, and all of them before
anybody trains. A rank that is there again may be missing once more.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from . import _mindx as mindx
from . import _rules as rules
from ._rules import trace

if TYPE_CHECKING:
    from .controller_ttp import Controller

ISOLATED_CHOSEN = 201
ISOLATED, PREREPAIR_FINISH = 6, 8
SILENT = "MINDIO_STANDIN_SILENT"
"""An order of an upgrade, behind which nothing comes any more: not from MindX, and no exit notice."""


def dp_groups(c: Controller) -> list[tuple[int, ...]]:
    """Of all ranks: those that were told; a rank that told none has its replica groups instead."""
    found = set[tuple[int, ...]]()
    for member in c.members.values():
        infos = member.replicas or []
        found |= {tuple(member.dp)} if member.dp else {tuple(sorted(info["rank_list"])) for info in infos}
    return sorted(found)


def isolated_with(c: Controller, faulty: list[int]) -> list[int]:
    """Every rank that shares its index in some group with a faulty one."""
    groups = dp_groups(c)
    indices = {group.index(rank) for group in groups for rank in faulty if rank in group}
    return sorted({group[i] for group in groups for i in indices if i < len(group)})


def can_shrink(c: Controller) -> bool:
    """Rank 0 is healthy, nobody is missing yet, and those that are left hold everything."""
    if not c.zit or c.isolated or not c.errors:
        return False
    gone = isolated_with(c, sorted(c.errors))
    return 0 not in gone and c.choose(gone) is not None


def shrink(c: Controller) -> None:
    """DG_REPAIR, DOWNGRADE: no repair and no rollback; those that are left train on."""
    c.state, wait = "ENV_CLEAR", float(rules.number("MINDIO_WAIT_MINDX_TIME", 30, 1, 3600))
    gone = isolated_with(c, sorted(c.errors))
    there = [rank for rank in c.linked(healthy=True) if rank not in gone]
    if not c.all_did(there, "stop") or not c.all_did(there, "clean"):
        trace("no_repair", failed="stop or clean", how="downgrade")
        c.mindx.result(mindx.EXIT_ONLY, "not clean", c.errors)
        return c.dump_or_exit(wait, dump=False)
    c.state = "DG_REPAIR"
    c.mindx.report("report_result", ISOLATED_CHOSEN, "isolated", dict.fromkeys(gone, mindx.PROCESS), "downgrade")
    units = {rank: [new_dp(c, rank, gone), there, c.mindx.params] for rank in there}
    if not c.all_did(there, "downgrade", per_rank=units) or not c.all_did(there, "normal"):
        trace("no_repair", failed="downgrade or normal", how="downgrade")
        c.mindx.result(mindx.DUMP_STILL, "downgrade", c.errors)
        return c.dump_or_exit(wait)
    c.isolated, c.state, c.mindx.event, c.errors = gone, "DOWNGRADE", "", {}
    for rank in gone:
        if c.members[rank].status != PREREPAIR_FINISH:
            c.members[rank].status = ISOLATED
    trace("downgraded", isolated=gone, step=c.target)
    return None


def new_dp(c: Controller, rank: int, gone: list[int]) -> list[int]:
    """Who is left of this rank's group."""
    group = next(group for group in dp_groups(c) if rank in group)
    return [other for other in group if other not in gone]


def look(c: Controller) -> bool:
    """While ranks are missing: list `upgrade` once all have come back; carry it out by MindX's word."""
    if not c.isolated or any(c.members[rank].status != PREREPAIR_FINISH for rank in c.isolated):
        return False
    if not c.upgrade_listed:
        c.upgrade_listed = True
        c.mindx.report("report_strategies", dict.fromkeys(c.isolated, mindx.PROCESS), ["exit", "dump", "upgrade"])
    if c.mindx.event != "upgrade":
        return False
    grow(c)
    return True


def grow(c: Controller) -> None:
    """UPGRADE, ENV_CLEAR, REPAIR: prelock, stop and clean of those that train; then all of them."""
    c.state, c.repair_id, anew = "UPGRADE", c.repair_id + 1, c.isolated
    c.collect(c.lost())
    wait = float(rules.number("MINDIO_WAIT_MINDX_TIME", 30, 1, 3600))
    training = [rank for rank in c.linked() if rank not in anew]
    why = c.prelock([])
    if not why and not (c.all_did(training, "stop") and c.all_did(training, "clean")):
        why = "stop or clean"
    c.state, everybody = "REPAIR", sorted(c.members)
    if not why and not c.all_did(everybody, "upgrade", among=anew, param=c.mindx.params):
        why = "upgrade"
    falls_silent(c, "upgrade")
    why = why or c.exchange(dict.fromkeys(anew, 3), "upgrade_repair", param=c.mindx.params)
    falls_silent(c, "upgrade_repair")
    if not why and not c.all_did(everybody, "upgrade_rollback", param=c.mindx.params):
        why = "upgrade_rollback"
    falls_silent(c, "upgrade_rollback")
    if why or not c.all_did(everybody, "normal"):
        trace("no_repair", failed=why or "normal", how="upgrade")
        c.mindx.result(mindx.DUMP_STILL, why or "normal", dict.fromkeys(anew, mindx.PROCESS))
        return c.dump_or_exit(wait)
    c.must_report, c.state, c.mindx.event, c.isolated, c.upgrade_listed = True, "NORMAL", "", [], False
    trace("upgraded", taken_in=anew, step=c.target)
    return None


def falls_silent(c: Controller, order: str) -> None:
    """Where the test wants it: it gives no order and says nothing until it is destroyed."""
    if os.environ.get(SILENT) == order:
        trace("silent", behind=order)
        with c.lock:
            c.lock.wait_for(lambda: c.stopped)
