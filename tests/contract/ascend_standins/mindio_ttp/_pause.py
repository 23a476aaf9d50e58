"""The controller's pause by MindX's word (mindio_tft.md §7.3, "Pause").

Where the notes are silent: a rank answers the order once its training thread has come to the step; after an error or
the end of the time ranks stay where they are until an exit notice comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _mindx as mindx
from . import _rules as rules
from ._rules import trace

if TYPE_CHECKING:
    from .controller_ttp import Controller


def pause(c: Controller) -> None:
    """PAUSE: at the largest step and one, for so long; then `continue`, or 406 and ABNORMAL."""
    c.state, c.mindx.event, limit = "PAUSE", "", c.mindx.pause_for
    at = max((member.step for member in c.members.values()), default=0) + 1
    ranks = [rank for rank in c.linked() if rank not in c.isolated]
    paused = c.all_did(ranks, "pause", at=at)
    trace("paused", ok=paused, at=at)
    if paused and c.mindx.report("report_stop_complete", mindx.SUCCESS, "paused", {}):
        came = c.mindx.wait(limit, least=0.0)
        if came and c.mindx.event == "continue" and not c.bad() and c.all_did(ranks, "continue"):
            c.state, c.mindx.event = "NORMAL", ""
            trace("continued", at=at)
            return None
    wait = float(rules.number("MINDIO_WAIT_MINDX_TIME", 30, 1, 3600))
    c.state, c.repair_id, c.mindx.event = "ABNORMAL", c.repair_id + 1, ""
    c.collect(c.lost())
    c.select_errors()
    why = c.prelock(sorted(c.errors))
    trace("not_continued", why=why)
    c.mindx.result(mindx.DUMP_STILL, "not continued", c.errors)
    return c.dump_or_exit(wait, dump=not why)
