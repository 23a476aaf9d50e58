"""Which ranks are on one host, and, checked at the start by a file, whether all hosts see the same directory."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lastgasp import _clock
from lastgasp._fs import unique_temp, write_atomically
from lastgasp.errors import ConfigError
from lastgasp.ports import Gather
from lastgasp.topology import Place, host_identity

SEEN_WITHIN = 15.0
"""Seconds within which a file must appear on another host; network file systems cache names for a while."""
_PAUSE = 0.1
_DENIED = (
    "rank %s (user %d) cannot read what rank 0 (user %d) writes in %s (%s): the training goes on, but no restart could "
    "resume from what is saved, and the job would end. Start all ranks as one user, or as users of one group with a "
    "umask that lets it read (umask 027, chmod g+rwxs on the directory)"
)
log = logging.getLogger("lastgasp")


class _Said(msgspec.Struct, frozen=True):
    host: str
    uid: int
    name: str = ""


def require_shared(directory: Path, place: Place, gather: Gather, host: str = "") -> tuple[int, int]:
    """Refuse a directory that is not shared by all hosts; all ranks call it together, before anything is loaded.

    Otherwise the first fault would be fatal: one host would not see what another has saved, or two hosts would
    commit different checkpoints of one step. Where ranks run as different users, and one cannot read what another one
    writes, the first rank warns: its job goes on, but no restart could resume it.

    Args:
        directory: the same path on all ranks; it exists.
        host: identifies this rank's host; determined if empty.

    Returns:
        This rank's number among those of its host, and their count.

    Raises:
        ConfigError: a rank of another host does not see what rank 0 has just written.
        ControlError, DeadlineExceeded: as `gather`.
    """
    if place.world_size == 1:
        return 0, 1
    host = host or host_identity()
    probe = unique_temp(directory / "shared") if place.rank == 0 else None
    try:
        if probe is not None:
            _write(probe)
        said = [msgspec.json.decode(part, type=_Said) for part in gather("shared/file", _word(host, probe))]
        local = _number(place.rank, [one.host for one in said])
        if local[1] == len(said) and len({one.uid for one in said}) == 1:
            return local
        seen = said[0].host == host or sees(directory, said[0].name)
        answers = gather("shared/seen", (b"1" if seen else b"0") + _denied(directory / said[0].name).encode())
    finally:
        if probe is not None:
            with contextlib.suppress(OSError):
                probe.unlink()
    blind = [rank for rank, answer in enumerate(answers) if answer[:1] != b"1"]
    denied = [rank for rank, answer in enumerate(answers) if answer[1:] and rank not in blind]
    if denied and said[0].name and place.rank == 0:
        users, why = (said[denied[0]].uid, said[0].uid), answers[denied[0]][1:].decode()
        log.warning(_DENIED, _named(denied), *users, directory, why)
    if blind and said[0].name:
        unseen = f"rank {_named(blind)} did not see in {SEEN_WITHIN:g} s what rank 0 wrote"
        allowed = f"a directory that all hosts share: {unseen}"
        remedy = "Give a path on a file system that every host of the job has mounted (NFS, Lustre, ...)."
        raise ConfigError("dir", str(directory), allowed, remedy)
    return local


def number_on_host(place: Place, gather: Gather, tag: str) -> tuple[int, int]:
    """This rank's number among those of its host, and their count; all ranks call it together."""
    return _number(place.rank, [host.decode() for host in gather(tag, host_identity().encode())])


def _number(rank: int, hosts: Sequence[str]) -> tuple[int, int]:
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return here.index(rank), len(here)


def _write(probe: Path) -> None:
    with contextlib.suppress(OSError):  # the other ranks are notified, and the first save reports the reason
        write_atomically(probe, b"is this directory shared?\n")


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _word(host: str, probe: Path | None) -> bytes:
    written = probe is not None and probe.exists()
    return msgspec.json.encode(_Said(host, os.geteuid(), probe.name if probe is not None and written else ""))


def _denied(probe: Path) -> str:
    """Why this rank may not read it; empty where it may, and where it does not see it."""
    try:
        with probe.open("rb"):
            return ""
    except PermissionError as error:
        return error.strerror or "Permission denied"
    except OSError:
        return ""


def sees(directory: Path, name: str) -> bool:
    """Whether a file is there within `SEEN_WITHIN`. Lists the directory: a network file system refreshes its cache."""
    deadline = _clock.monotonic() + SEEN_WITHIN
    while True:
        with contextlib.suppress(OSError):
            if name in os.listdir(directory):
                return True
        if not name or _clock.monotonic() > deadline:
            return False
        threading.Event().wait(_PAUSE)
