"""What ranks must know of one another once the controller is gone: by files in the directory that they share.

Without it no periodic checkpoint would be written from then on, however long the job trains.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import xxhash

from lastgasp import _clock
from lastgasp._fs import make_directory, read_bounded, write_atomically
from lastgasp.errors import ControlError, DeadlineExceeded
from lastgasp.topology import Place

from .gathers import GATHER_TIMEOUT
from .meeting import LOOK, prefix_of

LONGEST_PAUSE = 0.5
"""Seconds between two looks at a file that does not come."""
_LONGEST = 1 << 30


class ControllerLost(ControlError):
    """The controller was lost while the ranks agreed on something."""


class ByFiles:
    """An all-gather among the ranks of one attempt, which all call with the same tags.

    The first rank puts the parts together: where each read those of all, a thousand ranks would open a million files.

    Args:
        directory: that all ranks see; place: who this rank is.
        since_s: when the lost controller had started: of another run of the same job nothing is taken.
    """

    def __init__(self, directory: Path, place: Place, since_s: int) -> None:
        name = f"{prefix_of(place.job)}{since_s}-{place.attempt}.{place.incarnation}-gathered"
        self._folder, self._place = directory / name, place
        self._times = Counter[str]()
        self._last: list[Path] = []

    def gather(self, tag: str, own: bytes, seconds: float) -> list[bytes]:
        """Every rank's part.

        Args:
            tag: the same on all ranks; own: this rank's part; seconds: how long to wait for the others.

        Raises:
            DeadlineExceeded: some rank did not come.
            OSError: the files cannot be written or read.
        """
        begin = xxhash.xxh3_64_hexdigest(f"{self._times[tag]} {tag}".encode())
        self._times[tag] += 1
        paths = [self._folder / f"{begin}-{rank}" for rank in range(self._place.world_size)]
        whole, mine = self._folder / f"{begin}-all", paths[self._place.rank]
        deadline = _clock.monotonic() + seconds
        make_directory(self._folder)
        write_atomically(mine, own)
        if self._place.rank == 0:
            parts = [_content(path, tag, deadline, seconds) for path in paths]
            write_atomically(whole, msgspec.msgpack.encode(parts))
        found = msgspec.msgpack.decode(_content(whole, tag, deadline, seconds), type=list[bytes])
        for path in self._last:  # whoever has come here has read that
            path.unlink(missing_ok=True)
        self._last = [mine, whole] if self._place.rank == 0 else [mine]
        return found


def _content(path: Path, tag: str, deadline: float, seconds: float) -> bytes:
    """Of a file, once it is there."""
    pause = LOOK
    while not path.exists():
        if _clock.monotonic() > deadline:
            raise DeadlineExceeded(f"all ranks to agree on {tag!r}", seconds, "Look at the slowest rank.")
        threading.Event().wait(pause)
        pause = min(2 * pause, LONGEST_PAUSE)  # there may be thousands that look
    return read_bounded(path, _LONGEST)


_by_files: WeakKeyDictionary[Any, ByFiles] = WeakKeyDictionary()


def gather_saved(session: Any, tag: str, payload: bytes, seconds: float = GATHER_TIMEOUT) -> list[bytes]:
    """As `Session.gather`, for what a periodic checkpoint needs: that goes on once the controller is gone.

    Raises:
        ControlError, DeadlineExceeded: as there.
    """
    try:
        return list(session.gather(tag, payload, seconds))
    except ControllerLost:
        if session not in _by_files:
            _by_files[session] = ByFiles(session.config.directory, session.place, session.started_s)
        try:
            return _by_files[session].gather(tag, payload, seconds)
        except OSError as error:
            raise ControlError(f"the ranks could not agree on {tag!r} by files: {error}") from error
