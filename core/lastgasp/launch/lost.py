"""What a launcher says that ends because it does not find the others, or is not needed by them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from lastgasp import _clock
from lastgasp.output import write_error

_SPARE = "the job has ended, and had all the hosts that it needed: this launcher was one too many, or a spare"
_FAILED = "the job has ended without this launcher, a spare, and not well as far as is known: see its other launchers"
_KEY, _HEARD = "lastgasp/ended-well", "lastgasp/ended-well/heard"
_LOOK = 0.1
_CLOSED = (
    "the rendezvous of this job is closed: the job has ended before this launcher was taken in. Start the launchers of "
    "all hosts again if it is to go on"
)
_GONE = (
    "the rendezvous of this job cannot be reached any more: the job has ended, or its first host is gone, before this "
    "launcher was taken in. Look at the launchers of its other hosts; start those of all hosts again if it is to go on"
)
_LATE = "the job has ended, and well, before this launcher was taken in: nothing is left to do"
TOLD = 5.0
"""Seconds for launchers that wait at the rendezvous to hear that it is closed: torch asks once a second."""


def lost_rendezvous(error: Exception, hosts: Counter[str] | None, safe: str) -> str:
    """The message for a launcher that cannot continue because it no longer finds the others.

    Args:
        hosts: those of the last attempt; safe: a text about saved steps, or empty.
    """
    names = f" ({', '.join(sorted(hosts))})" if hosts else ""
    saved = safe or "see lastgasp incident for what is saved"
    again = "start the job again and it resumes from there"
    if isinstance(error, RendezvousTimeoutError):
        return f"stopped: not all hosts of the job{names} have come back in time; {saved}; {again}"
    if isinstance(error, RendezvousClosedError):
        return f"stopped: the launcher of another host of the job{names} has ended it; {saved}; {again}"
    others = ", ".join(sorted(hosts - Counter([socket.gethostname()]))) if hosts else ""
    others = f" ({others})" if others else ""
    return (
        "stopped: the job's rendezvous cannot be reached: the host or the launcher that held it is gone, or this host "
        f"was cut off ({line(error.__cause__ or error)}); {saved}. If launchers of other hosts{others} still "
        "run, the job may go on without this one: start only this launcher again and it is taken in. "
        f"Otherwise {again}"
    )


def tell_success(handler: Any, wait: bool) -> None:
    """The job has ended well: launchers that wait to be taken in need not be started again.

    Args:
        wait: they are all lastgasp's. The rendezvous ends with the first launcher, so it waits until they have heard
            that, for `TOLD` seconds at most. Others would never say so.
    """
    if (store := getattr(handler, "_store", None)) is None:
        return
    with contextlib.suppress(DistError, RuntimeError, RendezvousError, AttributeError):
        store.set(_KEY, b"1")
        if not wait:
            return
        handler._state_holder.sync()
        state = handler._state_holder.state
        waiting = len(state.wait_list | state.redundancy_list)
        if waiting:
            handler.set_closed()
        deadline = _clock.monotonic() + TOLD
        while store.add(_HEARD, 0) < waiting and _clock.monotonic() < deadline:
            time.sleep(_LOOK)


def _ended_well(handler: Any) -> bool:
    """Whether the job's launchers have said so; they hear that it is known here."""
    store = getattr(handler, "_store", None)
    with contextlib.suppress(DistError, RuntimeError):
        if store is not None and store.check([_KEY]):
            store.add(_HEARD, 1)
            return True
    return False


def spare(handler: Any, well: bool = False) -> SystemExit:
    """For a launcher whose rendezvous was closed while it was a spare, after it has said so: 0, or 1 by default.

    Args:
        well: it is known that the job has ended well.
    """
    if well:
        write_error(f"lastgasp: {_LATE}")
        return SystemExit(0)
    well = _ended_well(handler)
    write_error(f"lastgasp: {_SPARE if well else _FAILED}")
    return SystemExit(0 if well else 1)


def never_taken_in(error: Exception, handler: Any) -> SystemExit | None:
    """For a launcher whose ranks were never part of the job, and that finds it ended, after it has said so.

    Returns:
        With 0 where the job has ended well, else with 1; None where it is something else that has failed.
    """
    if not isinstance(error, RendezvousClosedError | RendezvousConnectionError | DistError):
        return None
    well = _ended_well(handler)
    otherwise = _CLOSED if isinstance(error, RendezvousClosedError) else f"{_GONE} ({line(error.__cause__ or error)})"
    write_error(f"lastgasp: {_LATE if well else otherwise}")
    return SystemExit(0 if well else 1)


def line(error: BaseException) -> str:
    """The first line of what it says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
