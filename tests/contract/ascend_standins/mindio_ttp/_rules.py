"""What the stand-in's halves share: times, strict types, the trace, violations, messages over a socket."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from typing import Any, NoReturn

SCALE = float(os.environ.get("MINDIO_STANDIN_SCALE", "1"))
EXIT_WAIT = float(os.environ.get("MINDIO_STANDIN_EXIT_WAIT", "10"))
PATIENCE = 120.0
"""Seconds for what the real one waits 30 for: not scaled, as no test waits for its end, and a machine may be busy."""
LEAST_MINDX = 30.0
"""Seconds for an answer of MindX's, scaled or not: it is another process on a busy machine."""
MINDSPORE = os.environ.get("MINDIO_FOR_MINDSPORE", "False").lower() in ("true", "1")
_lock = threading.Lock()
rank: int | None = None


def seconds(real: float) -> float:
    """Scaled."""
    return real * SCALE


def can_run(pid: int) -> bool:
    """The process has neither ended nor been stopped, whether it gets a core or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZXxTt"
    except OSError:
        return False


def number(name: str, default: int, least: int, most: int) -> int:
    """An environment variable; out of range falls back silently (§4)."""
    text = os.environ.get(name, "")
    value = int(text) if text.isdigit() else default
    return value if least <= value <= most else default


def _append(variable: str, line: str) -> None:
    path = os.environ.get(variable)
    if path:
        with _lock:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(descriptor, line.encode() + b"\n")
            os.close(descriptor)


def trace(event: str, **more: Any) -> None:
    """Note what happened, on which thread."""
    main = threading.current_thread() is threading.main_thread()
    thread = "main" if main else type(threading.current_thread()).__name__
    _append(
        "MINDIO_STANDIN_TRACE", json.dumps({"event": event, "rank": rank, "thread": thread, "pid": os.getpid(), **more})
    )


def violation(text: str) -> None:
    """The caller broke the contract: the test must fail, whatever else happens."""
    where = "".join(traceback.format_stack(limit=6)[:-2])
    _append("MINDIO_STANDIN_VIOLATIONS", f"rank {rank}: {text}\n{where}")


def refuse(text: str, kind: type[BaseException] = Exception) -> NoReturn:
    """Raise as the real one would, and have it on record."""
    violation(text)
    raise kind(text)


def wrap_exit(text: str) -> NoReturn:
    """Bad start parameters do not raise: the process sleeps and ends with 2 (§2.2)."""
    violation(text)
    time.sleep(EXIT_WAIT)
    os._exit(2)


def strict(name: str, value: object, kind: type) -> None:
    """SWIG's types: bool refuses int; int refuses float, numpy's integers and Enum members (§1)."""
    wrong = type(value) is not bool if kind is bool else type(value) not in ((int, bool) if kind is int else (kind,))
    if wrong:
        refuse(f"{name}={value!r} is a {type(value).__name__}, not a {kind.__name__}", TypeError)


def zero_ip(ip: str) -> bool:
    """All-zero addresses are refused."""
    return ip in ("0.0.0.0", "::")


class Wire:
    """JSON lines over a socket; `send` from any thread."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end, self._lock, self._file = end, threading.Lock(), end.makefile("rb")

    def send(self, **message: Any) -> bool:
        """False where the other side is gone."""
        try:
            with self._lock:
                self._end.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """The next one; None at the end."""
        try:
            line = self._file.readline()
        except (OSError, ValueError):
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """Idempotent."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._end.close()
