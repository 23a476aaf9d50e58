"""What a launcher says that ends because it does not find the others, or is not needed by them."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from lastgasp.output import write_error

_SPARE = "the job has ended, and had all the hosts that it needed: this launcher was one too many, or a spare"
_FAILED = "the job has ended without this launcher, a spare, and not well as far as is known: see its other launchers"
_KEY = "lastgasp/ended-well"
CLOSED = (
    "the rendezvous of this job is closed: the job has ended before this launcher was taken in. Start the launchers of "
    "all hosts again if it is to go on"
)


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


def tell_success(handler: Any) -> None:
    """The job has ended well: launchers that wait to be taken in need not be started again."""
    if (store := getattr(handler, "_store", None)) is not None:
        with contextlib.suppress(DistError, RuntimeError):
            store.set(_KEY, b"1")


def spare(handler: Any) -> SystemExit:
    """For a launcher whose rendezvous was closed while it was a spare, after it has said so: 0, or 1 by default."""
    well = False
    with contextlib.suppress(DistError, RuntimeError):
        well = getattr(handler, "_store", None) is not None and bool(handler._store.check([_KEY]))
    write_error(f"lastgasp: {_SPARE if well else _FAILED}")
    return SystemExit(0 if well else 1)


def line(error: BaseException) -> str:
    """The first line of what it says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
