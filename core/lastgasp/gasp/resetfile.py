"""reset.json: by `"GracefulExit": 1` in it MindCluster asks a job to save and exit (docs/facts/taskd.md §8)."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from lastgasp import _clock

log = logging.getLogger("lastgasp")

DEFAULT_PATH = Path("/user/restore/reset/config/reset.json")
"""Where the job's volume mounts it (docs/facts/job_yaml.md §6)."""
VARIABLE = "LASTGASP_RESET_FILE"
"""Environment variable that names another file."""
PERIOD = 1.0
"""Seconds between two checks, as in TaskD (docs/facts/taskd.md §8)."""
SIZE_LIMIT = 1 << 20
"""Greatest size in bytes of a file that is read."""


class _Reset(msgspec.Struct, frozen=True, rename="pascal"):
    """The two fields used here; the others are for TaskD."""

    graceful_exit: int = 0
    update_time: int = 0


_DECODER = msgspec.json.Decoder(_Reset, strict=False)


def reset_path() -> Path:
    """Return the file to check: the one named by `LASTGASP_RESET_FILE`, else MindCluster's."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser().absolute() if named else DEFAULT_PATH


class ResetFile:
    """Checks the file on request. Never raises, and waits for nothing but the file system.

    A request that exists at this process's first check belongs to the run before, unless its `UpdateTime` (unix
    seconds) is later than the start. A request that appears between two checks always counts.

    Args:
        path: the file; None takes `reset_path()`.
        started_s: the start, in unix seconds, from which requests count; None takes the current time.
    """

    def __init__(self, path: Path | None = None, started_s: int | None = None) -> None:
        self.path = reset_path() if path is None else path
        self._started = _clock.wall_ns() // 1_000_000_000 if started_s is None else started_s
        self._asked_before: bool | None = None
        self._problem = ""

    def poll(self) -> bool:
        """Return True, once, when the job is asked to exit."""
        found = self._read()
        if found is None:
            return False
        asked, before = found.graceful_exit == 1, self._asked_before
        self._asked_before = asked
        if not asked or before:
            return False
        if before is None and found.update_time < self._started:
            log.info("%s asks for a graceful exit since before this start: that was for the run before", self.path)
            return False
        return True

    def _read(self) -> _Reset | None:
        """The file's content; None without a request."""
        try:
            data = _content(self.path)
        except (FileNotFoundError, NotADirectoryError):
            if self._asked_before is None:
                self._asked_before = False  # it did not exist: what appears later is meant for this run
            return None
        except OSError as error:
            self._warn(f"it cannot be read ({error.strerror})")
            return None
        try:
            return _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._warn(f"it is not what MindCluster writes ({error})")
            return None

    def _warn(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.warning("reset file %s: %s; it asks for nothing until it can be read", self.path, problem)


def _content(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "not a regular file")
        data = os.read(fd, SIZE_LIMIT + 1)
    finally:
        os.close(fd)
    if len(data) > SIZE_LIMIT:
        raise OSError(0, f"longer than {SIZE_LIMIT} bytes")
    return data


class ResetWatch:
    """Checks every second, in a thread of its own, until the job is asked to exit or `close` is called.

    Args:
        act: called once, in that thread, when the job is asked to exit.
        file: what to check.
        period: seconds between two checks.
        when: whether to check at all; a job that does not use lastgasp is left alone.
    """

    def __init__(
        self,
        act: Callable[[], object],
        file: ResetFile | None = None,
        period: float = PERIOD,
        when: Callable[[], bool] = lambda: True,
    ) -> None:
        self._act, self._file, self._period, self._when = act, file or ResetFile(), period, when
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lastgasp-reset-file", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not (self._when() and self._file.poll()):
            if self._ended.wait(self._period):
                return
        log.warning("%s asks for a graceful exit: the job saves its step and leaves", self._file.path)
        self._act()

    def close(self) -> None:
        """Stop checking. Idempotent; does not wait for a check that hangs in a dead file system."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self._period)
