"""torch's exit barrier without dead launchers, for which no one waits once training is over everywhere.

Each launcher whose ranks were successful waits in a barrier of the store for all others, for 300 s if one of them was
killed. The first launcher has a connection from each of them, so it sees which are lost and opens the barrier for the
remaining ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
from torch.distributed.elastic.utils.store import _LAST_MEMBER_CHECKIN, _NUM_MEMBERS

from lastgasp import _clock

log = logging.getLogger("lastgasp.launch")

GRACE = 20.0
"""Seconds for which launchers must have been gone: one whose connection was cut has another one within 6 s of its mend,
and the ranks that a dead one has left get as long for what they do behind their training."""
LOOK = 0.5
"""Seconds between two looks."""
_MEMBERS, _LAST = (_TERMINAL_STATE_SYNC_ID + part for part in (_NUM_MEMBERS, _LAST_MEMBER_CHECKIN))


def wait_for_living(store: Any, size: int, living: Callable[[int], int | None], limit: float) -> int:
    """Wait until all launchers but this one are in the barrier; open it where the rest of them has died.

    Args:
        store: that of the barrier. size: launchers of the job.
        living: is asked with `size` how many of them live, this one included; None while that is not known, or a rank
            still trains.
        limit: seconds to wait at most.

    Returns:
        For how many launchers the barrier was opened; 0 where all have come, and where the limit has passed.
    """
    deadline, gone_since = _clock.monotonic() + limit, None
    try:
        while (now := _clock.monotonic()) < deadline and (come := store.add(_MEMBERS, 0) + 1) < size:
            alive = living(size)
            gone_since = (gone_since or now) if alive is not None and alive <= come else None
            if gone_since is not None and now - gone_since >= GRACE:
                store.set(_LAST, "")
                return int(size - come)
            time.sleep(LOOK)
    except DistError as error:
        log.debug("the store of the exit barrier: %s", error)
    return 0
