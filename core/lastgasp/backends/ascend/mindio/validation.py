"""What is checked before calls of MindIO that end the process instead of raising (docs/facts/mindio_tft.md §2)."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from dataclasses import dataclass

from lastgasp import _clock
from lastgasp.errors import ConfigError, DeadlineExceeded

MOST_RANKS = 100_000
PORTS = (1024, 65535)


@dataclass(frozen=True)
class Address:
    """Where MindIO's controller listens; plain values of the very types that its binding takes."""

    host: str
    port: int


def address_of(text: str, field: str) -> Address:
    """host:port, checked.

    Raises:
        ConfigError: no such thing; an address of zeros, which MindIO refuses; a port out of its range.
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit() or not PORTS[0] <= int(port) <= PORTS[1]:
        raise ConfigError(field, text, f"host:port with a port from {PORTS[0]} to {PORTS[1]}", "Fix the port.")
    return Address(checked_host(host, field), int(port))


def checked_host(host: str, field: str) -> str:
    """The host itself.

    Raises:
        ConfigError: zeros, or a name that nobody knows.
    """
    try:
        if not ipaddress.ip_address(host).is_unspecified:
            return host
        allowed = "an address that other ranks can reach, not one of zeros"
    except ValueError:
        try:
            socket.getaddrinfo(host or "\0", None)
            return host
        except (OSError, UnicodeError, ValueError):
            allowed = "an IP address or a host name that resolves"
    raise ConfigError(field, host, allowed, "Set LASTGASP_BIND to node 0's address on the training network.")


def wait_for_listener(address: Address, seconds: float) -> None:
    """Return once somebody listens there: `tft_start_processor` ends the process otherwise (mindio_tft.md §2.2).

    Raises:
        DeadlineExceeded: nobody does in time.
    """
    deadline = _clock.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address.host, address.port), timeout=min(5.0, seconds)).close()
            return
        except OSError as error:
            if _clock.monotonic() > deadline:
                what = f"MindIO's controller at {address.host}:{address.port} ({error})"
                remedy = f"Does TaskD run with TTP_PORT={address.port} and POD_IP, and does a firewall stand between?"
                raise DeadlineExceeded(what, seconds, remedy) from error
            threading.Event().wait(0.1)


def check_size(rank: int, world_size: int) -> None:
    """Refuse what `tft_init_processor` would answer with the end of the process.

    Raises:
        ConfigError: more ranks than MindIO takes.
    """
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size <= MOST_RANKS:
        allowed = f"plain integers, 0 <= rank < world_size <= {MOST_RANKS}"
        raise ConfigError("rank, world_size", (rank, world_size), allowed, "Set LASTGASP_BACKEND=embedded.")


def check_thread() -> None:
    """Refuse what `tft_init_processor` would answer with a ValueError about signals, which it takes over.

    Raises:
        ConfigError: this is not the main thread.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise ConfigError("thread", thread.name, "the main thread, as MindIO wants it", "Begin training there.")


def taskd_address(mindspore: bool, first: bool = True) -> tuple[str, str]:
    """Where TaskD's controller listens, and which variables say so.

    It binds POD_IP of the first pod. MASTER_ADDR of a worker there is what its launcher took, which may be localhost;
    with MindSpore the scheduler's pod has it, which need not be rank 0's.

    Args:
        first: as seen from the first pod; in the others POD_IP is their own.
    """
    env = os.environ
    own = ("MS_SCHED_HOST", "POD_IP") if mindspore else ("POD_IP", "MASTER_ADDR") if first else ("MASTER_ADDR",)
    hosts = ("PROCESSOR_ADDR", "CONTROLLER_ADDR", "TTP_ADDR", "MS_TFT_IP", *own)
    field = next((name for name in hosts if env.get(name)), own[0])
    port = env.get("TTP_PORT") or env.get("MS_TFT_PORT") or "8000"
    return f"{checked_host(env.get(field, ''), field)}:{port}", f"{field}, TTP_PORT"
