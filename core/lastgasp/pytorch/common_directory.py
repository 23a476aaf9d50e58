"""One directory for all ranks, where each has made up a name of its own: with a time or a process id in it.

Without lastgasp such a job runs: rank 0 alone writes most of what is written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lastgasp import _clock
from lastgasp.config import attempt_in
from lastgasp.gasp.again import INCARNATION

log = logging.getLogger("lastgasp")

LIMIT = 60.0
"""Seconds to wait for the other ranks, or for rank 0; then a rank keeps its own name, which the controller compares."""
_SHORTEST, _LONGEST = 0.002, 0.5


class Names:
    """What one process has asked, and heard."""

    def __init__(self) -> None:
        self._agreed: dict[str, str] = {}
        self._asked: dict[str, int] = {}

    def known(self, own: str) -> str:
        """What it was told before for this name; the name itself where it was told nothing."""
        return self._agreed.get(own, own)

    def common(self, own: str, store: Any, rank: int, size: int, incarnation: str) -> str:
        """What all ranks take. Rank 0 looks at the names of all and says which one it is.

        Of those that have come within the limit: others may come much later (one that prepares data), and take it.

        Args:
            store: of the ranks' process group.
            incarnation: of the job: a new process asks for the first time where the others ask again.

        Raises:
            TimeoutError: rank 0 has not come.
        """
        number = self._asked[incarnation] = self._asked.get(incarnation, -1) + 1
        here = f"lastgasp/{incarnation}/directory/{number}"
        votes = [f"{here}/{one}" for one in range(size)]
        store.set(votes[rank], json.dumps([self._agreed.get(own), own]))
        if rank == 0:
            with contextlib.suppress(TimeoutError):
                _wait(store, votes)
            found = [json.loads(store.get(vote)) for vote in votes if store.check([vote])]
            store.set(here, json.dumps(next((old for old, _ in found if old is not None), found[0][1])))
        _wait(store, [here])
        chosen: str = json.loads(store.get(here))
        if own not in (chosen, *self._agreed):
            log.warning(
                "the directory is %s in this process and %s in others: all use the latter. Give it the same name in "
                "each, without a time or a process id: after a restart, checkpoints are looked for where the script "
                "says then", own, chosen,
            )  # fmt: skip
        self._agreed[own] = self._agreed[chosen] = chosen
        return chosen


_names = Names()


def common_directory(own: Path) -> Path:
    """The one that all ranks take: of those who have trained before, else rank 0's. All ranks call this together.

    So a process that has taken the place of a rank comes to where the others are. Asked by the store of the process
    group: a collective would need the rank's device, which the script may not have set yet.
    """
    name = str(own)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Path(_names.known(name))
    try:
        incarnation = f"{attempt_in(os.environ)}.{os.environ.get(INCARNATION, '0')}"  # a store may outlive an attempt
        store: Any = distributed_c10d._get_default_store()
        return Path(_names.common(name, store, dist.get_rank(), dist.get_world_size(), incarnation))
    except Exception as error:  # no store, it is gone, or a rank has not come
        log.debug("the ranks could not compare their directories", exc_info=error)
        return Path(_names.known(name))


def _wait(store: Any, keys: list[str]) -> None:
    """By asking again and again: the store's own wait would hold up signals."""
    deadline, pause = _clock.monotonic() + LIMIT, _SHORTEST
    while not store.check(keys):
        if _clock.monotonic() > deadline:
            raise TimeoutError(f"no {keys[0]} within {LIMIT:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
