"""Where the profiling files of a job are: `<base>/<task>/<rank>` (docs/facts/taskd.md §6)."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

log = logging.getLogger("lastgasp.steps")

MINDCLUSTER = Path("/user/cluster-info")
"""MindCluster mounts it; it is never created here."""
BASE_VARIABLE = "LASTGASP_PROFILING_DIR"
TASK_VARIABLE = "MINDX_TASK_ID"


def profiling_base(directory: Path, rank: int) -> Path:
    """The directory of all jobs' profiling files; which one, and why, is logged once per job.

    Args:
        rank: the calling rank; all but the first log only problems.
        directory: the run's; if neither the environment (`LASTGASP_PROFILING_DIR`) nor MindCluster names a
            directory, `profiling` in it is used.
    """
    base, reason, problem = _decide(os.environ.get(BASE_VARIABLE, ""), MINDCLUSTER, directory)
    usual = logging.INFO if rank == 0 else logging.DEBUG
    _say(logging.WARNING if problem else usual, f"profiling files go to {base} ({reason})")
    return base


def task_id(started: int | str) -> str:
    """The job's directory: `MINDX_TASK_ID`, else `default_task_id_<s>` as TaskD has it.

    Args:
        started: when the job started, unix seconds; the same on every rank and in every attempt.
    """
    given, default = os.environ.get(TASK_VARIABLE, ""), f"default_task_id_{started}"
    if given and (given in (".", "..") or "/" in given or "\0" in given or len(os.fsencode(given)) > 255):
        _say(
            logging.WARNING,
            f"{TASK_VARIABLE}={given!r} is not allowed: expected a name without a slash, of at most 255 bytes. "
            f"The profiling files go to {default}; set it to a plain name to have them there.",
        )
        return default
    return given or default


def _decide(given: str, mindcluster: Path, directory: Path) -> tuple[Path, str, bool]:
    """The base directory, the reason, and whether it indicates a problem."""
    if given:
        return Path(given).expanduser().absolute(), f"{BASE_VARIABLE} says so", False
    wanted, own = mindcluster / "profiling", directory / "profiling"
    if not mindcluster.is_dir():
        return own, f"{BASE_VARIABLE} moves them", False
    if os.access(wanted if wanted.exists() else mindcluster, os.W_OK | os.X_OK):
        return wanted, "MindCluster's place", False
    return own, f"{wanted} cannot be written; make it writable, or set {BASE_VARIABLE}", True


@functools.cache
def _say(level: int, text: str) -> None:
    log.log(level, "%s", text)
