"""How many processes there are to accelerate, and which of them this one is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from lastgasp.adapter.torch import as_rank


def number_as(rank: int, size: int) -> tuple[int, int]:
    """Be that one of so many, to Trainer as well. Returns what this process was."""
    before = PartialState()
    found = before.process_index, before.num_processes
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        if state:  # made anew, it is told by the other one
            state["process_index"], state["num_processes"] = rank, size
    return found


@contextlib.contextmanager
def numbered(rank: int, size: int) -> Iterator[None]:
    """The same meanwhile; also to whoever asks torch.distributed or the environment.

    A loss that is divided by a number of all ranks is multiplied by theirs, which users have from there, too.
    """
    before = number_as(rank, size)
    try:
        with as_rank(rank, size):
            yield
    finally:
        number_as(*before)


def number_anew(trainer: Any) -> None:
    """The process group was made anew, perhaps of other ranks."""
    now = dist.get_rank(), dist.get_world_size()
    if number_as(*now) != now:
        vars(trainer).pop("_eval_dataloaders", None)  # kept by Trainer with persistent workers: cut for other ranks
