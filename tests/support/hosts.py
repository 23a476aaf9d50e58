"""Several hosts on this machine: each a network, UTS, IPC, PID and mount namespace, joined by a switch of ours.

Each has its own name, address, hosts file, /dev/shm, directories and clock, and can lose its power, its link or a
process. Needs root; `needs_hosts` marks a test that uses them. Nothing outlives the `with` block, nor this process.

    with network(tmp_path, "b", "a") as hosts:
        job = hosts["a"].start(["python", "train.py"], LASTGASP_DIR=str(tmp_path / "d"))
        hosts["a"].power_off()
        assert hosts["b"].start(["true"]).code(10) == 0
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from support.waiting import PATIENCE, until
from support.wires import MTU, Switch, Wire

NETWORK = "10.77.0"
"""Of the hosts' addresses; it exists between these namespaces only."""
_CLOCK = Path(__file__).parent / "host_clock"
_KINDS = ("--net", "--uts", "--ipc", "--pid", "--mount")
_FIRST_PROCESS = r"""
mount -t proc proc /proc
mount -t tmpfs -o size=2g shm /dev/shm
mount --bind "$0/hosts" /etc/hosts
mount --bind "$0/resolv.conf" /etc/resolv.conf
for pair in "$@"; do mount --bind "${pair%%:*}" "${pair#*:}"; done
cat "$0/hostname" > /proc/sys/kernel/hostname
if [ -e /proc/sys/net/ipv6 ]; then echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; fi
ip link set lo up
exec "$PYTHON" -I -S -c '
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are reaped
print("ready", flush=True)
sys.stdin.read()
'
"""
"""Prepares the host and stays until its standard input closes; as the first process of its PID namespace it takes all
others with it."""


@cache
def missing() -> str:
    """What this machine lacks for hosts, empty where it lacks nothing."""
    if os.geteuid() != 0:
        return "hosts are namespaces with devices: needs root"
    lacking = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (util-linux, iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun"
    tried = subprocess.run(["unshare", *_KINDS, "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


needs_hosts = pytest.mark.skipif(bool(missing()), reason=missing())


class Started:
    """A command on a host.

    Attributes:
        pid: of the command, as this process sees it.
        log: what it writes, standard error included.
    """

    def __init__(self, outer: subprocess.Popen[bytes], log: Path) -> None:
        self._outer, self.log = outer, log
        until(lambda: bool(self._inner()) or outer.poll() is not None, "the command has started on its host")
        self.pid = self._inner()

    def _inner(self) -> int:
        try:
            children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        except OSError:
            return 0
        return int(children[0]) if children else 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the command alone."""
        assert self.pid, "it had ended before it was seen"
        os.kill(self.pid, number)

    def running(self) -> bool:
        """It has not ended."""
        return self._outer.poll() is None

    def code(self, seconds: float) -> int:
        """Wait for its exit code, negative for a signal; TimeoutError with its output when it does not end in time."""
        try:
            return self._outer.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still runs after {seconds:g} s:\n{self.output[-6000:]}") from None

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")


class Host:
    """One of the network's hosts; made by `network`, and by nobody else.

    Attributes:
        name, address: its own.
        folder: of its logs, runtime and temporary directories, and of its `own` directories; others have no part in it.
        clock: seconds by which its wall clock is ahead, for Python commands that are started from now on.
        wire: its link.
    """

    wire: Wire

    def __init__(self, switch: Switch, folder: Path, name: str, address: str, own: Iterable[Path]) -> None:
        self.name, self.address, self.folder, self.clock = name, address, folder, 0.0
        self._switch, self._own = switch, list(own)
        self._first: subprocess.Popen[str] | None = None
        self._pid = 0
        self._outers: list[subprocess.Popen[bytes]] = []
        self._logs = 0
        for part in ("run", "tmp", *(f"own-{n}" for n in range(len(self._own)))):
            (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "hostname").write_text(name)
        (folder / "resolv.conf").write_text("")

    @property
    def on(self) -> bool:
        """It has power."""
        return self._first is not None

    def power_on(self) -> None:
        """Start it, with an empty /dev/shm and its disks as they were."""
        assert self._first is None, f"{self.name} is on"
        pairs = [f"{self.folder / f'own-{n}'}:{path}" for n, path in enumerate(self._own)]
        inside = ["sh", "-ec", _FIRST_PROCESS, str(self.folder), *pairs]
        command = ["unshare", *_KINDS, "--propagation", "private", "--fork", "--kill-child", *inside]
        errors = self.folder / "errors"
        with errors.open("w") as file:
            self._first = subprocess.Popen(
                command,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=dict(os.environ) | {"PYTHON": sys.executable},
            )
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == "ready\n", f"host {self.name} did not start: {errors.read_text()}"
        self._pid = _only_child(self._first.pid)
        device = f"lg{os.getpid()}n{self.address.rpartition('.')[2]}"
        self.wire = self._switch.plug(socket.inet_aton(self.address), device, self._take_device)

    def _take_device(self, device: str) -> None:
        _command("ip", "link", "set", device, "netns", str(self._pid), "name", "eth0")
        inside = ["nsenter", "-t", str(self._pid), "-n", "ip"]
        _command(*inside, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _command(*inside, "link", "set", "eth0", "mtu", str(MTU), "up")

    def power_off(self) -> None:
        """All its processes end at once and silently: its packets are dropped before. Idempotent."""
        if self._first is None:
            return
        if vars(self).get("wire") is not None:
            self.wire.cut = True
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
        else:  # it did not get so far
            self._first.kill()
        self._first.wait(PATIENCE)
        for outer in self._outers:
            outer.wait(PATIENCE)
        for pipe in (self._first.stdin, self._first.stdout):
            if pipe is not None:
                pipe.close()
        self._switch.unplug(socket.inet_aton(self.address))
        self._first, self._outers, self._pid = None, [], 0

    def cut(self) -> None:
        """Drop all packets from and to it; both sides go on."""
        self.wire.cut = True

    def mend(self) -> None:
        """Let packets through again."""
        self.wire.cut = False

    def slow(self, delay: float, loss: float) -> None:
        """Delay each of its packets by so many seconds, and lose this share of them."""
        self.wire.delay, self.wire.loss = delay, loss

    def start(self, command: Sequence[str], **variables: str) -> Started:
        """Start a command here; its environment is this process's with the host's own directories and `variables`."""
        assert self._first is not None, f"{self.name} is off"
        self._logs += 1
        log = self.folder / f"log-{self._logs}"
        enter = ["nsenter", "-t", str(self._pid), "-n", "-u", "-i", "-p", "-m", "--", *command]
        with log.open("wb") as file:
            outer = subprocess.Popen(
                enter, env=self._environment(variables), stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self._outers.append(outer)
        return Started(outer, log)

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        own = {"LASTGASP_RUNTIME_DIR": str(self.folder / "run"), "TMPDIR": str(self.folder / "tmp")}
        found = dict(os.environ) | own | dict(variables)
        if self.clock:
            found["HOST_CLOCK_AHEAD"] = repr(self.clock)
            found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_CLOCK), found.get("PYTHONPATH", "")]))
        return found

    def sees(self, path: Path) -> Path:
        """Where a path of this host is found from outside, while it is on."""
        return Path(f"/proc/{self._pid}/root", *path.parts[1:])

    def own(self, path: Path) -> Path:
        """The directory behind one of the host's own, on or off."""
        return self.folder / f"own-{self._own.index(path)}"

    def processes(self) -> dict[int, str]:
        """The command lines of all that runs here (no defunct ones), by pid as this process sees it."""
        namespace = _namespace(self._pid)
        found = {pid: _arguments(pid) for pid in _pids() if _namespace(pid) == namespace}
        return {pid: line for pid, line in found.items() if line and pid != self._pid}


@contextmanager
def network(folder: Path, *names: str, own: Iterable[Path] = ()) -> Iterator[dict[str, Host]]:
    """Hosts with these names, by name; all are on, and the first has the smallest address.

    Args:
        folder: for what the hosts write. Everything else of this machine's disks is shared by all of them.
        own: directories of which each host has its own; they are made where they are missing.
    """
    paths = [Path(path).absolute() for path in own]
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    addresses = {name: f"{NETWORK}.{n}" for n, name in enumerate(names, start=11)}
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    switch = Switch()
    hosts = {name: Host(switch, folder / "hosts" / name, name, addresses[name], paths) for name in names}
    try:
        for host in hosts.values():
            (host.folder / "hosts").write_text("\n".join(lines) + "\n")
            host.power_on()
        yield hosts
    finally:
        for host in hosts.values():
            host.power_off()
        switch.close()


def _command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _arguments(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
