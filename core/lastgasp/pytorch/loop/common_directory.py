"""One directory for all ranks, where each has made up a name of its own: with a time or a process id in it.

Without lastgasp such a job runs: rank 0 alone writes most of what is written.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

log = logging.getLogger("lastgasp")

_agreed: dict[Path, Path] = {}
"""By the name of this process."""


def common_directory(own: Path) -> Path:
    """The one that all ranks take: of those who have trained before, else rank 0's. All ranks call this together.

    So a process that has taken the place of a rank comes to where the others are.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return own
    votes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(votes, (_agreed.get(own), own))
    before, names = [old for old, _ in votes if old is not None], [name for _, name in votes]
    chosen: Path = (before or names)[0]
    if own != chosen and own not in _agreed:
        log.warning(
            "the directory is %s in this process and %s in others: all use the latter. Give it the same name in each, "
            "without a time or a process id: after a restart, checkpoints are looked for where the script says then",
            own, chosen,
        )  # fmt: skip
    _agreed[own] = _agreed[chosen] = chosen
    return chosen
