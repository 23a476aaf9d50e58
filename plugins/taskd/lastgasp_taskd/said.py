"""What the real TaskD takes and this one does not need is said, once per process and subject."""

from __future__ import annotations

import os

from lastgasp.adapter.worker import set_up_logs

from . import log

WITHOUT_EFFECT = (
    "TASKD_FILE_LOG_LEVEL",
    "TASKD_STD_LOG_LEVEL",
    "TASKD_LOG_STDOUT",
    "TASKD_PROCESS_INTERVAL",
    "TASKD_REPORT_FAULT_TIMEOUT",
    "LOCAL_PROXY_ENABLE",
    "ENABLE_RESTART_FAULT_PROCESS",
    "ELASTIC_PROCESS_RECOVER_ENABLE",
)
"""Variables of the real one (docs/facts/taskd.md §5); lines go to lastgasp's log (LASTGASP_LOG)."""
_told: set[str] = set()


def once(text: str, *, error: bool = False) -> None:
    """Log it, the first time."""
    if text not in _told:
        set_up_logs()
        _told.add(text)
        (log.error if error else log.info)("%s", text)


def variables() -> None:
    """Name the variables that are set and have no effect here."""
    if found := [name for name in WITHOUT_EFFECT if os.environ.get(name)]:
        once(f"TaskD's names are served by lastgasp (lastgasp-taskd); without effect here: {', '.join(found)}")


def refused(what: str) -> bool:
    """Log why a call is answered by False, as the real one does.

    Returns:
        False.
    """
    set_up_logs()
    log.error("%s", what)
    return False
