"""Run an entire job with a hard time limit, and leave no process of it behind.

The workers of a launcher are session leaders and may outlive it, so a process group does not hold them:
the processes of a job inherit an environment variable by which they are found in /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lastgasp import _clock

MARK = "LASTGASP_JOB_MARK"
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # looked up before any fork


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a job ended.

    Attributes:
        returncode: of its first process; None when it was killed at the time limit.
        seconds: how long that took.
        output: what all of its processes wrote.
        left: processes that still existed a moment after it ended, and were killed.
    """

    returncode: int | None
    seconds: float
    output: str
    left: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it succeeded and left no process."""
        return self.returncode == 0 and not self.left


def run_job(
    command: Sequence[str],
    log: Path,
    *,
    timeout: float,
    environ: Mapping[str, str] | None = None,
    grace: float = 30.0,
) -> Finished:
    """Run `command` to its end, or to `timeout`; afterwards no process of it is left.

    Where this process is killed meanwhile, `command` gets SIGTERM, and so has its time to end what it has started.

    Args:
        command: program and arguments.
        log: where its output goes; overwritten.
        timeout: seconds for all of it.
        environ: its environment; default: this process's.
        grace: seconds that its child processes may take to end after it.

    Raises:
        OSError: the program or the log cannot be opened.
    """
    mark, begun = uuid.uuid4().hex, _clock.monotonic()
    environ = {**(os.environ if environ is None else environ), MARK: mark}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=ends_with_its_parent
        )
        try:
            returncode = _wait(process, timeout)
            seconds = _clock.monotonic() - begun
            left = _settled(mark, grace) if returncode is not None else ()
        finally:
            kill_marked(MARK, mark)
            process.wait()
    return Finished(returncode=returncode, seconds=seconds, output=log.read_text(errors="replace"), left=left)


def marked(name: str, value: str) -> Iterator[tuple[int, str]]:
    """Processes other than this one with `name=value` in their environment: pid and command line."""
    needle = f"{name}={value}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and needle in read_proc(entry, "environ").split(b"\0"):
            yield int(entry), command_line(entry)


def command_line(pid: str) -> str:
    """A process's command line; `(defunct)` for one that has ended."""
    return read_proc(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip() or "(defunct)"


def read_proc(pid: str, name: str) -> bytes:
    """/proc/PID/NAME; empty if the process is gone or may not be inspected."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def kill_marked(name: str, value: str) -> None:
    """SIGKILL them until none is left: one may start another meanwhile. Takes 5 s at most."""
    deadline = _clock.monotonic() + 5.0
    while (found := list(marked(name, value))) and _clock.monotonic() < deadline:
        for pid, _ in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def ends_with_its_parent() -> None:
    """For `subprocess.Popen(preexec_fn=)`: this process gets SIGTERM when the one that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None


def _settled(mark: str, grace: float) -> tuple[str, ...]:
    deadline = _clock.monotonic() + grace
    while left := tuple(f"{pid} {command}" for pid, command in marked(MARK, mark)):
        if _clock.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left
