"""Where a job's checkpoints lie, and its settings: variables of MindIO's and of lastgasp's."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from lastgasp.adapter import GaspConfig, recovery_of
from lastgasp.adapter.again import LATER
from lastgasp.adapter.checkpoint import DirectoryLayout, SingleFile
from lastgasp_mindio.utils import update_was_timed

log = logging.getLogger("lastgasp")

FORMAT = "mindio"
LAYOUT = "LASTGASP_MINDIO_LAYOUT"
"""Names of the checkpoints: a pattern of directories, or a suffix of files."""
DEFAULT_LAYOUT = "iter_*"
STOP_CLEAN = "TTP_STOP_CLEAN_BEFORE_DUMP"
LIMIT = "TTP_NORMAL_ACTION_TIME_LIMIT"
_LIMITS = (30, 1800)
_NEVER = 1e9
"""Seconds: MindIO knows no hangs, and nobody tells this engine of evaluations and long saves."""


def directory() -> tuple[Path, bool]:
    """Where checkpoints and incidents lie, and whether somebody has said so."""
    given = os.environ.get("LASTGASP_DIR") or str(_megatrons("save") or "")
    return (Path(given).absolute(), True) if given else (Path("lastgasp").absolute(), False)


def _megatrons(name: str) -> Any:
    """One of Megatron's arguments, where it is loaded and has read them; else None."""
    module = sys.modules.get("megatron.training.global_vars")
    try:
        return getattr(module.get_args(), name, None) if module is not None else None
    except Exception:  # its own assertion: it has read none
        return None


def reuses_fp32() -> bool:
    """MindSpeed's `--reuse-fp32-param`."""
    return bool(_megatrons("reuse_fp32_param"))


def is_update(step: int) -> bool:
    """Whether the pair of calls that ends with `step` was an update, with `--reuse-fp32-param`.

    MindSpeed-LLM calls them around the conversions of the weights before and behind each update, too, with a count of
    its own that is 0 after loading. Its updates alone are timed.
    """
    timed = update_was_timed()
    return step == (_megatrons("iteration") or 0) + 1 > 1 if timed is None else timed


def config() -> GaspConfig:
    """The engine's settings.

    Raises:
        ConfigError: a variable has a value that is not allowed.
    """
    env = os.environ
    hang = None if env.get("LASTGASP_HANG_TIMEOUT") else _NEVER
    return GaspConfig.resolve(directory()[0], hang_timeout=hang, save_timeout=_limit())


def _limit() -> float | None:
    """MindIO's limit for a dump, where the user has set one; out of its range it does not count, as there."""
    text = os.environ.get(LIMIT, "")
    given = int(text) if text.isdigit() and not os.environ.get("LASTGASP_SAVE_TIMEOUT") else 0
    return float(given) if _LIMITS[0] <= given <= _LIMITS[1] else None


def layout() -> SingleFile | DirectoryLayout:
    """How the checkpoints lie in the directory. Raises ConfigError."""
    name = os.environ.get(LAYOUT) or DEFAULT_LAYOUT
    return SingleFile(name) if name.startswith(".") else DirectoryLayout(name)


def stop_before_dump() -> bool:
    """Whether stop and clean are called before a dump."""
    return os.environ.get(STOP_CLEAN) == "1"


def recovery(retry: bool, recover: bool, first: bool) -> str:
    """Which faults may be answered in place, as `RankStatus.recovery` says it.

    Args:
        retry, recover: MindIO's switches, `enable_uce` and `enable_arf`; LASTGASP_RECOVERY takes away from them.
        first: it is the first training of its script; no rank is replaced in a later one.

    Raises:
        ConfigError: LASTGASP_RECOVERY has another value.
    """
    asked = recovery_of(None, "auto")
    switched = {(True, True): "auto", (True, False): "retry", (False, True): "replace"}.get((retry, recover), "")
    if asked in ("restart", "save"):
        return asked
    both = switched if asked == "auto" else asked if switched in ("auto", asked) else ""
    return both if first else LATER.get(both, both)


def may_be_fewer() -> bool:
    """Whether LASTGASP_RECOVERY lets a lost rank be answered in place. Raises ConfigError."""
    return recovery_of(None, "auto") in ("auto", "replace")
