"""Brings the last marks of killed processes to disk, from the ring files that they left (`format`).

A living owner holds a lock on its ring; a dead one's ring is claimed, so that only one of several recoveries works on
it, and another takes over if the first one dies. The owner, or an earlier recovery, may have died after its write and
before recording it in the ring, even in the middle of a row: what is already on disk is found by its text (a row has
the process, the Id and the nanosecond), and only the rest is written.

While that is done, the rank's next process may write to the same files, and who reads a file during a write may see
half a row of it. Half a row is taken for the dead process's own only if it has the nanosecond, or stays as it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lastgasp import _clock

from . import ringfile
from .rankfiles import RankFiles, profiling_files
from .ring import RingDamaged, RingReader
from .rows import DROPPED, OWN_DOMAIN, Origin, dropped, render

log = logging.getLogger("lastgasp.steps")

TIMEOUT_S = 30.0
FILES_LOOKED_AT = 4
"""How many of the rank's newest files are searched: its last batch is in one of them, or nowhere."""
STALE_S = 3600.0
"""Age in seconds at which a ring that was never completed is removed."""
SETTLE_S = 1.0
"""How long a file must end in the same half row before a row that lacks its time may be continued there, in seconds."""
GIVE_UP_S = 86_400.0
"""How long after its first failed recovery a ring is kept, in seconds: every job of this user comes by it."""
_OWN = re.compile(rb'"Timestamp":[0-9]+,')
_HOST_START = re.compile(rb'"Flag":(?:16,"SourceKind":0|2),')


@dataclass(frozen=True)
class Recovered:
    """The result for one ring file whose owner is dead.

    Attributes:
        ring: the ring file.
        rank, directory: of its process, as far as they are known.
        ranges: finished ranges that were only in the ring and are on disk now.
        problem: why its rows are not on disk; empty when all is well.
        removed: the ring file is gone. It is kept if another call may succeed.
        told: an earlier call, perhaps of another process, has already reported the problem.
    """

    ring: Path
    rank: int = -1
    directory: str = ""
    ranges: int = 0
    problem: str = ""
    removed: bool = True
    told: bool = False


def recover_orphans(timeout: float = TIMEOUT_S) -> list[Recovered]:
    """Empty and remove every ring file of this user whose owner is dead. Never raises.

    What cannot be written is left to the next call. A damaged ring is removed with a warning.

    Args:
        timeout: seconds, even if a disk hangs; what completes later is missing from the answer.
    """
    if not _listing():
        return []
    done: list[Recovered] = []
    worker = threading.Thread(target=_recover_all, args=(done, timeout), name="lastgasp-recover", daemon=True)
    try:
        worker.start()
    except RuntimeError as error:
        log.warning("no thread to recover step marks of dead processes (%s): they stay for the next attempt", error)
        return []
    worker.join(timeout)
    if worker.is_alive():
        log.warning("recovering the step marks of dead processes takes longer than %g s: continuing without", timeout)
    return list(done)


_one = threading.Lock()
"""Serialises this process's threads, which the locks of ring files do not distinguish."""


def _recover_all(done: list[Recovered], timeout: float) -> None:
    if not _one.acquire(timeout=timeout):
        return
    try:
        for path in _listing():
            if path.name.startswith("."):
                _remove_stale(path)
            elif (recovered := _recover(path)) is not None:
                _tell(recovered)
                done.append(recovered)
    finally:
        _one.release()


def _listing() -> list[Path]:
    """All ring files of this user, and (with a leading dot) those that are not completed."""
    prefixes = tuple(f"{dot}{ringfile.PREFIX}-{os.getuid()}-" for dot in ("", "."))
    found = []
    for place in dict.fromkeys(ringfile.places()):
        with contextlib.suppress(OSError):
            found += sorted(place / name for name in os.listdir(place) if name.startswith(prefixes))
    return found


def _remove_stale(path: Path) -> None:
    """Remove a ring whose process died while creating it."""
    with contextlib.suppress(OSError):
        if _mine(path) and _clock.wall_ns() - path.lstat().st_mtime_ns > STALE_S * 1e9:
            path.unlink()


def _mine(path: Path) -> bool:
    with contextlib.suppress(OSError):
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    return False


# -- one ring ---------------------------------------------------------------------------------------


def _recover(path: Path) -> Recovered | None:
    """None: its owner is alive, or another process is recovering it."""
    try:
        with RingReader(path) as ring:
            return _empty(path, ring) if ring.claim() else None
    except FileNotFoundError:
        return None
    except RingDamaged as error:
        return _remove(path, str(error)) if _mine(path) and not _locked(path) else None
    except OSError as error:
        return Recovered(path, problem=f"{path} cannot be read: {error}", removed=False)
    except Exception as error:  # whatever is in a ring, it must not stop a launcher
        return _remove(path, f"{path} is damaged: {error!r}")


def _empty(path: Path, ring: RingReader) -> Recovered:
    directory, rank = ring.directory, ring["rank"]
    if not directory:
        waiting = ring["head"] - ring["tail"]
        return _remove(path, f"{path} does not say where its rows go: {waiting} ranges are lost" if waiting else "")
    try:
        _require_owner(Path(directory))
        with _alone_in(Path(directory)):
            ranges = _write_rest(ring, Path(directory))
    except OSError as error:
        return _refused(path, rank, directory, error)
    path.unlink(missing_ok=True)
    return Recovered(path, rank, directory, ranges)


def _require_owner(directory: Path) -> None:
    """What the base of the marks lies in (the checkpoint directory, as a rule) was removed or is not mounted here: an
    unrelated job must not make it anew.

    Raises:
        FileNotFoundError: that is so.
    """
    owner = directory.parent.parent.parent
    if not owner.is_dir():
        raise FileNotFoundError(errno.ENOENT, "it was removed or is not mounted here", str(owner))


def _refused(path: Path, rank: int, directory: str, error: OSError) -> Recovered:
    """The sticky bit, which means nothing in a file, marks a ring whose problem was reported, and ctime since when."""
    status = path.stat()
    told = bool(status.st_mode & stat.S_ISVTX)
    problem = f"{directory} cannot be written: {error}"
    if told and _clock.wall_ns() - status.st_ctime_ns > GIVE_UP_S * 1e9:
        path.unlink(missing_ok=True)
        return Recovered(path, rank, directory, problem=problem)
    if not told:
        path.chmod(stat.S_IMODE(status.st_mode) | stat.S_ISVTX)
    remedy = f"Make it writable within a day, or remove {path}"
    return Recovered(path, rank, directory, problem=f"{problem}. {remedy}", removed=False, told=told)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """No other recovery of this host writes there: attempts of one rank leave a ring each for the same files."""
    descriptor = -1
    with contextlib.suppress(OSError):  # nothing is there yet, or a file system without such locks
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _write_rest(ring: RingReader, directory: Path) -> int:
    """Returns the ranges that were not on disk."""
    origin = Origin(ring["pid"], max(ring["device"], 0), ring["wall_offset"])
    waiting = ring["head"] - ring["tail"]
    rows = render(ring.records(waiting), ring.names(), origin)
    path, done = _on_disk(directory, rows)
    rest, lost = rows[done:], ring["dropped"] - _told_dropped(directory, origin.pid, ring["dropped"])
    if lost > 0:
        rest += dropped(lost, ring["next_id"], _clock.wall_ns(), origin)
    if path is not None and rest:
        _finish(path, rest)
    elif rest:
        RankFiles(directory).append(rest)
    ring.consumed(waiting)
    return len(_HOST_START.findall(rest)) - (lost > 0)


def _on_disk(directory: Path, rows: bytes) -> tuple[Path | None, int]:
    """The file that ends in the middle of `rows`, if there is one, and how many bytes of `rows` are already on disk."""
    first = rows[: rows.find(b"\n") + 1]
    for path in reversed(profiling_files(directory)[-FILES_LOOKED_AT:] if first else []):
        content = path.read_bytes()
        at = content.rfind(first)
        if at < 0:
            at = content.rfind(b"\n") + 1
            if at == len(content) or not first.startswith(content[at:]) or not _is_left(path, content, at):
                continue
        done = _common(content[at:], rows)
        if at + done == len(content) and not content.endswith(b"\n"):
            return path, done
        return None, rows.rfind(b"\n", 0, done) + 1
    return None, 0


def _is_left(path: Path, content: bytes, at: int) -> bool:
    """Whether half a row, from `at` on, is what a dead process left, not what a living one is writing."""
    if _OWN.search(content, at):
        return True
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        if path.stat().st_size != len(content):
            return False
        time.sleep(SETTLE_S / 20)
    return True


def _common(one: bytes, other: bytes) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _finish(path: Path, rest: bytes) -> None:
    """Continue in the middle of a row. If the disk is full, the next recovery finds the partial row by its text."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def _told_dropped(directory: Path, pid: int, count: int) -> int:
    """How many of `count` dropped ranges of that process are already reported in the files.

    Those of an earlier process with the same id count as its own: prefer under-reporting to double counting.
    """
    row = re.compile(f'"ProcessId":{pid},.*"Name":"{DROPPED}([0-9]+)","Domain":"{OWN_DOMAIN}"'.encode())
    files = profiling_files(directory) if count else []
    return sum(int(number) for path in files for number in row.findall(path.read_bytes()))


def _remove(path: Path, reason: str) -> Recovered:
    with contextlib.suppress(OSError):
        path.unlink()
    return Recovered(path, problem=reason)


def _locked(path: Path) -> bool:
    """Whether a living process holds the ring, which a damaged or newer header would not show."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True  # unreadable, or removed by another recovery meanwhile
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


_said: set[tuple[Path, str]] = set()


def _tell(recovered: Recovered) -> None:
    if recovered.problem and (recovered.ring, recovered.problem) not in _said:
        _said.add((recovered.ring, recovered.problem))
        what = "removed" if recovered.removed else "kept for another attempt"
        level = logging.DEBUG if recovered.told else logging.WARNING
        log.log(level, "step marks of a dead process: %s; its ring file is %s", recovered.problem, what)
    elif recovered.ranges:
        log.info("the last %d step marks of a process that was killed (rank %d of the job that trained there) are in "
                 "%s", recovered.ranges, recovered.rank, recovered.directory)  # fmt: skip
