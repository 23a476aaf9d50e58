"""Traps of ports and clocks."""

from __future__ import annotations

from collections.abc import Iterator

from .checks import Match, check
from .machine import Machine
from .mindcluster import ttp_port

TASKD_PORTS = (9601, 9602)
"""Manager and proxy; fixed in TaskD's code."""
MASTER_PORT = 29500
SKEW_S = 1.0
"""Seconds that clocks may differ before records and reports of several hosts mislead."""
_IF_NOT_OURS = "If it is not this very job: "


@check("taskd-ports", "error", "taskd.md §3", "A port of TaskD's is taken")
def taskd_ports(machine: Machine) -> Iterator[Match]:
    """With hostNetwork two jobs on a node collide."""
    for port in TASKD_PORTS:
        if machine.in_mindcluster and machine.is_listening(port):
            fix = f"{_IF_NOT_OURS}put only one job with hostNetwork on a node."
            yield Match(f"port {port}, which TaskD always takes, is taken", fix)


@check("ttp-port", "error", "mindio_tft.md §2.1", "MindIO's port is taken")
def ttp_port_taken(machine: Machine) -> Iterator[Match]:
    """The controller ends its process with SystemExit(2)."""
    port = ttp_port(machine)
    if port is not None and machine.is_listening(port):
        yield Match(f"TTP_PORT {port} is taken", f"{_IF_NOT_OURS}choose another one in the job YAML, for all replicas.")


@check("master-port", "warning", "torchrun.md", "The rendezvous port is taken")
def master_port(machine: Machine) -> Iterator[Match]:
    """torchrun's default, or what MASTER_PORT says."""
    text = machine.env.get("MASTER_PORT", "")
    port = int(text) if text.isdecimal() and len(text) < 6 else MASTER_PORT
    if machine.is_listening(port):
        fix = f"{_IF_NOT_OURS}set another MASTER_PORT; lastgasp run takes a free one for a job on one node."
        yield Match(f"port {port} ({'MASTER_PORT' if text else 'the default of torchrun'}) is taken", fix)


@check("ports-ephemeral", "warning", "job_yaml.md §5", "The kernel may give a fixed port to another process")
def ports_ephemeral(machine: Machine) -> Iterator[Match]:
    """Outgoing connections take any port of the range that is not reserved."""
    if not machine.in_mindcluster:
        return
    low, high = _range(machine)
    wanted = {*TASKD_PORTS, *([port] if (port := ttp_port(machine)) is not None else [])}
    open_to_all = sorted(port for port in wanted if low <= port <= high and port not in _reserved(machine))
    if open_to_all:
        ports = ",".join(map(str, open_to_all))
        what = f"outgoing connections may take {ports}: net.ipv4.ip_local_port_range is {low} to {high}"
        yield Match(what, f"sysctl -w net.ipv4.ip_local_reserved_ports={ports}")


def _range(machine: Machine) -> tuple[int, int]:
    try:
        low, high = machine.at("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 32768, 60999
    return int(low), int(high)


def _reserved(machine: Machine) -> set[int]:
    try:
        text = machine.at("/proc/sys/net/ipv4/ip_local_reserved_ports").read_text().strip()
    except OSError:
        return set()
    ends = [(part.split("-")[0], part.split("-")[-1]) for part in text.split(",") if part]
    return {port for low, high in ends for port in range(int(low), int(high) + 1)}


@check("clock-skew", "warning", "taskd.md §6", "The file system's clock differs from this host's")
def clock_skew(machine: Machine) -> Iterator[Match]:
    """Another host's clock, seen through a file's time stamp."""
    offset = machine.storage.clock_offset_s if machine.storage is not None else None
    if offset is not None and abs(offset) > SKEW_S:
        side = "ahead of" if offset > 0 else "behind"
        what = f"the clock of {machine.directory}'s file server is {abs(offset):.1f} s {side} this host's"
        yield Match(
            what, "Synchronise both (chrony or PTP): reports over several hosts mislead, and old files look new."
        )


@check("clock-free", "warning", "taskd.md §6", "This host's clock is not synchronised")
def clock_free(machine: Machine) -> Iterator[Match]:
    """The kernel knows whether a daemon steers it."""
    if machine.clock_in_step is False:
        what = "the kernel says that this clock is not synchronised: marks of several hosts cannot be compared"
        yield Match(what, "Start chrony, ntpd or PTP on the host; with one host it does not matter.")
