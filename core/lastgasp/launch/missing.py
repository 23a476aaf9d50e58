"""Logs for which hosts a launcher waits, and that nothing is lost meanwhile: at once and then periodically."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

log = logging.getLogger("lastgasp.launch")

FIRST, AGAIN = 3.0, 60.0
"""Seconds between these log lines."""


def hosts_in(handler: Any) -> Counter[str] | None:
    """The hosts that have joined the rendezvous; None if this torch or kind of rendezvous does not expose them."""
    try:
        state = handler._state_holder.state
        return Counter(str(node.addr) for node in {*state.participants, *state.wait_list})
    except (AttributeError, TypeError):
        return None


def is_alone(handler: Any) -> bool:
    """Whether the job has one host only, as far as this kind of rendezvous tells: it waits for no other."""
    settings = getattr(handler, "settings", None)
    most = getattr(settings, "max_nodes", None) if settings is not None else getattr(handler, "world_size", None)
    return isinstance(most, int) and most == 1


class Waiting:
    """Context around a wait for the other hosts.

    Args:
        handler: torch's rendezvous handler.
        before: the hosts of the last attempt, from `hosts_in`; None if there was none.
        safe: a text about saved steps, such as "step 7 is safe in DIR", or empty.
    """

    def __init__(self, handler: Any, before: Counter[str] | None, safe: Callable[[], str]) -> None:
        self._handler, self._before, self._safe = handler, before, safe
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lastgasp-waiting", daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5)

    def _run(self) -> None:
        pause = FIRST
        while not self._over.wait(pause):
            log.warning("%s", self.text())
            pause = AGAIN

    def text(self) -> str:
        """Describe what is awaited and what is safe."""
        state: Any = getattr(getattr(self._handler, "_state_holder", None), "state", None)
        if getattr(self._handler, "_this_node", None) in getattr(state, "redundancy_list", ()):
            running = ", ".join(sorted(str(node.addr) for node in state.participants))
            return f"waiting: the job runs with all its hosts ({running}); this launcher is one too many, or a spare"
        safe = self._safe()
        return f"waiting for {self.missing()}" + (f"; {safe}" if safe else "")

    def missing(self) -> str:
        """Describe the missing hosts."""
        here = hosts_in(self._handler)
        if here is None:
            return "other hosts"
        own = getattr(getattr(self._handler, "_this_node", None), "addr", None)
        if own is not None and own not in here:  # between two attempts the rendezvous is empty
            here[own] += 1
        gone = sorted((self._before - here).elements()) if self._before is not None else []
        if gone:
            return f"{', '.join(gone)} to come back"
        wanted = getattr(getattr(self._handler, "settings", None), "min_nodes", 0)
        if not isinstance(wanted, int) or wanted <= here.total():
            return "other hosts"
        return f"{wanted - here.total()} of {wanted} hosts (here: {', '.join(sorted(here)) or 'none'})"
