"""The environment seen by TaskD's Go half: the block that the process was started with (docs/facts/taskd.md §1).

What Python sets later in `os.environ` reaches TaskD's Python half only; the two then disagree.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

GO_VARIABLES = (
    "MINDX_TASK_ID",
    "MINDX_SERVER_IP",
    "POD_IP",
    "TASKD_LOG_PATH",
    "LOCAL_PROXY_ENABLE",
    "TASKD_PROCESS_INTERVAL",
)
"""Read by libtaskd.so from the block of exec time (docs/facts/taskd.md §1, environment trap)."""


def environment_at_exec(process: Path = Path("/proc/self")) -> dict[str, str]:
    """Return the environment that this process was started with.

    Raises:
        OSError: it cannot be read.
    """
    items = (item.partition(b"=") for item in (process / "environ").read_bytes().split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in items}


def set_too_late(at_exec: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Return variables that Go and Python see differently: name -> (Go's value, Python's value)."""
    seen = {name: (at_exec.get(name), now.get(name)) for name in GO_VARIABLES}
    return {name: (go, python) for name, (go, python) in seen.items() if go != python}
