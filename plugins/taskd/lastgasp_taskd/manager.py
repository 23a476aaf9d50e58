"""`Manager`: checks its config as the real one does, and waits. What it would lead, lastgasp's launcher leads."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from .said import once, refused, variables

NEEDED: dict[str, type] = {"job_id": str, "node_nums": int, "proc_per_node": int}
WITHOUT_EFFECT = ("plugin_dir", "fault_recover", "cluster_infos")
LOOK = 1.0
"""Seconds between two looks at who has started this process."""


class Manager:
    """As `taskd.python.framework.manager.manager.Manager`."""

    def __init__(self) -> None:
        self._config: dict[str, object] | None = None
        self._parent = os.getppid()  # now: it may end before the manager is started
        self._orphan = _is_orphan()

    def init_taskd_manager(self, config: dict[str, object]) -> bool:
        """Check the config and complete it in place, as the real one does (docs/facts/taskd.md §1)."""
        if not isinstance(config, dict):
            return refused(f"init_taskd_manager: config is {config!r}, not a dict")
        for name, kind in NEEDED.items():
            value = config.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                why = "set MINDX_TASK_ID, from which manager.py takes it" if name == "job_id" else "correct manager.py"
                return refused(f"init_taskd_manager: {name}={value!r} is not {kind.__name__}: {why}")
        variables()
        if ignored := [name for name in WITHOUT_EFFECT if config.get(name)]:
            once(f"init_taskd_manager: without effect here: {', '.join(ignored)}")
        config["taskd_enable"] = "off" if os.environ.get("TASKD_PROCESS_ENABLE") == "off" else "on"
        if os.environ.get("PROCESS_RECOVER") == "on":
            config["fault_recover"] = "on"
        self._config = config
        return True

    def start_taskd_manager(self) -> bool:
        """Wait until the process that has started this one is gone, or SIGTERM comes; then False, as the real one."""
        if self._config is None:
            return refused("start_taskd_manager: init_taskd_manager has not been called, or was refused")
        once(
            "TaskD's manager has nothing to do here: lastgasp's launcher starts the workers, watches them and leads "
            "the recoveries (lastgasp ps, lastgasp incident). It waits for the end of the process that has started it"
        )
        over = threading.Event()
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda number, frame: over.set())
        while not self._orphan and os.getppid() == self._parent and not over.wait(LOOK):
            pass
        return False

    def start_controller(self) -> None:
        """Nothing: lastgasp's controller is the launcher's."""
        once("MindIO's controller is not started: lastgasp's launcher leads the recoveries")


def _is_orphan() -> bool:
    """Whether who has started this process was gone before that could be noted: so is the leader of its group, and its
    parent is of another one. A start script that is the first process of a container has number 1, and lives."""
    group = os.getpgrp()
    if group == os.getpid() or _lives(group):
        return False
    try:
        return os.getpgid(os.getppid()) != group
    except ProcessLookupError:
        return True


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


current: Manager | None = None
"""Of this process."""


def init(config: dict[str, object]) -> bool:
    """`init_taskd_manager`."""
    global current
    current = Manager()
    return current.init_taskd_manager(config)


def start() -> bool:
    """`start_taskd_manager`."""
    if current is None:
        return refused("start_taskd_manager: init_taskd_manager has not been called, or was refused")
    return current.start_taskd_manager()
