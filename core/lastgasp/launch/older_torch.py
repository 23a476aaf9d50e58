"""What torch's agent of earlier releases has otherwise: its `_shutdown` takes no timeout (docs/facts/torchrun.md)."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable
from typing import Any


def shut_down(shutdown: Callable[..., None], context: Any, sig: signal.Signals, timeout: int, keep: bool) -> None:
    """Call torch's `_shutdown`, which stops the ranks; each torch gives them `timeout` seconds.

    Args:
        shutdown: torch's, bound.
        context: the processes of the ranks, if there are any; without the argument, torch closes it with 30 s.
        keep: the rendezvous stays as it is. 2.6 and 2.7 close it here otherwise, later ones where the launcher ends.
    """
    taken = inspect.signature(shutdown).parameters
    if "timeout" in taken:
        return shutdown(sig, timeout)
    more = {"is_restart": keep} if "is_restart" in taken else {}
    if context is None:
        return shutdown(sig, **more)
    close = context.close
    vars(context)["close"] = lambda death_sig=None, _timeout=30: close(death_sig, timeout)
    try:
        shutdown(sig, **more)
    finally:
        vars(context)["close"] = close
