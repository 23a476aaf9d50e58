"""Frees this process from collectives of NCCL that wait for a rank that is gone.

Nothing else does: the kernel of such a collective occupies its stream, and all that was queued behind it waits, with it
whoever waits for that. An abort ends the kernel without an error on the stream and leaves in its tensors whatever was
there, so that nothing may be used that was computed behind it (docs/facts/nccl.md).
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lastgasp import _clock
from lastgasp.nccl import QUIET, WATCHDOG

log = logging.getLogger("lastgasp")

LIMIT = 20.0
"""Seconds that an abort may take; it takes one where it goes well."""
_lock = threading.Lock()
_number, _aborted = 0, False
"""How many times the groups of this process were dropped; whether those that it has were aborted."""


def groups_number() -> int:
    """Of the process groups that this process has: another one once they were dropped."""
    return _number


def uses_nccl() -> bool:
    """Whether any process group of this process does."""
    return bool(_backends())


def failure() -> str:
    """Why what the collectives of this process have written may not be used; empty if nothing is known against it.

    To be asked after a stream has come to its end: an abort is known here before it lets any kernel go.
    """
    if _aborted:
        return "its communicators were aborted"
    for backend in _backends():
        asked = getattr(backend, "get_error", None)  # from torch 2.8 on
        if asked is not None and (found := asked()).name != "SUCCESS":
            return f"torch says {found.name}"
    return ""


def abort_groups(number: int | None = None) -> bool:
    """Abort all communicators of NCCL, each on a thread of its own: one alone may wait for the kernel of another.

    Args:
        number: only if they are still those of this `groups_number`.

    Returns:
        Whether there was anything to abort.
    """
    global _aborted
    with _lock:
        if number not in (None, _number) or not (backends := _backends()):
            return False
        if not _aborted:
            log.info("rank %s aborts its communicators of NCCL: nothing else ends a collective whose peer is gone",
                     os.environ.get("RANK", "0"))  # fmt: skip
        _aborted = True
        threads = [threading.Thread(target=_abort, args=(one,), name="lastgasp-abort", daemon=True) for one in backends]
        del backends
        deadline = _clock.monotonic() + LIMIT
        for one in threads:
            one.start()
        for one in threads:
            one.join(max(0.0, deadline - _clock.monotonic()))
    if any(one.is_alive() for one in threads):
        log.warning("communicators of NCCL could not be aborted within %g s", LIMIT)
    return True


def dropped() -> None:
    """The process groups are gone, and others may be made."""
    global _number, _aborted
    with _lock:
        _number, _aborted = _number + 1, False


def why_not_again() -> str:
    """Why this process would be ended some time after NCCL has noticed the loss of a peer; empty if it would not."""
    value = os.environ.get(WATCHDOG, "3")
    if value == "0" or not _backends():
        return ""
    wanted = " ".join(f"{name}={quiet}" for name, quiet in QUIET.items())
    return (f"{WATCHDOG}={value}: torch's watchdog would end each process of this job a minute after the fault. Where "
            f"the job is started, set {wanted}")  # fmt: skip


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except Exception as error:
        log.warning("a communicator of NCCL could not be aborted: %s", str(error).partition("\n")[0])


def _backends() -> list[Any]:
    """NCCL's of all process groups of this process."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    listed: Any = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)
    found = []
    for group in list(listed or ()):
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
        except (RuntimeError, AttributeError):
            continue  # gloo's
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if type(backend).__name__ == "ProcessGroupNCCL" and hasattr(backend, "abort"):
            found.append(backend)
    return found
