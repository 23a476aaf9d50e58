"""With how many ranks a job may go on at least, where nobody can take the place of one that is lost."""

from __future__ import annotations

import os
from typing import Any

from lastgasp.config import integer

MIN_RANKS = "LASTGASP_MIN_RANKS"
_REMEDY = "It is the smallest number of ranks with which the job goes on; leave it out, and the job restarts instead."


def asked() -> int:
    """LASTGASP_MIN_RANKS; 0 where it is not set. Asked for before anything is started.

    Raises:
        ConfigError: it is no number of ranks.
    """
    given = os.environ.get(MIN_RANKS, "")
    return integer(MIN_RANKS, given, 1, _REMEDY) if given else 0


def least_ranks(given: int, handler: Any, each: int, hosts: int) -> int:
    """What the user has asked for: LASTGASP_MIN_RANKS, or else torchrun's `--nnodes MIN:MAX`; 0: nothing.

    MIN:MAX is about hosts: a job on a single one has none to lose.

    Args:
        given: what `asked` has found; handler: of the rendezvous; each: ranks of a host; hosts: how many the job has.
    """
    settings = getattr(handler, "settings", None)  # of torch's dynamic rendezvous
    least, most = getattr(settings, "min_nodes", 0), getattr(settings, "max_nodes", 0)
    return given or (least * each if hosts > 1 and least < most else 0)
