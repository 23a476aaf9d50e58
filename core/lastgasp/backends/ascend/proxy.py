"""TaskD's proxy of a pod, in a separate process, if no agent of TaskD's starts one (docs/facts/taskd.md §1, §3).

`lastgasp run` starts it beside the workers, which register through it. Without it they never do.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping

from lastgasp import _clock
from lastgasp.errors import ControlError, LastgaspError

from .evidence import MANAGER_PORT, PROXY_PORT
from .logdir import prepare_log_directory
from .taskd import import_taskd

log = logging.getLogger("lastgasp")

RESOLVED_WITHIN = 300.0
"""Seconds for the first pod's name to become resolvable: pods do not start simultaneously."""
LOOK = 1.0
"""Seconds between two looks."""
_HOSTS = ("MS_SCHED_HOST", "MASTER_ADDR")
_RANKS = ("MS_NODE_RANK", "RANK")
_LOOPBACK = "127.0.0.1"


def proxy_config(env: Mapping[str, str], limit: float = RESOLVED_WITHIN) -> dict[str, str]:
    """Build the configuration of `init_taskd_proxy` from a pod's environment. A host name is resolved.

    Args:
        limit: seconds that a name may take to be known.

    Raises:
        ControlError: the name could not be resolved in that time.
    """
    host = next((name for name in _HOSTS if env.get(name)), "")
    return {
        "UpstreamAddr": _address(host, env[host], limit) if host else _LOOPBACK,
        "UpstreamPort": str(MANAGER_PORT),
        "ListenAddr": _LOOPBACK,
        "ListenPort": str(PROXY_PORT),
        "ServerRank": next((env[name] for name in _RANKS if env.get(name)), "0"),
    }


def _address(variable: str, host: str, limit: float) -> str:
    deadline = _clock.monotonic() + limit
    while True:
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            pass
        try:
            return str(socket.getaddrinfo(host, MANAGER_PORT, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if _clock.monotonic() >= deadline:
                raise ControlError(
                    f"TaskD's proxy takes addresses, and {variable}={host} has none ({error}): set it to the POD_IP "
                    "of the first pod"
                ) from error
        threading.Event().wait(LOOK)


def run_proxy(config: Mapping[str, str], needed: Callable[[], bool], period: float = LOOK) -> None:
    """Serve as long as it is needed.

    Args:
        needed: asked again and again; False ends it.

    Raises:
        ConfigError: TaskD's log directory cannot be used.
        ControlError: TaskD cannot be imported, or refused.
    """
    prepare_log_directory(os.environ)
    api, over, done = import_taskd(), threading.Event(), []

    def begin() -> None:
        try:
            done.append(api.init_taskd_proxy(dict(config)))  # blocks until the manager answers
        finally:
            over.set()

    threading.Thread(target=begin, name="lastgasp-taskd-proxy", daemon=True).start()
    while needed():
        if over.wait(period) and done != [True]:
            raise ControlError(f"TaskD's proxy refused {config}; its log says why. Is port {PROXY_PORT} taken?")
        if over.is_set():
            threading.Event().wait(period)
    if over.is_set():
        api.destroy_taskd_proxy()


def main() -> int:
    """Serve until the launcher that started this process has ended; return the exit code."""
    logging.basicConfig(format="lastgasp: %(message)s", level=logging.INFO)
    launcher = os.getppid()
    try:
        run_proxy(proxy_config(os.environ), lambda: os.getppid() == launcher)
    except LastgaspError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
