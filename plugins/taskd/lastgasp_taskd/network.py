"""What TaskD's proxy and agent take as addresses. There is no network of TaskD's here; what is wrong stays wrong."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping

from .said import once, refused

ADDRESSES, PORTS = ("UpstreamAddr", "ListenAddr"), ("UpstreamPort", "ListenPort")


def server_rank(config: Mapping[str, object]) -> str:
    """Whose agent or proxy it is."""
    given = config.get("ServerRank") or os.environ.get("RANK") or os.environ.get("MS_NODE_RANK") or "0"
    return str(given)


def is_right(call: str, config: object) -> bool:
    """Whether the real one would take it; if not, the reason is logged."""
    if not isinstance(config, dict):
        return refused(f"{call}: config is {config!r}, not a dict")
    for name in ADDRESSES:
        try:
            ipaddress.ip_address(config.get(name, "127.0.0.1"))
        except ValueError:
            return refused(f"{call}: {name}={config[name]!r} is not an address (TaskD takes no host names)")
    for name in PORTS:
        port = config.get(name, "9601")
        if not isinstance(port, str) or not port.isdigit() or not 0 < int(port) < 65536:
            return refused(f"{call}: {name}={port!r} is not the text of a port")
    if not server_rank(config).isdigit():
        return refused(f"{call}: ServerRank={server_rank(config)!r} is not the text of a number")
    return True


def init_proxy(config: object) -> bool:
    """`init_taskd_proxy`: True at once. Workers talk to lastgasp's controller, which needs no proxy."""
    if not is_right("init_taskd_proxy", config):
        return False
    once("TaskD's proxy has nothing to do here: workers reach lastgasp's controller by themselves")
    return True


def destroy_proxy() -> bool:
    """`destroy_taskd_proxy`."""
    return True
