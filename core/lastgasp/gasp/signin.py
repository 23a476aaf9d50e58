"""How a host's launcher knows its own ranks without asking the controller: they sign in, and report how they ended.

The launcher holds a file in memory, and the ranks append lines to it through /proc/PID/fd. It disappears with the
launcher, needs no disk or network, and stays empty if the ranks do not use lastgasp.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Iterator

import msgspec

from lastgasp.memory_file import memory_file

log = logging.getLogger("lastgasp")

VARIABLE = "LASTGASP_SIGN_IN"
_LIMIT = 1 << 20
"""Most bytes that are read at once; a line has a few hundred, and a rank writes three in each of its trainings."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line; the last one of a rank counts.

    Attributes:
        hold: seconds that this rank may need to save and exit.
        left: its training has ended well; ended: so has the script, well or not, and the process is about to.
        ending: how its last recovery ended, empty before the first (`events.Ending`).
        step: the step that this recovery has saved, or found on disk; -1 if there is none.
        directory: of its checkpoints.
    """

    rank: int
    pid: int
    hold: float
    directory: str
    left: bool = False
    ending: str = ""
    step: int = -1
    ended: bool = False


_YIELD = 0.02
"""Seconds, at the script's end, in which threads that wait for the GIL get it; they need microseconds."""

_last: list[Entry] = []
_told: list[bool] = []


def last_here() -> Entry | None:
    """The last line of this process; None if it is no rank that an adapter protects, or has not begun."""
    return _last[-1] if _last and _last[-1].pid == os.getpid() else None


def sign(entry: Entry) -> None:
    """On a rank: write a line for this host's launcher, if lastgasp's launcher started it. Never raises."""
    _last[:] = [entry]
    if entry.left and not entry.ended:
        atexit.unregister(_script_ended)
        atexit.register(_script_ended)
    if not (path := os.environ.get(VARIABLE)):
        return
    with contextlib.suppress(OSError), telling_of_other_users(path):  # the launcher is gone
        desk = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(desk, msgspec.json.encode(entry) + b"\n")
        finally:
            os.close(desk)


_OTHER_USER = (
    "%s: what this rank tells the launcher does not arrive. A rank that is lost is not started again beside those that "
    "go on, and the launcher of another host than the first does not wait for its ranks to save. Start the launcher as "
    "the user of its ranks"
)


@contextlib.contextmanager
def telling_of_other_users(path: str) -> Iterator[None]:
    """Says once in a process that `path`, a file of the launcher's, cannot be opened by this process' user."""
    try:
        yield
    except PermissionError:
        if not _told and os.environ.get("LOCAL_RANK", "0") == "0":
            _told.append(True)
            log.warning(_OTHER_USER, users(path))
        raise


def users(path: str) -> str:
    """As whom this process and its launcher run, whose file in /proc `path` is."""
    try:
        theirs = f"as user {os.stat('/'.join(path.split('/')[:3])).st_uid}"
    except OSError:
        theirs = "as another one"
    return f"this process runs as user {os.geteuid()}, and its launcher {theirs}"


def _script_ended() -> None:
    """What fails from now on is none of the script's: libraries that abort while they are torn down.

    One of them need not: a thread of gloo's that has just finished the script's last collective waits for the GIL to
    drop its tensors. If the interpreter is finalized first, the process aborts (torch 2.13: "terminate called without
    an active exception"), in jobs without lastgasp, too.
    """
    if (entry := last_here()) is not None and entry.left:
        sign(msgspec.structs.replace(entry, ended=True))
    time.sleep(_YIELD)  # without the GIL


class Desk:
    """The launcher's end, for one attempt."""

    def __init__(self) -> None:
        self._file = memory_file("lastgasp-desk")
        self._read, self._entries = 0, dict[int, Entry]()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the workers."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._file}"}

    @property
    def entries(self) -> dict[int, Entry]:
        """The last entry of each rank that has signed in, by rank."""
        while self._file >= 0:
            start = self._read
            found = os.pread(self._file, _LIMIT, start)
            if not (size := found.rfind(b"\n") + 1):  # the last line may be being written
                break
            for line in found[:size].splitlines():
                with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                    entry = msgspec.json.decode(line, type=Entry)
                    self._entries[entry.rank] = entry
            self._read = start + size  # another thread may have read the same
        return self._entries

    @property
    def hold(self) -> float:
        """Seconds that the ranks of this host may need to save and exit; 0 if none has signed in."""
        return max((entry.hold for entry in self.entries.values()), default=0.0)

    def close(self) -> None:
        """Accept no more entries; those written are kept. Idempotent."""
        if self._file >= 0:
            self.entries  # noqa: B018  # read it
            os.close(self._file)
            self._file = -1
