"""The marks of one rank with everything that they need: ring, flusher, files, limit, switch."""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lastgasp import _clock

from . import bits
from .ageing import Ageing, file_max
from .drain import Drain
from .flusher import PERIOD_S, Flusher
from .groups import GROUPS_FILE, groups_text
from .marks import Marks
from .rankfiles import RankFiles
from .settings import DEFAULT_LIMIT_MB
from .switchfile import SwitchFile

log = logging.getLogger("lastgasp.steps")

ABOUT_FILE = "lastgasp.json"
ABOUT_VERSION = 1
CLOSE_TIMEOUT_S = 5.0
DeviceRows = Literal["host", "events"]


@dataclass(frozen=True, kw_only=True)
class RecorderOptions:
    """What one rank's recorder is to do.

    Attributes:
        rank, world_size: of this process in its job.
        base, task: the rows go to `<base>/<task>/<rank>` (`places`).
        mask: the marks that are on at the start (`bits`).
        limit_mb: of everything under `base`, MB (`ageing`).
        framework: for readers, such as "lightning 2.6".
        switch_path: the switch file; None takes `switchfile.switch_path()`.
        device: number of this rank's device on its host.
        period: seconds between two flushes.
    """

    rank: int
    world_size: int
    base: Path
    task: str
    mask: int = bits.DEFAULT_ON
    limit_mb: int = DEFAULT_LIMIT_MB
    framework: str = ""
    switch_path: Path | None = None
    device: int = 0
    period: float = PERIOD_S

    @property
    def directory(self) -> Path:
        """The rank's."""
        return self.base / self.task / str(self.rank)


class StepRecorder:
    """The marks of this rank, from `open` to `close`; as a context manager it closes itself.

    Once open it never raises into training and never waits for a disk: a directory that cannot be
    written is one warning. An interpreter that ends without `close` flushes automatically.

    Attributes:
        marks: the marks that training uses.
        directory: where the rows go.
    """

    def __init__(self, options: RecorderOptions, marks: Marks) -> None:
        self.marks, self.directory = marks, options.directory
        self._options, self._pid, self._closed = options, os.getpid(), False
        self._device_rows: DeviceRows = "host"
        self._files = RankFiles(options.directory, file_max=file_max(options.limit_mb))
        self._flusher = Flusher(
            marks,
            self._files,
            drain=Drain(marks, self._files, options.device),
            ageing=Ageing(options.base, options.rank, options.limit_mb),
            poll=SwitchFile(options.switch_path, options.mask).poll,
            period=options.period,
        )
        self._about()
        self._flusher.start()
        _open.add(self)

    @classmethod
    def open(cls, options: RecorderOptions) -> StepRecorder:
        """Begin.

        Raises:
            ConfigError: a mask that is not a set of bits, or a directory that is longer than a path can be.
        """
        marks = Marks.open(
            rank=options.rank,
            world_size=options.world_size,
            mask=options.mask,
            directory=str(options.directory),
            device=options.device,
        )
        return cls(options, marks)

    def set_groups(self, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Tell the process groups, for parallel_group.json; see `groups.groups_text`.

        Raises:
            KeyError: an entry lacks a field.
        """
        self._files.beside(GROUPS_FILE, groups_text(groups))

    def set_device_rows(self, source: DeviceRows) -> None:
        """Tell readers where the times of the device rows come from: the host's clock, or the device's events."""
        if source != self._device_rows:
            self._device_rows = source
            self._about()

    def flush(self, timeout: float) -> bool:
        """Write what was marked so far to disk; from any thread.

        Args:
            timeout: seconds, even if the disk hangs.

        Returns:
            True when it is there.
        """
        return not self._closed and self._flusher.flush(timeout)

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> bool:
        """Flush once more and switch the marks off for good. What the disk refuses is left to the recovery. Idempotent.

        Args:
            timeout: seconds, even if the disk hangs.

        Returns:
            True when everything is on disk.
        """
        if self._closed or os.getpid() != self._pid:
            return False
        self._closed = True
        _open.discard(self)
        self.marks.mask = 0
        written = self._flusher.stop(timeout)
        if not written:
            log.warning(
                "the last step marks of rank %d are not on disk (%s): they stay in %s for the launcher, or the next "
                "start, to write them", self._options.rank, self.directory, self.marks.path,
            )  # fmt: skip
        if not self._flusher.running:
            self.marks.close(remove=written)
        # Otherwise its write hangs and may still complete: keep the ring, or its rows would be written twice.
        return written

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _about(self) -> None:
        options = self._options
        about = {
            "version": ABOUT_VERSION,
            "rank": options.rank,
            "world_size": options.world_size,
            "host": socket.gethostname(),
            "pid": self._pid,
            "device_rows": self._device_rows,
            "framework": options.framework,
            "bits": bits.describe(options.mask),
        }
        self._files.beside(ABOUT_FILE, json.dumps(about).encode() + b"\n")


_open: set[StepRecorder] = set()


def open_here() -> list[StepRecorder]:
    """The recorders of this process that are open."""
    return list(_open)


def flush_all(timeout: float = CLOSE_TIMEOUT_S) -> bool:
    """Flush every open recorder of this process; before `os._exit`, which runs nothing else.

    Args:
        timeout: seconds for all of them.

    Returns:
        True when everything is on disk.
    """
    deadline = _clock.monotonic() + timeout
    written = [recorder.flush(max(deadline - _clock.monotonic(), 0.0)) for recorder in list(_open)]
    return all(written)


def _close_all() -> None:
    for recorder in list(_open):
        recorder.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_open.clear)
