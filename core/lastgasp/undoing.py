"""The end of a run: everything that was put in place is taken back, whatever one of the steps raises."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

log = logging.getLogger("lastgasp")


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call each of them, in order. What one raises is logged with its traceback; the others are called all the same.

    The session must be closed although a hook could not be taken out: a job that has trained well would otherwise be
    counted among the failed.
    """
    for step in steps:
        try:
            step()
        except Exception:
            log.exception("the run could not be taken back whole: %s", getattr(step, "__qualname__", step))
