"""MindIO's controller in a process of ours, outside the ranks: in rank 0 its end hangs others (mindio_tft.md §16.2).

Rank 0 starts it; it leaves by itself once all ranks have. Besides MindIO's port it has one of its own, on which ranks
that are asked to stop ask for a dump of the healthy job (`tft_notify_controller_dump`): where every rank reported a
fault instead, MindIO would have no holder left.

What it says goes to a file beside MindIO's own logs; to the job's output only until it has started, since whoever
reads that (`job 2>&1 | tee log`) would wait for it.
"""

from __future__ import annotations

import faulthandler
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
from pathlib import Path
from typing import Any, Literal

import msgspec

from lastgasp import _clock
from lastgasp.errors import ControlError
from lastgasp.gasp.serve import kill_session
from lastgasp.gasp.starter import Starter

from .limits import LOG_PATH

log = logging.getLogger("lastgasp.controller")

START_TIMEOUT = 30.0
TRIES = 3
"""Another process may take the free port in between."""
MINDX = "MINDX_TASK_ID"
"""With it in its environment a controller asks TaskD before each step of a recovery, and waits half a minute."""
UNUSED_TIMEOUT = 300.0
"""Seconds that it waits for the first rank, while the process that started it is there."""
LINGER = 5.0
"""Seconds without any rank until it leaves."""
END_LIMIT = 10.0
"""Seconds that destroying it gets; 4 to 5 are usual (docs/facts/mindio_tft.md §2.1)."""
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
    log: str


def start_controller(host: str, world_size: int, arf: bool, zit: bool) -> Endpoint:
    """Start one that outlives this process.

    Raises:
        ControlError: it did not start; with its output.
    """
    said, logs = "", Path(os.environ.get(LOG_PATH, "logs")).absolute()
    for _ in range(TRIES):
        token, port = secrets.token_hex(32), _free_port(host)
        order = _Order(host, port, token, world_size, arf, zit, str(logs / f"lastgasp-controller-{port}.log"))
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != MINDX},
            start_new_session=True,  # signals to the job's process group must not reach it
            text=True,
        )
        try:
            said, _ = process.communicate(msgspec.json.encode(order).decode() + "\n", timeout=START_TIMEOUT)
        except subprocess.TimeoutExpired:
            kill_session(process)
            said = f"nothing in {START_TIMEOUT:g} s"
            continue
        if process.returncode == 0 and said.strip().isdigit():
            log.info("MindIO's controller listens on %s:%d; what it says goes to %s", host, port, order.log)
            return Endpoint(host, port, int(said), token)
    raise ControlError(
        f"MindIO's controller did not start on {host}: {said.strip() or 'see its message above'}. "
        f"Its log is in {logs}; or set LASTGASP_BACKEND=embedded."
    )


def ask_for_dump(endpoint: Endpoint) -> Literal["granted", "refused", "nobody"]:
    """Have the healthy job saved.

    Returns:
        refused: MindIO is in a recovery already. nobody: there is nobody who could be asked.
    """
    answer = _ask(endpoint, "dump")
    return "granted" if answer == b"0" else "refused" if answer else "nobody"


def tell_used(endpoint: Endpoint) -> bool:
    """A rank has joined: from now on it leaves when all have, however short the job was."""
    return _ask(endpoint, "used") == b"0"


def _ask(endpoint: Endpoint, what: str) -> bytes:
    if not endpoint.ask_port:
        return b""
    try:
        with socket.create_connection((endpoint.host, endpoint.ask_port), timeout=ASK_TIMEOUT) as end:
            end.sendall(f"{what} {endpoint.token}\n".encode())
            return end.recv(1)
    except OSError as error:
        log.warning("MindIO's controller could not be reached (%s): %s", what, error)
        return b""


def _free_port(host: str) -> int:
    with _listen(host) as probe:
        return int(probe.getsockname()[1])


def _listen(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


# -- the process -----------------------------------------------------------------------------------


def main() -> None:
    """Read the order, fork into the background, print our own port, serve."""
    order, starter = msgspec.json.decode(sys.stdin.readline(), type=_Order), Starter(os.getppid())
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        said = os.read(reading, 4096).decode()
        sys.stdout.write(said)
        sys.stdout.flush()
        os._exit(0 if said.isdigit() else 1)
    os.close(reading)
    try:
        file = _open_log(order.log)
        api, server = _start(order)
    except BaseException as error:  # SystemExit(2) says nothing by itself
        os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.dup2(file, 2)
    os.write(writing, str(server.getsockname()[1]).encode())
    os.close(writing)
    used = threading.Event()

    def note() -> int:
        used.set()
        return 0

    orders = {"dump": Once(api.tft_notify_controller_dump), "used": note}
    threading.Thread(target=_answer, args=(server, order.token, orders), daemon=True).start()
    serve(api.tft_query_high_availability_switch, used.is_set, starter.gone)
    _end(api)


def _open_log(path: str) -> int:
    """Standard output goes there at once: before it is initialised, MindIO writes its messages there."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    os.dup2(file, 1)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    faulthandler.enable()
    return file


class Once:
    """An order that is granted once, and from then on was: a rank that asks later must not take it for refused."""

    def __init__(self, order: Callable[[], int]) -> None:
        self._order, self._granted = order, False

    def __call__(self) -> int:
        """0: granted."""
        if not self._granted:
            self._granted = self._order() == 0
        return 0 if self._granted else 1


def _start(order: _Order) -> tuple[Any, socket.socket]:
    api: Any = importlib.import_module("mindio_ttp.controller_ttp")
    server = _listen(order.host)
    # Rank -1: outside the training processes; no local copy, no TLS, as TaskD does it (mindio_tft.md §4).
    api.tft_init_controller(-1, order.world_size, False, order.arf, order.zit)
    api.tft_start_controller(order.host, order.port, False, "")
    return api, server


def serve(connected: Callable[[], bool], used: Callable[[], bool], deserted: Callable[[], bool]) -> None:
    """Return once the last rank has been gone for a while, or none has come.

    Args:
        deserted: the process that started it is gone, so that no rank will come if none has.
    """
    since, ever, pause = _clock.monotonic(), False, threading.Event()
    while True:
        pause.wait(_PERIOD)
        if connected() or (used() and not ever):
            since, ever = _clock.monotonic(), True
        elif _clock.monotonic() - since > (LINGER if ever or deserted() else UNUSED_TIMEOUT):
            return


def _answer(server: socket.socket, token: str, orders: dict[str, Callable[[], int]]) -> None:
    while True:
        end, _ = server.accept()
        with end:
            try:
                end.settimeout(ASK_TIMEOUT)
                what, _, proof = end.makefile("rb").readline(256).decode(errors="replace").strip().partition(" ")
                if hmac.compare_digest(proof.encode(), token.encode()) and what in orders:
                    answer = orders[what]()
                    log.info("a rank says %s: answered %d", what, answer)
                    end.sendall(str(answer).encode()[:1])
            except OSError as error:
                log.debug("a request broke off: %s", error)
            except Exception:  # MindIO's; the next one must be answered
                log.exception("MindIO's controller could not carry out a request")


def _end(api: Any) -> None:
    """Destroying takes seconds, and need not return."""
    log.info("no rank is left")
    ending = threading.Thread(target=api.tft_destroy_controller, daemon=True)
    ending.start()
    ending.join(END_LIMIT)
    os._exit(0)
