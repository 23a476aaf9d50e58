"""A process for a missing rank runs its script alone up to `train`, beside those that train, and waits there.

`TrainingArguments` makes the process group on the way. Until the process is taken in that is a stand-in, in which
nothing can be exchanged; in `train` it gives way to the group that all ranks make.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lastgasp.adapter.again import is_to_be_taken_in
from lastgasp_transformers.script_alone import replace_until_training, run_script_alone


def stand_alone() -> None:
    """In a process that is to be taken in, before its script makes a process group. Nothing in any other."""
    if not is_to_be_taken_in():
        return
    run_script_alone(is_to_be_taken_in)
    original: Any = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **options: Any) -> None:
        if is_to_be_taken_in():
            _stand_in(original)
        else:
            original(*args, **options)

    replace_until_training(original.__name__, original, init_process_group)


def _stand_in(make: Any) -> None:
    """A group that this process believes to be in, by its number in the complete job."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # tells torch of "fake"

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    make("fake", rank=rank, world_size=size, store=HashStore())
