"""Traps of where checkpoints and marks are written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from .checks import Match, check
from .machine import Machine

SHM_LEAST = 256 << 20
"""Bytes of /dev/shm: 1 MB of marks a rank, and what data loaders and NCCL or HCCL take."""
_VOLATILE = {
    "tmpfs": "memory: a reboot or the end of the pod takes it away",
    "ramfs": "memory: a reboot or the end of the pod takes it away",
    "overlay": "the container's own layer: the end of the pod takes it away",
    "devtmpfs": "memory",
}
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_NO_BARRIER = ("nobarrier", "barrier=0")


@check("dir-unwritable", "error", "how-it-works.md §4", "The checkpoint directory cannot be written")
def dir_unwritable(machine: Machine) -> Iterator[Match]:
    """Tried by writing a file."""
    if machine.storage is not None and machine.storage.error:
        what = f"no file can be made in {machine.directory}: {machine.storage.error}"
        full = machine.storage.error in _FULL
        yield Match(
            what, "Make room there." if full else "Give this user the right to write there, or name another one."
        )


@check("dir-silent", "error", "how-it-works.md §4", "The checkpoint directory's file system does not answer")
def dir_silent(machine: Machine) -> Iterator[Match]:
    """A file server that is away."""
    if machine.storage is not None and machine.storage.silent_s:
        what = f"{machine.directory} did not answer within {machine.storage.silent_s:g} s: every save would hang"
        yield Match(what, "Look at its file server, or mount it anew.")


@check("dir-no-fsync", "error", "limits.md §4", "The checkpoint directory's file system has no fsync")
def dir_no_fsync(machine: Machine) -> Iterator[Match]:
    """A checkpoint that was reported as saved may not be there after a power cut."""
    if machine.storage is not None and machine.storage.fsync_error:
        what = f"fsync fails in {machine.directory} ({machine.storage.kind}): {machine.storage.fsync_error}"
        yield Match(what, "Use a file system with fsync of files and directories.")


@check("dir-volatile", "warning", "how-it-works.md §4", "Checkpoints do not outlive the pod or the machine")
def dir_volatile(machine: Machine) -> Iterator[Match]:
    """Memory, or a container's layer."""
    why = _VOLATILE.get(machine.storage.kind) if machine.storage is not None else None
    if why is not None and machine.storage is not None:
        what = f"{machine.directory} is {machine.storage.kind}, {why}"
        yield Match(what, "Mount a volume for the checkpoints.")


@check("dir-no-barrier", "warning", "limits.md §4", "The file system acknowledges fsync before the disk has written")
def dir_no_barrier(machine: Machine) -> Iterator[Match]:
    """A mount option."""
    options = [one for one in machine.storage.options if one in _NO_BARRIER] if machine.storage is not None else []
    if options:
        what = f"{machine.directory} is mounted with {options[0]}: fsync returns before the disk has written"
        yield Match(what, "Mount it without.")


@check("dir-space", "warning", "limits.md §5", "No room for another checkpoint")
def dir_space(machine: Machine) -> Iterator[Match]:
    """A gasp is written beside what is there."""
    if machine.storage is not None and not machine.storage.error and machine.storage.free < machine.storage.largest:
        what = f"{machine.directory} has {machine.storage.free >> 20} MB left, its largest checkpoint has "
        yield Match(f"{what}{machine.storage.largest >> 20} MB", "Make room, or keep fewer (LASTGASP_KEEP).")


@check("shm-missing", "warning", "limits.md §1", "There is no /dev/shm")
def shm_missing(machine: Machine) -> Iterator[Match]:
    """Marks of a killed rank are recovered from there."""
    if machine.shm is None:
        what = "there is no /dev/shm: what a killed rank had marked and not yet written is lost"
        yield Match(what, "Mount a tmpfs there (Kubernetes: emptyDir with medium Memory).")


@check("shm-small", "warning", "limits.md §1", "/dev/shm is small")
def shm_small(machine: Machine) -> Iterator[Match]:
    """Docker gives 64 MB unless told otherwise."""
    if machine.shm is not None and machine.shm < SHM_LEAST:
        what = f"/dev/shm has {machine.shm >> 20} MB: ranks share it with data loaders and collectives"
        yield Match(what, "docker run --shm-size=1g, or an emptyDir with medium Memory in Kubernetes.")
