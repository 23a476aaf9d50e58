"""MindIO's limits: what the environment must say before `mindio_ttp` is imported (docs/facts/mindio_tft.md §4, §12)."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from lastgasp.errors import ConfigError

from .exits import DETECTION

ACTION = "TTP_NORMAL_ACTION_TIME_LIMIT"
"""Seconds for every order of the controller, the whole dump included."""
LEAST, MOST, DEFAULT = 30, 1800, 180
PARKING = 25
"""Seconds that stop and clean may add before a save (5 x 5 s, §7.3)."""
RATE = 200e6
"""Bytes a second that a save reaches at least; slow network file systems do (docs/facts/limits.md)."""
LOG_PATH = "TTP_LOG_PATH"
TASKD = "MINDX_TASK_ID"
_PROCESSES = "TASKD_PROCESS_ENABLE"
_ANSWERS = 3
"""How often MindIO waits for MindX before it orders anything (docs/facts/mindio_tft.md §11)."""
RESCHEDULE = 270.0
"""Seconds that ClusterD may take to find a place for new processes, at most (docs/facts/job_yaml.md §3)."""


def taskd_has_controller(env: Mapping[str, str]) -> bool:
    """Whether TaskD's manager runs MindIO's controller, as it does unless process recovery is off."""
    return TASKD in env and env.get(_PROCESSES, "on") != "off"


def patience(env: Mapping[str, str]) -> float:
    """Seconds in which MindIO, with MindX's word, orders ranks to stop after one of them was lost."""
    text = env.get("MINDIO_WAIT_MINDX_TIME", "")
    return DETECTION + _ANSWERS * (float(text) if text.isdigit() else 30.0) + RESCHEDULE


def action_limit(nbytes: int, save_timeout: float, finish_timeout: float) -> int:
    """The limit that a state of this size needs, seconds; may be more than MindIO takes.

    Args:
        nbytes: bytes that this rank saves; 0 where that is unknown: `save_timeout` alone counts then.
    """
    needed = nbytes / RATE if nbytes else save_timeout
    return max(DEFAULT, math.ceil(min(needed, save_timeout) + finish_timeout + PARKING))


def prepare(environ: MutableMapping[str, str], needed: int, logs: Path, taskd: bool = False) -> list[str]:
    """Set what is not set; returns what is wrong with what is, one line each.

    Args:
        needed: seconds that a dump may take. logs: MindIO's log directory, where the environment names none.
        taskd: the controller lives in TaskD, which has read its own environment long before.

    Raises:
        ConfigError: a value out of its range, which MindIO would replace by its default without a word.
    """
    check_environment(environ)
    environ.setdefault(LOG_PATH, str(logs))  # MindIO's own default is ./logs
    Path(environ[LOG_PATH]).mkdir(mode=0o750, parents=True, exist_ok=True)
    wanted, found = min(needed, MOST), []
    if taskd and ACTION not in environ:
        found = [
            f"{ACTION} is not set, so MindIO's controller in TaskD gives a save {DEFAULT} s, and it may take "
            f"{needed} s here; set {ACTION}={wanted} in the job's YAML, for all containers"
        ]
    given = int(environ.setdefault(ACTION, str(wanted)))
    if given < needed:
        fix = "lower save_timeout" if given == MOST else f"set {ACTION}={wanted}, leave it out, or lower save_timeout"
        found.append(
            f"{ACTION}={given} is shorter than a save may take here ({needed} s): MindIO drops a checkpoint that "
            f"comes later, complete or not, and ours is saved only after that; {fix}"
        )
    return found


_RANGES: Mapping[str, tuple[int, int]] = {
    ACTION: (LEAST, MOST),
    "TTP_RETRY_TIMES": (1, 300),
    "MINDIO_WAIT_MINDX_TIME": (1, 3600),
    "TTP_STOP_CLEAN_BEFORE_DUMP": (0, 1),
    "TTP_FRAMEWORK_TYPE": (0, 1),
}


def check_environment(environ: Mapping[str, str]) -> None:
    """Refuse numbers that MindIO would silently not take.

    Raises:
        ConfigError: names the variable and its range.
    """
    for name, (least, most) in _RANGES.items():
        text = environ.get(name)
        if text is not None and not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise ConfigError(name, text, f"{least} to {most}", "MindIO would use its default without a word.")
    path = environ.get(LOG_PATH)
    if path and Path(path).is_symlink():
        raise ConfigError(LOG_PATH, path, "no symlink", "Name the directory itself.")
