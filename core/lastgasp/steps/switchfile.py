"""The switch file: TaskD's JSON, read here with one bit for each of its five keys (docs/facts/taskd.md §6).

    {"CommunicationOperator": "off", "Step": "on", "SaveCheckpoint": "on", "FP": "on", "DataLoader": "on"}

TaskD makes two bits of the five keys: its default domain is off only when all five are "off", its communication
domain is on only when CommunicationOperator is "on". Here each key switches its own marks, so a file that TaskD
understands does at least what it does there, and the four kinds of the default domain can be separated.
Other differences: a key that is missing changes nothing (TaskD takes `{}` for "default domain on"), and symlinks
are followed, because a mounted ConfigMap consists of them (TaskD refuses every one).
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import msgspec

from . import bits

log = logging.getLogger("lastgasp.steps")

DEFAULT_PATH = Path("/user/cluster-info/datatrace-config/profilingSwitch")
"""Where MindCluster's device plugin puts it."""
VARIABLE = "LASTGASP_SWITCH_FILE"
"""Environment variable that names another file."""
SIZE_LIMIT = 1 << 20
"""Bytes; TaskD reads no more either."""
_PROBLEMS_TOLD = 32
_BIT_OF_VALUE = {"on": True, "off": False}
_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Refused(Exception):
    """Why the current file changes nothing."""


def switch_path() -> Path:
    """The file to look at: what `LASTGASP_SWITCH_FILE` names, else TaskD's."""
    named = os.environ.get(VARIABLE)
    return Path(os.path.abspath(os.path.expanduser(named))) if named else DEFAULT_PATH


class SwitchFile:
    """Looks at the file when asked, once a second as a rule. For one thread.

    The last change wins between the file and `lastgasp switch`: the file speaks when it is first seen and whenever
    what it says has changed. A file that is missing, cannot be read or is refused keeps the last state; each
    distinct problem is one warning. A missing file is no problem. No call raises, and none waits for anything but
    the file system: named pipes, devices and files beyond 1 MiB are not read.

    Args:
        path: the file; None takes `switch_path()`.
        mask: the marks that are on before the file is first seen (`bits`).
    """

    def __init__(self, path: Path | None = None, mask: int = bits.DEFAULT_ON) -> None:
        self.path = switch_path() if path is None else path
        self._mask = mask
        self._said: dict[str, bool] = {}
        self._problems: set[str] = set()
        self._link_told = False
        self._reads = False

    def poll(self, mask: int | None = None) -> int | None:
        """Look once.

        Args:
            mask: the marks currently on, if others may have switched, too; None takes what the last
                call returned.

        Returns:
            The mask to set, or None if the file contains nothing new.
        """
        self._mask = self._mask if mask is None else mask
        try:
            said = self._read()
        except _Refused as problem:
            self._warn(str(problem))
            return None
        if said is None:
            self._gone()
            return None
        self._told_again()
        if said == self._said:
            return None
        self._said = said
        new = _applied(said, self._mask)
        changed, self._mask = new != self._mask, new
        return new if changed else None

    # -- reading ----------------------------------------------------------------------------------

    def _read(self) -> dict[str, bool] | None:
        """The settings in the file; None without a file."""
        try:
            data = _content(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _Refused(f"it cannot be read ({error.strerror})") from None
        self._tell_of_link()
        try:
            found = msgspec.json.decode(data)
        except _BAD as error:
            raise _Refused(f"it is not JSON ({error})") from None
        if not isinstance(found, dict):
            raise _Refused(f"it holds a JSON {type(found).__name__}, not an object with the keys {_keys()}")
        return self._checked(found)

    def _checked(self, found: dict[str, object]) -> dict[str, bool]:
        if unknown := sorted(set(found) - set(bits.TASKD)):
            self._warn(f"its keys {_few(unknown)} are unknown and ignored; the known ones are {_keys()}", keeps=False)
        said = {}
        for key in bits.TASKD:
            if key not in found:
                continue
            value = found[key]
            if not isinstance(value, str) or value not in _BIT_OF_VALUE:
                raise _Refused(f"{key}={_short(value)} in it is not allowed: expected 'on' or 'off'")
            said[key] = _BIT_OF_VALUE[value]
        return said

    # -- telling ----------------------------------------------------------------------------------

    def _warn(self, problem: str, keeps: bool = True) -> None:
        """Log it once, so that a file that keeps changing does not fill the log."""
        if problem in self._problems or len(self._problems) >= _PROBLEMS_TOLD:
            return
        self._problems.add(problem)
        self._reads = self._reads and not keeps
        state = f": the marks stay as they are ({bits.describe(self._mask)})" if keeps else ""
        more = " (further problems of this file are not logged)" if len(self._problems) == _PROBLEMS_TOLD else ""
        log.warning("switch file %s: %s%s%s", self.path, problem, state, more)

    def _told_again(self) -> None:
        if not self._reads:
            log.info("switch file %s is read every second", self.path)
        self._reads = True

    def _gone(self) -> None:
        if self._reads:
            log.info("switch file %s is gone: the marks stay as they are (%s)", self.path, bits.describe(self._mask))
        self._reads = False

    def _tell_of_link(self) -> None:
        if not self._link_told and os.path.realpath(self.path) != os.path.abspath(self.path):
            log.info(
                "switch file %s is reached through a symlink, as a mounted ConfigMap is: it is read here, but "
                "TaskD would refuse it; mount the host's directory where TaskD must read it, too",
                self.path,
            )
            self._link_told = True


def _content(path: Path) -> bytes:
    _must_be_regular(os.stat(path))  # before the open, which may already do something to a device
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _must_be_regular(os.fstat(fd))  # it may be another one by now
        return _up_to_limit(fd)
    finally:
        os.close(fd)


def _must_be_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}
        raise _Refused(f"it is {kinds.get(stat.S_IFMT(found.st_mode), 'a device')}, not a regular file")


def _up_to_limit(fd: int) -> bytes:
    data = bytearray()
    while more := os.read(fd, SIZE_LIMIT + 1 - len(data)):
        data += more
        if len(data) > SIZE_LIMIT:
            raise _Refused(f"it is longer than {SIZE_LIMIT} bytes")
    return bytes(data)


def _applied(said: dict[str, bool], mask: int) -> int:
    for key, on in said.items():
        mask = mask | bits.TASKD[key] if on else mask & ~bits.TASKD[key]
    return mask


def _keys() -> str:
    return ", ".join(bits.TASKD)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(_short(name) for name in names[:3]) + more


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
