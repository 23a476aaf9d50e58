"""SIGUSR1 and SIGUSR2 are for the ranks: a batch system sends them to all processes of a job, before its time is up."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def outlive() -> None:
    """Have this process go on where it would end by one of them. What it starts ends by them as ever."""
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _for_the_ranks)  # a handler, which goes with exec; what is ignored would stay so
            signal.siginterrupt(number, False)


def restore() -> None:
    """In a process that was forked from one which outlives them."""
    for number in SIGNALS:
        if signal.getsignal(number) is _for_the_ranks:
            signal.signal(number, signal.SIG_DFL)


def _for_the_ranks(number: int, frame: object) -> None:
    """Nothing."""
