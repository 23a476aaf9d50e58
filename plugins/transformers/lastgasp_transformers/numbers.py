"""How many processes there are to accelerate, and which of them this one is."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState


def number_as(rank: int, size: int) -> tuple[int, int]:
    """Be that one of so many, to Trainer as well. Returns what this process was."""
    before = PartialState()
    found = before.process_index, before.num_processes
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        if state:  # made anew, it is told by the other one
            state["process_index"], state["num_processes"] = rank, size
    return found


def number_anew(trainer: Any) -> None:
    """The process group was made anew, perhaps of other ranks."""
    now = dist.get_rank(), dist.get_world_size()
    if number_as(*now) != now:
        vars(trainer).pop("_eval_dataloaders", None)  # kept by Trainer with persistent workers: cut for other ranks
