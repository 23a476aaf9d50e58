"""Looks at this machine once."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import itertools
import os
import stat
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from lastgasp import _fs
from lastgasp.backends import MINDIO_BESIDE, installed
from lastgasp.backends.ascend.goenv import environment_at_exec
from lastgasp.events import decode_incident
from lastgasp.launch.ascend import look as find_libraries
from lastgasp.steps import format as ring_format
from lastgasp.steps.writer import in_python

from .machine import JobFacts, Machine, Ring, Storage
from .settings import refused

DISTRIBUTIONS: Final = (
    "torch",
    "torch-npu",
    "lightning",
    "pytorch-lightning",
    "megatron-core",
    "mindspore",
    "mindformers",
    "hyper-parallel",
    "tensorflow",
    "numpy",
    "pyarrow",
    "taskd",
    "mindio-ttp",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu11",
    "nvidia-cuda-runtime-cu12",
)
"""Whose versions are read, from their metadata."""
PACKAGES: Final = (
    "torch",
    "torch_npu",
    "lightning",
    "megatron",
    "mindspore",
    "mindformers",
    "hyper_parallel",
    "tensorflow",
    "taskd",
    "mindio_ttp",
    MINDIO_BESIDE,
)
"""Whose places are asked of the import system; nothing is imported."""
MOST_FILES = 20_000
"""Whose sizes are read to find the largest checkpoint."""
PROBE_LIMIT = 60.0
"""Seconds that the checkpoint directory gets to answer."""
_UNSYNCHRONISED = 5
_TIMEX_BYTES = 256


def look(directory: str, job: JobFacts) -> Machine:
    """This machine, with a probe of the checkpoint directory where one is named.

    Args:
        directory: of the checkpoints; empty where there is none to look at.
        job: what the user states.
    """
    return Machine(
        cwd=Path.cwd(),
        env=dict(os.environ),
        exec_env=_exec_env(),
        umask=_umask(),
        versions=_versions(),
        places=_places(),
        ring=_ring(),
        directory=directory,
        storage=_storage(Path(directory).absolute()) if directory else None,
        found=find_libraries(os.environ),
        shm=_size("/dev/shm"),
        clock_in_step=_clock_in_step(),
        job=job,
        refused=refused(directory),
    )


def _storage(directory: Path, limit: float = PROBE_LIMIT) -> Storage:
    """What is there. On a thread of its own, since a dead file server never answers."""
    found: list[Storage] = []
    thread = threading.Thread(
        target=lambda: found.append(_answered(directory)), name="lastgasp-doctor-probe", daemon=True
    )
    thread.start()
    thread.join(limit)
    return found[0] if found else Storage(silent_s=limit)


def _answered(directory: Path) -> Storage:
    try:
        there = _existing(directory)
        return probe(there, is_it=there == directory)
    except OSError as error:
        return Storage(error=error.strerror or str(error))


def _existing(directory: Path) -> Path:
    """The directory, or what it would be made in.

    Raises:
        OSError: it cannot be made, or nobody may look.
    """
    for one in (directory, *directory.parents):
        if os.path.lexists(one):
            if not stat.S_ISDIR(one.stat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{one} is not a directory")
            return one
    return Path("/")


def probe(directory: Path, is_it: bool = True) -> Storage:
    """Write a small file to the directory, bring it to the device, and take it away again.

    Args:
        is_it: it is the directory of the checkpoints; not what that would be made in, whose content says nothing.

    Raises:
        OSError: something but writing fails.
    """
    name = _fs.unique_temp(directory / "lastgasp-doctor")
    kind, options = _mounted(directory)
    begin = time.time()
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return Storage(error=error.strerror or str(error), kind=kind, options=options)
    try:
        why, fsync_error = _written(fd, directory)
        stamp, end = os.fstat(fd).st_mtime, time.time()
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            name.unlink()
    return Storage(
        error=why,
        fsync_error=fsync_error,
        kind=kind,
        options=options,
        free=_free(directory),
        largest=_largest(directory) if is_it else 0,
        clock_offset_s=0.0 if begin - 0.1 <= stamp <= end + 0.1 else stamp - begin,
        save_s=_longest_save(directory) if is_it else None,
    )


def _written(fd: int, directory: Path) -> tuple[str, str]:
    """Why nothing can be written, and why it cannot be brought to the device; empty where it can. Some file systems
    say only at fsync that they are full."""
    try:
        os.write(fd, b"lastgasp doctor")
    except OSError as error:
        return error.strerror or str(error), ""
    try:
        os.fsync(fd)
        _fs.fsync_dir(directory)
    except OSError as error:
        said = error.strerror or str(error)
        return (said, "") if error.errno in (errno.ENOSPC, errno.EDQUOT) else ("", said)
    return "", ""


def _mounted(path: Path) -> tuple[str, tuple[str, ...]]:
    """Kind and options of the file system that the path lies on."""
    best, found = "", ("", ())
    real = os.path.realpath(path)
    try:
        lines = os.fsdecode(Path("/proc/self/mounts").read_bytes()).splitlines()
    except OSError:
        return "", ()
    for line in lines:
        _, point, kind, options, *_ = line.split()
        point = point.replace("\\040", " ")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, found = point, (kind, tuple(options.split(",")))  # type: ignore[assignment]
    return found


def _free(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _largest(directory: Path) -> int:
    """Bytes of the largest entry that could be a checkpoint: a file, or all files of a directory."""
    sizes, left = [0], MOST_FILES
    try:
        entries = list(itertools.islice(directory.iterdir(), MOST_FILES))
    except OSError:  # one may write there and not list
        return 0
    for entry in entries:
        with contextlib.suppress(OSError):
            files = entry.rglob("*") if entry.is_dir() and not entry.is_symlink() else iter([entry])
            found = [file.lstat().st_size for file in itertools.islice(files, left)]
            left -= len(found)
            sizes.append(sum(found))
    return max(sizes)


def _longest_save(directory: Path) -> float | None:
    found = []
    for path in (directory / "incidents").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, RecursionError, msgspec.MsgspecError):
            phases = decode_incident(path.read_bytes()).phases
            if phases.agreed is not None and phases.committed is not None:
                found.append((phases.committed - phases.agreed) / 1e9)
    return max(found, default=None)


def _exec_env() -> dict[str, str] | None:
    try:
        return environment_at_exec()
    except OSError:
        return None


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name) or "?"
    return found


def _places() -> dict[str, Path]:
    return {name: place for name in PACKAGES if (place := installed(name)) is not None}


def _ring() -> Ring:
    if in_python():
        return "switched off"
    try:
        module = importlib.import_module("lastgasp.steps._ring")
    except ImportError:
        return "missing"
    return "compiled" if module.LAYOUT == ring_format.VERSION else "other version"


def _size(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _clock_in_step() -> bool | None:
    """Ask adjtimex whether an NTP or PTP daemon synchronises the clock."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else bool(state != _UNSYNCHRONISED)
