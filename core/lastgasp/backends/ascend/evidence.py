"""Checks whether TaskD's worker really runs: its functions return True before anything has happened (taskd.md §1).

What can be seen from outside: the library of the profiler is loaded, a connection of this process to the pod's proxy
stands, and one of the pod to the manager: the proxy takes workers in, whether or not its manager lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROXY_PORT = 9602
"""Where the proxy of the pod listens, on loopback (docs/facts/taskd.md §3)."""
MANAGER_PORT = 9601
"""Where the manager listens, on the first pod."""
_ESTABLISHED = "01"
_LISTEN = "0A"


@dataclass(frozen=True)
class Evidence:
    """The observable effects of a process's TaskD worker.

    Attributes:
        profiler: libmspti.so is loaded.
        proxy: something listens at the proxy's port on this host.
        manager: this host has a connection to the manager's port.
        connected: this process has a connection there.
    """

    profiler: bool
    proxy: bool
    manager: bool
    connected: bool

    @property
    def registered(self) -> bool:
        """Whether nothing is missing."""
        return self.profiler and self.connected and self.manager

    @property
    def missing(self) -> str:
        """What is missing, and what to do; empty if nothing is."""
        if not self.profiler:
            return (
                "libmspti.so is not loaded, and without it TaskD's worker neither registers nor writes anything: "
                "start the job with `lastgasp run`, which preloads it, or export LD_PRELOAD before the processes start"
            )
        if not self.proxy:
            return (
                f"no TaskD proxy listens at port {PROXY_PORT} of this pod: start the job with `lastgasp run`, or "
                "init_taskd_proxy in a process of the pod"
            )
        if not self.connected:
            return f"there is no connection to TaskD's proxy at port {PROXY_PORT}"
        if not self.manager:
            return (
                f"TaskD's proxy here has no connection to the manager at port {MANAGER_PORT} of the first pod: is the "
                "manager running there (`lastgasp run` starts it), and is the port open?"
            )
        return ""


def evidence(
    process: Path = Path("/proc/self"), port: int = PROXY_PORT, upstream: int = MANAGER_PORT
) -> Evidence:
    """Inspect `process`. Never raises: what cannot be read counts as absent."""
    listening, connections = _sockets(process, port)
    return Evidence(
        profiler="libmspti.so" in _text(process / "maps"),
        proxy=listening,
        manager=bool(_sockets(process, upstream)[1]),
        connected=bool(connections & _own(process)),
    )


def _sockets(process: Path, port: int) -> tuple[bool, set[str]]:
    """Whether the port has a listener, and the inodes of the connections to it."""
    listening, connections = False, set()
    for name in ("net/tcp", "net/tcp6"):
        for line in _text(process / name).splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10:
                continue
            if fields[3] == _LISTEN and _port(fields[1]) == port:
                listening = True
            if fields[3] == _ESTABLISHED and _port(fields[2]) == port:
                connections.add(fields[9])
    return listening, connections


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _own(process: Path) -> set[str]:
    found = set()
    try:
        for entry in (process / "fd").iterdir():
            target = _link(entry)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass
    return found


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
