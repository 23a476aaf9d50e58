"""The controller's hot switch by MindX's word (mindio_tft.md §7.3, "Hot switch"; the package's source at 22bb3d98).

Who registers while it is prepared goes into shadow tables, and so does what becomes of a link meanwhile. Once all
named ranks are PREREPAIR_FINISH there, all that train leave their loop at the end of a step; ClusterD has the old pod
deleted, and says `migration`; the tables are swapped for these ranks, and no order goes to an old process any more.
Nobody looks at the state of ranks between the pause and the end of the migration. A `stop switch` that comes then ends
the job. Heartbeats go by rank: behind the swap those of an old process that lives count as its rank's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _mindx as mindx
from . import _rules as rules
from ._rules import trace

if TYPE_CHECKING:
    from .controller_ttp import Controller, Member

PREPARED = "hot switch"
PREREPAIR_FINISH, RT_RECV = 8, 3


def prepare(c: Controller, ranks: list[int]) -> None:
    """New processes of these ranks are to come."""
    with c.lock:
        c.switching, c.shadows, c.repair_id = ranks, {}, c.repair_id + 1
        c.mindx.event = PREPARED
        trace("switch_prepared", ranks=ranks)
        c.lock.notify_all()


def stop(c: Controller) -> None:
    """The job trains on; between the pause and the migration it is ended."""
    trace("switch_stopped")
    c.switching = []
    c.mindx.notified("stop switch")
    with c.lock:
        c.lock.notify_all()


def prepared(c: Controller) -> bool:
    """A switch is being prepared; who registers is a new process of its rank."""
    return c.mindx.event == PREPARED


def shadow(c: Controller, rank: int, member: Member) -> None:
    """A new process is there."""
    c.shadows[rank] = member
    trace("registered_in_shadow", of=rank)


def ready(c: Controller) -> bool:
    """All new processes wait."""
    found = [c.shadows.get(rank) for rank in c.switching]
    return prepared(c) and all(one is not None and one.status == PREREPAIR_FINISH for one in found)


def switch(c: Controller) -> None:
    """STEP_FINISH and MIGRATION."""
    c.state, wait = "STEP_FINISH", float(rules.number("MINDIO_WAIT_MINDX_TIME", 30, 1, 3600))
    ranks = sorted(c.members)
    trace("switch_begins", ranks=c.switching)
    c.order(ranks, rules.seconds(5.0), "collect")
    c.target = max((member.step for member in c.members.values()), default=0) + 1
    paused = c.all_did(ranks, "pause", at=c.target, hot=True)
    trace("step_finished", ok=paused, at=c.target)
    if not c.mindx.report("report_strategies", dict(c.errors), ["migration" if paused else "exit"]):
        return c.exit()
    if not c.mindx.wait(wait) or c.mindx.event != "migration":
        return c.exit()
    return migrate(c)


def migrate(c: Controller) -> None:
    """The new processes have their ranks."""
    c.state, wait = "MIGRATION", float(rules.number("MINDIO_WAIT_MINDX_TIME", 30, 1, 3600))
    with c.lock:
        for rank in c.switching:
            before, c.members[rank] = c.members[rank], c.shadows[rank]
            c.members[rank].replicas, c.members[rank].dp = before.replicas, before.dp
            c.ghosts.append(before.wire)
    anew = list(c.switching)
    trace("swapped", ranks=anew)
    why = "" if c.all_did(c.linked(), "rebuild", among=anew) else "rebuild"
    why = why or c.exchange(dict.fromkeys(anew, RT_RECV))
    if not why and not (c.all_did(c.linked(), "rollback") and c.all_did(c.linked(), "normal")):
        why = "rollback or normal"
    if why:
        trace("no_repair", failed=why, how="migration")
        c.mindx.result(mindx.DUMP_STILL, why, c.errors)
        return c.dump_or_exit(wait)
    c.must_report, c.state = True, "NORMAL"
    c.mindx.event, c.switching, c.shadows = "", [], {}
    trace("migrated", ranks=anew, step=c.target)
    return None
