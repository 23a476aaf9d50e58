"""Async saves under way when a training is left: they are abandoned, and the process that writes them is ended.

They need all ranks to be finished, and have neither manifest nor tracker before. The step that training goes on from is
not older than theirs, and on disk.
"""

from __future__ import annotations

import sys
from typing import Any

from lastgasp.adapter import DeadlineExceeded

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_QUEUES = ("_persistent_queue", "_persistent_preload_q", "_persistent_comp_q")
LIMIT = 10.0
"""Seconds for a killed process to end; on a disk that does not answer it may take for ever."""


def cannot_abandon(args: Any) -> str:
    """Why async saves of a training with these settings cannot be abandoned; empty if they can."""
    if not getattr(args, "async_save", False):
        return ""
    if getattr(args, "async_strategy", "mcore") != "mcore":
        return f"it was not tried with --async-strategy {args.async_strategy}"
    caller = _caller()
    known = caller is not None and all(hasattr(caller, name) for name in (*_QUEUES, "_persistent_process"))
    return "" if known else "how this version of Megatron makes async saves is not known"


def abandon_saves() -> None:
    """End the writing process, and forget what it was to do.

    Raises:
        DeadlineExceeded: it does not end.
    """
    utils, caller = sys.modules.get("megatron.training.async_utils"), _caller()
    if utils is None or caller is None:
        return
    queue: Any = utils._async_calls_queue
    process, queues = caller._persistent_process, [getattr(caller, name) for name in _QUEUES]
    if queue is not None:
        queue.close(abort=True)
        utils._async_calls_queue = None  # type: ignore[attr-defined]
    _end(process)
    for one in queues:
        if one is not None:
            one.cancel_join_thread()  # nobody reads any more
            one.close()
    for name in (*_QUEUES, "_persistent_process"):
        setattr(caller, name, None)
    _end_results()


def _end(process: Any) -> None:
    if process is None:
        return
    process.kill()
    process.join(LIMIT)
    if process.is_alive():
        raise DeadlineExceeded("an async save's process to end", LIMIT, "It may wait for a disk. The job restarts.")


def _end_results() -> None:
    """The process that passes on what was written."""
    module: Any = sys.modules.get(f"{_STRATEGIES}.filesystem_async")
    manager = getattr(getattr(module, "_results_queue", None), "_manager", None)
    if manager is not None:
        manager.shutdown()
        module._results_queue = None


def _caller() -> Any:
    return getattr(sys.modules.get(f"{_STRATEGIES}.async_utils"), "PersistentAsyncCaller", None)
