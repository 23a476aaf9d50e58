"""How `lastgasp ps` and `lastgasp switch` find the jobs of this user on this machine: one small file per job.

Each controller writes `<job>-<pid>-<port>.json` into the runtime directory and removes it when it ends. The file
holds the job's token, so the directory (0700, no symlink) and the file (0600) belong to the user only. If the
directory cannot be created, the job runs without it after one warning.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lastgasp.errors import ConfigError
from lastgasp.topology import host_identity

log = logging.getLogger("lastgasp.controller")

VARIABLE = "LASTGASP_RUNTIME_DIR"
_SIZE_LIMIT = 64 * 1024
_NAME_LIMIT = 64
_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the controller of one job; format version 1."""

    version: int = 1
    address: str
    token: str
    job: str = ""
    """The job's name; empty until the first rank has reported it."""
    directory: str = ""
    """The checkpoint directory; empty until the first rank has reported it."""
    pid: int
    """Process id of the controller."""
    born: int
    """Its start time in clock ticks since boot (proc_pid_stat(5)), which a later process with that id lacks."""
    host: str
    """`topology.host_identity()`."""
    started_s: int
    """Unix seconds."""

    @property
    def name(self) -> str:
        """The file's name."""
        job = re.sub(r"[^A-Za-z0-9._-]", "_", self.job)[:_NAME_LIMIT].lstrip(".-") or "job"
        return f"{job}-{self.pid}-{self.address.rpartition(':')[2]}.json"


def runtime_directory() -> Path:
    """Return where a controller writes: LASTGASP_RUNTIME_DIR, else $XDG_RUNTIME_DIR/lastgasp, else /tmp/lastgasp-<uid>.

    XDG_RUNTIME_DIR is ignored if it names no directory, as under sudo and in containers.
    """
    return _candidates()[0]


def _candidates() -> list[Path]:
    """Return every directory that a controller of this user may have used, whatever shell started it."""
    env, uid = os.environ, os.geteuid()
    if env.get(VARIABLE):
        return [Path(os.path.abspath(os.path.expanduser(env[VARIABLE])))]
    session = env.get("XDG_RUNTIME_DIR", "")
    own = [Path(session) / "lastgasp"] if os.path.isabs(session) and os.path.isdir(session) else []
    fallback = Path(f"/tmp/lastgasp-{uid}")
    return list(dict.fromkeys([*(own or [fallback]), Path(f"/run/user/{uid}/lastgasp"), fallback]))


# -- the controller's side -------------------------------------------------------------------------


class Announcement:
    """The file of one job, from the controller's start to its end. Never raises: the job can run without it."""

    def __init__(self, address: str, token: str, started_s: int) -> None:
        pid = os.getpid()
        self._directory = runtime_directory()
        self._file = JobFile(
            address=_for_this_machine(address),
            token=token,
            pid=pid,
            born=_born(pid) or 0,
            host=host_identity(),
            started_s=started_s,
        )
        self._warned = False
        self._write()

    def tell(self, job: str, directory: str) -> None:
        """Complete the file with the job's name and directory, once the first rank has reported them."""
        if (job, directory) == (self._file.job, self._file.directory):
            return
        old, self._file = self._file, msgspec.structs.replace(self._file, job=job, directory=directory)
        self._write(old.name)
        with contextlib.suppress(OSError, ConfigError), open_private(self._directory) as folder:
            for dead in [one for one in _removed(folder) if one.directory == directory]:
                log.info("the launcher of an earlier job in %s (process %d) was killed: nothing is taken over of what "
                         "it or its ranks kept in memory, arenas among it", directory, dead.pid)  # fmt: skip

    def withdraw(self) -> None:
        """Remove the file at the controller's end; idempotent."""
        self._remove(self._file.name)

    def _write(self, old: str = "") -> None:
        """Write the file; where it has another name so far, under that one first: it is never there twice."""
        name = self._file.name
        try:
            with open_private(self._directory, create=True) as folder:
                replace_in(folder, old or name, msgspec.json.encode(self._file))
                os.replace(old or name, name, src_dir_fd=folder, dst_dir_fd=folder)
        except (OSError, ConfigError) as error:
            if not self._warned:
                log.warning("lastgasp ps and switch will not find this job by themselves: %s", error)
            self._warned = True

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError, ConfigError), open_private(self._directory) as folder:
            os.unlink(name, dir_fd=folder)


def _for_this_machine(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{'127.0.0.1' if host in ('0.0.0.0', '::', '') else host}:{port}"


def replace_in(folder: int, name: str, data: bytes, temp: str = "") -> None:
    """Replace a file atomically. It need not be durable: a reboot ends the job, too.

    Args:
        folder: from `open_private`; temp: the temporary name, where several may write.
    """
    temp = temp or f".{name}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temp, dir_fd=folder)
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o600, dir_fd=folder)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
    os.replace(temp, name, src_dir_fd=folder, dst_dir_fd=folder)


# -- the operator's side ---------------------------------------------------------------------------


def running_jobs() -> list[JobFile]:
    """List the jobs of this user on this machine whose controller is alive, oldest first; remove files of dead ones.

    Raises:
        ConfigError: no job was found, and a directory that may hold some cannot be trusted.
    """
    found: list[JobFile] = []
    refused: list[ConfigError] = []
    for directory in _candidates():
        try:
            with open_private(directory) as folder:
                list(_removed(folder))
                found += _listed(folder)
        except ConfigError as error:
            refused.append(error)
        except OSError:
            continue  # usually it does not exist
    if not found and refused:
        raise refused[0]
    found.sort(key=lambda job: bool(job.job))  # for a moment a job has two files, without its name and with it
    each = {(job.host, job.pid, job.address): job for job in found}.values()
    return sorted(each, key=lambda job: (job.started_s, job.pid, job.address))


def _listed(folder: int) -> Iterator[JobFile]:
    yield from (job for _, job, dead in _seen(folder) if not dead)


def _removed(folder: int) -> Iterator[JobFile]:
    """Remove the files of controllers of this host that were killed."""
    for name, job, dead in _seen(folder):
        if dead:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            yield job


def _seen(folder: int) -> Iterator[tuple[str, JobFile, bool]]:
    """The files of this boot: name, contents, and whether the controller is known to be dead."""
    here = host_identity()
    boot = here.partition(":")[0]
    for name in os.listdir(folder):
        job = _read(folder, name) if name.endswith(".json") and not name.startswith(".") else None
        if job is not None and job.host.partition(":")[0] == boot:  # else of another machine (shared file system)
            yield name, job, job.host == here and _born(job.pid) != job.born


def _read(folder: int, name: str) -> JobFile | None:
    """Read a file; None if it is not a job file or not owned by this user."""
    try:
        fd = os.open(name, os.O_RDONLY | _FILE_FLAGS, dir_fd=folder)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return None
        job = msgspec.json.decode(os.read(fd, _SIZE_LIMIT), type=JobFile)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    finally:
        os.close(fd)
    return job if job.version == 1 else None


def _born(pid: int) -> int | None:
    """Return the start time of a process; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text.rpartition(b")")[2].split()
    dead = fields[0] in (b"Z", b"X")
    return None if dead else int(fields[19])


# -- the directory ---------------------------------------------------------------------------------


@contextlib.contextmanager
def open_private(directory: Path, create: bool = False) -> Iterator[int]:
    """Open the directory after checking that only this user has access.

    Raises:
        ConfigError: others have access.
        OSError: it does not exist, or cannot be created.
    """
    if create:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _refusal(directory, "It is a symlink or a file: remove it.") from None
        raise
    try:
        _must_be_private(directory, os.fstat(folder))
        yield folder
    finally:
        os.close(folder)


def _must_be_private(directory: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise _refusal(directory, f"It belongs to user {found.st_uid}.")
    if found.st_mode & 0o077:
        raise _refusal(directory, f"Its mode is {stat.S_IMODE(found.st_mode):04o}: chmod 700 it.")


def _refusal(directory: Path, why: str) -> ConfigError:
    allowed = "a directory that this user alone can read and write, for it holds the tokens of jobs"
    return ConfigError(VARIABLE, str(directory), allowed, f"{why} Or set {VARIABLE} to another one.")
