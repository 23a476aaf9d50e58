"""How many processes there are to accelerate, and which of them this one is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from lastgasp.adapter import replace_attribute


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
    """The same meanwhile; also to whoever asks torch.distributed on this thread, as of its default group.

    A loss that is divided by a number of all ranks is multiplied by theirs, which users have from there, too.
    """
    before, here = number_as(rank, size), threading.get_ident()

    def answers(found: int) -> Any:
        return lambda original: lambda group=None: (
            found if group is None and threading.get_ident() == here else original(group)
        )

    undo = [replace_attribute(dist, name, answers(found)) for name, found in
            (("get_rank", rank), ("get_world_size", size))]  # fmt: skip
    try:
        yield
    finally:
        for one in undo:
            one()
        number_as(*before)


def number_anew(trainer: Any) -> None:
    """The process group was made anew, perhaps of other ranks."""
    now = dist.get_rank(), dist.get_world_size()
    if number_as(*now) != now:
        vars(trainer).pop("_eval_dataloaders", None)  # kept by Trainer with persistent workers: cut for other ranks
