"""`taskd.api`: no function raises for ordinary failure.

At the end of a process its own exit hook is all that is needed. Who calls `destroy_taskd_worker` closes the network
under its receive loop, which panics on nil: the process is aborted (-6).
"""

from __future__ import annotations

import atexit
import ipaddress
import json
import os
import socket
import threading
from typing import Any

import taskd

PROXY_PORT = int(os.environ.get("STANDIN_PROXY_PORT", "9602"))
"""The real one is 9602 always; two tests at once could not share it."""
PATIENCE = 300.0
"""Seconds at most for what the real one waits for without a limit."""
PROFILER = os.environ.get("STANDIN_PROFILER", "on") == "on"
"""Whether libmspti.so can be loaded."""

calls: list[tuple[Any, ...]] = []
_connections: list[socket.socket] = []
_initialised = False
manager_ended = threading.Event()
manager_answers = threading.Event()
"""A proxy's init blocks until then."""


def init_taskd_worker(rank_id: Any, upper_limit_of_disk_in_mb: Any = 5000, framework: Any = "pt") -> bool:
    """False for what is wrong; True before anything is up."""
    global _initialised
    calls.append(("init_taskd_worker", rank_id, upper_limit_of_disk_in_mb, framework))
    if not isinstance(rank_id, int) or not isinstance(upper_limit_of_disk_in_mb, int):
        return False
    if rank_id < 0 or upper_limit_of_disk_in_mb < 0 or framework not in ("pt", "ms"):
        return False
    for name in ("RANK", "LOCAL_WORLD_SIZE") if framework == "pt" else ("MS_NODE_RANK",):
        if not os.environ.get(name, "").isdigit():
            return False
    if type(rank_id) is not int or type(upper_limit_of_disk_in_mb) is not int:
        taskd.violations.append(f"init_taskd_worker({rank_id!r}, {upper_limit_of_disk_in_mb!r}): a bool passes unseen")
    if upper_limit_of_disk_in_mb < 10:
        taskd.violations.append("a limit below 10 MB: only the first batch is ever written")
    if _initialised:
        taskd.violations.append("init_taskd_worker twice: a second set of goroutines runs")
    _initialised = True
    atexit.register(_close)
    return True


def start_taskd_worker() -> bool:
    """True at once; without the profiler nothing further starts."""
    calls.append(("start_taskd_worker",))
    if not _initialised:
        return False
    if PROFILER:
        threading.Thread(target=_connect, daemon=True).start()
    return True


def _connect() -> None:
    try:
        _connections.append(socket.create_connection(("127.0.0.1", PROXY_PORT), timeout=PATIENCE))
    except OSError:
        pass  # the real one retries for ever, and says so in its log only


def destroy_taskd_worker() -> bool:
    """Closes the network client only, and its receive loop panics."""
    calls.append(("destroy_taskd_worker",))
    if _connections:
        os.abort()
    return _initialised


def _close() -> None:
    while _connections:
        _connections.pop().close()


def init_taskd_manager(config: dict[str, Any]) -> bool:
    """Writes into the caller's dict."""
    calls.append(("init_taskd_manager", dict(config)))
    if not isinstance(config, dict) or not isinstance(config.get("job_id"), str):
        return False
    for name in ("node_nums", "proc_per_node"):
        if type(config.get(name)) is not int:
            return False
    config["taskd_enable"] = "off" if os.environ.get("TASKD_PROCESS_ENABLE") == "off" else "on"
    return True


def _seen_by_go(name: str) -> str:
    """What the Go half has of the environment: the block of exec time (§1)."""
    with open("/proc/self/environ", "rb") as file:
        block = dict(item.partition(b"=")[::2] for item in file.read().split(b"\0") if item)
    return os.fsdecode(block.get(os.fsencode(name), b""))


def _tell(path: str, text: str) -> None:
    """For the test, all at once: this process may be ended as soon as the file is there."""
    temp = f"{path}.{os.getpid()}"
    with open(temp, "w") as file:
        file.write(text)
    os.replace(temp, path)


def start_taskd_manager() -> bool:
    """Blocks; it returns on an error only."""
    calls.append(("start_taskd_manager",))
    if told := os.environ.get("STANDIN_MANAGER_TELLS"):
        _tell(told, f"{os.getpid()} {_seen_by_go('POD_IP')}")
    if os.environ.get("STANDIN_MANAGER") != "fails":
        manager_ended.wait(PATIENCE)
    return False


def init_taskd_proxy(config: dict[str, Any]) -> bool:
    """False for a host name; blocks until the manager answers."""
    calls.append(("init_taskd_proxy", dict(config)))
    for name in ("UpstreamAddr", "ListenAddr"):
        try:
            ipaddress.ip_address(config.get(name, "127.0.0.1"))
        except ValueError:
            return False
    if any(not isinstance(value, str) for value in config.values()):
        taskd.violations.append(f"init_taskd_proxy({config!r}): the real one adds strings, and raises")
    if told := os.environ.get("STANDIN_PROXY_TELLS"):
        _tell(told, json.dumps({"pid": os.getpid(), **config}))
        return True
    return manager_answers.wait(PATIENCE)


def destroy_taskd_proxy() -> bool:
    """Always."""
    calls.append(("destroy_taskd_proxy",))
    return True
