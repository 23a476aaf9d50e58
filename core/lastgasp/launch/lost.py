"""What a launcher says that ends because it does not find the others, or is not needed by them."""

from __future__ import annotations

import socket
from collections import Counter

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

SPARE = "the job has ended, and had all the hosts that it needed: this launcher was one too many, or a spare"
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


def line(error: BaseException) -> str:
    """The first line of what it says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
