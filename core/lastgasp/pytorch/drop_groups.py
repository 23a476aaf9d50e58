"""Drops torch's process groups within bounded time.

A collective that gloo begins while its connections are being closed may miss that, and wait in its thread for the
group's timeout (half an hour) on connections that are gone. The destructor of the group joins that thread. Seen with
torch 2.13 about once in 50 recoveries of four ranks on a busy machine.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lastgasp.pytorch.aborting import dropped, require_aborted

log = logging.getLogger("lastgasp")

GRACE = 1.0
"""Seconds to wait for the threads of the groups; they usually end within milliseconds."""


def drop_groups(wrapped: list[Any]) -> None:
    """Destroy all process groups of this process. Those with a thread that is stuck are left to it.

    Args:
        wrapped: DDP wrappers, which hold the groups, too; emptied.

    Raises:
        RuntimeError: communicators of NCCL cannot be aborted.
    """
    listed: Any = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)
    groups = list(listed or ())
    for one in wrapped:
        for name in ("reducer", "logger", "process_group"):  # the reducer's hooks stay on parameters while it lives
            vars(one).pop(name, None)
    wrapped.clear()
    require_aborted()
    if dist.is_initialized():
        dist.destroy_process_group()
    elif (world := getattr(distributed_c10d, "_world", None)) is not None:
        world.group_count = 0  # one that could not be made counts, too, and ranks find each other by its name
    dropped()
    _forget_meshes()
    if not groups:
        return
    dropper = threading.Thread(target=groups.clear, name="lastgasp-drop-groups", daemon=True)
    dropper.start()
    dropper.join(GRACE)
    if dropper.is_alive():
        log.info("a collective of the old process group does not end: its thread is left behind until its timeout")


def _forget_meshes() -> None:
    """Results of operations on DTensors are cached with the mesh of their arguments, and a new mesh equals the old one.

    Each thread has its own cache; those of autograd's threads, on accelerators, are not reached. There the names of the
    groups are looked up, which are the same where the program makes its groups in the same order again.
    """
    if "torch.distributed.tensor" in sys.modules:
        debug: Any = importlib.import_module("torch.distributed.tensor.debug")
        clear = getattr(debug, "_clear_sharding_prop_cache", None)  # a private name of torch 2.11 and 2.13
        if clear is None:  # 2.6 and 2.7 can only show it
            dispatcher: Any = getattr(sys.modules["torch.distributed.tensor"].DTensor, "_op_dispatcher", None)
            cached = getattr(getattr(dispatcher, "sharding_propagator", None), "propagate_op_sharding", None)
            clear = getattr(getattr(cached, "cache", None), "cache_clear", None)
        if clear is not None:
            clear()


def forget_accelerate() -> None:
    """Have the next `Accelerator` of Hugging Face's make the process group anew: its states outlive each object."""
    state: Any = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
