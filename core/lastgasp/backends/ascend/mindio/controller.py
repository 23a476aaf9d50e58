"""MindIO's controller in a process of ours, outside the ranks: in rank 0 its end would hang all others (facts §16.2).

Rank 0 starts it; it leaves by itself once all ranks have. Besides MindIO's port it has one of its own, on which ranks
that are told to stop ask for a dump of the healthy job (`tft_notify_controller_dump`): where every rank reported a
fault instead, MindIO would have no holder left.
"""

from __future__ import annotations

import hmac
import importlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from lastgasp import _clock
from lastgasp.errors import ControlError

log = logging.getLogger("lastgasp.controller")

START_TIMEOUT = 30.0
TRIES = 3
"""Another process may take the free port in between."""
UNUSED_TIMEOUT = 300.0
LINGER = 5.0
"""Seconds without any rank until it leaves."""
ASK_TIMEOUT = 10.0
_PERIOD = 0.2


class Endpoint(msgspec.Struct, frozen=True):
    """How ranks reach it: MindIO's port, our own, and the secret that the latter asks for."""

    host: str
    port: int
    ask_port: int = 0
    token: str = ""


class _Order(msgspec.Struct, frozen=True):
    host: str
    port: int
    token: str
    world_size: int
    arf: bool
    zit: bool


def start_controller(host: str, world_size: int, arf: bool, zit: bool) -> Endpoint:
    """Start one that outlives this process.

    Raises:
        ControlError: it did not come up; carries what it said.
    """
    said = ""
    for _ in range(TRIES):
        token = secrets.token_hex(32)
        order = _Order(host, _free_port(host), token, world_size, arf, zit)
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # signals to the job's process group must not reach it
            text=True,
        )
        try:
            said, _ = process.communicate(msgspec.json.encode(order).decode() + "\n", timeout=START_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            said = f"nothing in {START_TIMEOUT:g} s"
            continue
        if process.returncode == 0 and said.strip().isdigit():
            return Endpoint(host, order.port, int(said), token)
    raise ControlError(
        f"MindIO's controller did not start on {host}: {said.strip() or 'see its message above'}. "
        "Its log is in TTP_LOG_PATH; or set LASTGASP_BACKEND=embedded."
    )


def ask_for_dump(endpoint: Endpoint) -> bool:
    """Have the healthy job saved; False where nobody could be asked, or MindIO would not."""
    return _ask(endpoint, "dump")


def tell_used(endpoint: Endpoint) -> bool:
    """A rank has joined: from now on it leaves when all have, however short the job was."""
    return _ask(endpoint, "used")


def _ask(endpoint: Endpoint, what: str) -> bool:
    if not endpoint.ask_port:
        return False
    try:
        with socket.create_connection((endpoint.host, endpoint.ask_port), timeout=ASK_TIMEOUT) as end:
            end.sendall(f"{what} {endpoint.token}\n".encode())
            return end.recv(1) == b"0"
    except OSError as error:
        log.warning("MindIO's controller could not be reached (%s): %s", what, error)
        return False


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


# -- the process -----------------------------------------------------------------------------------


def main() -> None:
    """Read the order, fork into the background, print our own port, serve."""
    order = msgspec.json.decode(sys.stdin.readline(), type=_Order)
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        said = os.read(reading, 4096).decode()
        sys.stdout.write(said)
        sys.stdout.flush()
        os._exit(0 if said.isdigit() else 1)
    os.close(reading)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        api, server = _start(order)
    except BaseException as error:  # SystemExit(2) says nothing by itself
        os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.write(writing, str(server.getsockname()[1]).encode())
    os.close(writing)
    used = threading.Event()

    def note() -> int:
        used.set()
        return 0

    orders = {"dump": api.tft_notify_controller_dump, "used": note}
    threading.Thread(target=_answer, args=(server, order.token, orders), daemon=True).start()
    serve(api.tft_query_high_availability_switch, used.is_set)
    _end(api)


def _start(order: _Order) -> tuple[Any, socket.socket]:
    api: Any = importlib.import_module("mindio_ttp.controller_ttp")
    server = socket.create_server((order.host, 0))
    # Rank -1: outside the training processes; no local copy, no TLS, as TaskD does it (facts §4).
    api.tft_init_controller(-1, order.world_size, False, order.arf, order.zit)
    api.tft_start_controller(order.host, order.port, False, "")
    return api, server


def serve(connected: Callable[[], bool], used: Callable[[], bool]) -> None:
    """Return once the last rank has been gone for a while, or none has come."""
    since, ever, pause = _clock.monotonic(), False, threading.Event()
    while True:
        pause.wait(_PERIOD)
        if connected() or (used() and not ever):
            since, ever = _clock.monotonic(), True
        elif _clock.monotonic() - since > (LINGER if ever else UNUSED_TIMEOUT):
            return


def _answer(server: socket.socket, token: str, orders: dict[str, Callable[[], int]]) -> None:
    while True:
        end, _ = server.accept()
        with end:
            try:
                end.settimeout(ASK_TIMEOUT)
                what, _, proof = end.makefile("rb").readline(256).decode(errors="replace").strip().partition(" ")
                if hmac.compare_digest(proof.encode(), token.encode()) and what in orders:
                    end.sendall(str(orders[what]()).encode()[:1])
            except OSError as error:
                log.debug("a request broke off: %s", error)
            except Exception:  # MindIO's; the next one must be answered
                log.exception("MindIO's controller could not carry out a request")


def _end(api: Any) -> None:
    """Destroying takes seconds, and need not return."""
    threading.Thread(target=api.tft_destroy_controller, daemon=True).start()
    threading.Event().wait(LINGER)
    os._exit(0)
