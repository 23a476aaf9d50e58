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

ABORTED = "its communicators were aborted"
LIMIT = 20.0
"""Seconds that an abort may take; it takes one where it goes well."""
_lock = threading.Lock()
_number, _aborts = 0, list[threading.Thread]()
"""How many times the groups of this process were dropped; the threads that abort those that it has, if any do."""


def groups_number() -> int:
    """Of the process groups that this process has: another one once they were dropped."""
    return _number


def uses_nccl() -> bool:
    """Whether any process group of this process does."""
    return bool(_backends())


def failure() -> str:
    """Why a collective of this process may never end; empty if nothing is known against it."""
    if _aborts:
        return ABORTED
    for backend in _backends():
        asked = getattr(backend, "get_error", None)  # from torch 2.8 on
        if asked is not None and (found := asked()).name != "SUCCESS":
            return f"torch says {found.name}"
    return ""


def let_go() -> str:
    """Why a collective that has ended may have been let go by an abort, with anything in its tensors; or empty.

    To be asked after the end was seen: an abort is known here before it lets any kernel go. A collective that has ended
    without one is whole, whatever has failed since.
    """
    if _aborts:
        return ABORTED
    return failure() if os.environ.get(WATCHDOG, "3") in ("1", "2") else ""  # torch aborts, too, and knows it before


def abort_groups(number: int | None = None) -> bool:
    """Abort all communicators of NCCL, each on a thread of its own: one alone may wait for the kernel of another.

    Args:
        number: only if they are still those of this `groups_number`.

    Returns:
        Whether there was anything to abort.
    """
    with _lock:
        if number not in (None, _number):
            return False
        if not _aborts:
            backends = _backends()
            _aborts.extend(threading.Thread(target=_abort, args=(one,), daemon=True) for one in backends)
            del backends
            if not _aborts:
                return False
            log.info("rank %s aborts its communicators of NCCL: nothing else ends a collective whose peer is gone",
                     os.environ.get("RANK", "0"))  # fmt: skip
            for one in _aborts:
                one.start()
        threads = list(_aborts)
    deadline = _clock.monotonic() + LIMIT
    for one in threads:
        one.join(max(0.0, deadline - _clock.monotonic()))
    if any(one.is_alive() for one in threads):
        log.warning("communicators of NCCL could not be aborted within %g s", LIMIT)
    return True


def require_aborted() -> None:
    """Before groups are destroyed, which would wait without end for a collective that does not end.

    Raises:
        RuntimeError: an abort is still under way.
    """
    if any(one.is_alive() for one in _aborts):
        raise RuntimeError("communicators of NCCL could not be aborted: this process cannot train again")


def dropped() -> None:
    """The process groups are gone, and others may be made."""
    global _number
    with _lock:
        _number += 1
        _aborts.clear()


def why_not_again() -> str:
    """Why this process would be ended some time after NCCL has noticed the loss of a peer; empty if it would not."""
    if all(os.environ.get(name) == quiet for name, quiet in QUIET.items()) or not _backends():
        return ""
    wanted = " ".join(f"{name}={quiet}" for name, quiet in QUIET.items())
    return (f"{WATCHDOG}={os.environ.get(WATCHDOG, '3')}: torch's watchdog would end each process of this job a minute "
            f"or some after the fault. Where the job is started, set {wanted}")  # fmt: skip


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
