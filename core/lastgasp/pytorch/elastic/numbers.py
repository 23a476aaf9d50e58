"""Being a rank of the complete job, where ranks are missing and another one does their part."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from lastgasp import logs


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Be that one of so many meanwhile, to whoever asks.

    torch.distributed says so of the group of all ranks, on this thread, by whatever name it was imported: all its
    functions ask the group itself. torch's C++ code has the numbers that are. `RANK` and `WORLD_SIZE` are set, so that
    processes that are started meanwhile have them, too.
    """
    here, whole = threading.get_ident(), dist.group.WORLD

    def answers(original: Callable[[Any], int], number: int) -> Callable[[Any], int]:
        return lambda group: number if group is whole and threading.get_ident() == here else original(group)

    groups: Any = dist.ProcessGroup
    methods = {name: vars(groups)[name] for name in ("rank", "size")}
    variables = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    logged, logs.own_rank = logs.own_rank, logs.own_rank or os.environ.get("RANK", "")
    try:
        groups.rank, groups.size = answers(groups.rank, rank), answers(groups.size, size)
        now = {"RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ.update({name: now[name] for name in variables})
        yield
    finally:
        for name, method in methods.items():
            setattr(groups, name, method)
        os.environ.update(variables)
        logs.own_rank = logged
