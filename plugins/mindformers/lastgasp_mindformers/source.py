"""The state of a MindSpore run as the engine's port (ports.StateSource): checkpoints in MindFormers' own layout."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from lastgasp.adapter import GaspConfig, LastgaspError, Moved, NotSaveable, Place, SaveResult
from lastgasp.adapter import clock as _clock
from lastgasp.adapter.checkpoint import FileEntry, Provenance, Staged, World, apply, digest_file
from lastgasp.adapter.files import DISK, fsync_dir, make_directory, unique_temp
from lastgasp.adapter.testing import faults
from lastgasp_mindformers.aux_state import Numbers, Statistic, decode
from lastgasp_mindformers.layouts import FORMAT, encode_aux
from lastgasp_mindformers.state import MindSporeState
from lastgasp_mindformers.targets import Target

log = logging.getLogger("lastgasp")


class _Part(msgspec.Struct, frozen=True):
    """What the rank that publishes must know of another's files."""

    folder: str
    entries: tuple[FileEntry, ...]


_PARTS = msgspec.json.Decoder(_Part)


@dataclass(frozen=True)
class Saved:
    """What one rank has written."""

    step: int
    where: Target
    target: Path
    folder: Path
    nbytes: int
    first_byte_ns: int
    part: bytes

    @property
    def path(self) -> str:
        """Where the checkpoint will stand."""
        return str(self.target)


class Writer(Protocol):
    """How checkpoints of this job are named and written (`native.Native`, `iterations.Iterations`)."""

    @property
    def directory(self) -> Path:
        """Where they stand."""

    def target(self, numbers: Numbers, ranks: Iterable[int]) -> Target:
        """Where the checkpoint of a step of so many ranks stands."""

    def write(self, folder: Path, files: Sequence[str], numbers: Numbers, statistics: Mapping[str, Any]) -> None:
        """The live parameters, and `statistics` as given, into the files of one rank."""


class MindSporeSource:
    """Called by the engine's threads while the training thread is in the graph, parked, or has raised.

    Args:
        state: where training stands; native: how checkpoints are named and written.
        place: who this rank is; config: how many gasps stay.
    """

    def __init__(self, state: MindSporeState, native: Writer, place: Place, config: GaspConfig) -> None:
        self._state, self._native, self._config = state, native, config
        self.place, self.rank = place, place.rank

    @property
    def buffer_fd(self) -> int:
        """The crash-safe buffer's descriptor."""
        return self._state.aux.buffer.fd

    def capture(self, step: int) -> bytes:
        """This rank's auxiliary state of `step`; empty when it is no longer known."""
        return self._state.aux.read(step)

    # -- saving -----------------------------------------------------------------------------------

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> Saved:
        """Write the files of every rank that holds the same as this one, dead or alive, under a temporary name."""
        self._require(step)
        where = self._native.target(self._state.numbers, range(self.place.world_size))
        target = self._native.directory / where.name
        make_directory(target.parent)
        folder, begun = unique_temp(target), _clock.wall_ns()
        states = {rank: data for rank, data in aux.items() if data} | {self.rank: self.capture(step)}
        try:
            entries = list(self._write(folder, where, states))
            if self.rank == self._first_saver():
                entries.append(_write_bytes(folder, where.aux, encode_aux(states)))
            faults.fire_at("gasp_save", step)
            self._require(step)
            for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
                fsync_dir(inner)
        except BaseException:
            DISK.remove(folder)
            raise
        part = msgspec.json.encode(_Part(str(folder), tuple(entries)))
        nbytes = sum(entry.size for entry in entries)
        return Saved(step, where, target, folder, nbytes, begun, part)

    def _require(self, step: int) -> None:
        why = self._state.stands_on(step)
        if not why:
            return
        if self._state.numbers.step > step or "has begun" in why:
            raise Moved(why)
        raise NotSaveable(why)

    def _ranks(self) -> tuple[int, ...]:
        """Those whose files this rank can write."""
        return next(group for group in self.place.replicas if self.rank in group)

    def _first_saver(self) -> int:
        """Which rank writes what belongs to all of them."""
        first = self.place.replicas[0]
        return self.rank if self.rank in first else first[0]

    def _write(self, folder: Path, where: Target, states: Mapping[int, bytes]) -> Iterator[FileEntry]:
        """The files of each rank; those with the same content share their bytes on disk."""
        written: dict[tuple[Statistic, ...], list[FileEntry]] = {}
        own = _statistics(states[self.rank])
        for rank in self._ranks():
            statistics = _statistics(states[rank]) if rank in states else own
            files = where.files[rank]
            for relative in files:
                (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            same = written.get(statistics)
            if same is None or not _linked(folder, same, files):
                self._native.write(folder, files, self._state.numbers, {one.name: one.array() for one in statistics})
                same = written[statistics] = [_durable(folder / relative, relative) for relative in files]
            yield from (
                msgspec.structs.replace(entry, path=relative) for entry, relative in zip(same, files, strict=True)
            )

    # -- publishing -------------------------------------------------------------------------------

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """Bring all savers' files together and make them visible, `meta.json` and the manifest last."""
        assert isinstance(result, Saved)
        where = result.where
        staged = Staged(result.target, where.layout, sha256=self._config.sha256)
        for _, data in sorted(parts.items()):
            part = _PARTS.decode(data)
            staged.adopt(_inside(Path(part.folder), where), part.entries)
            with contextlib.suppress(OSError):
                DISK.remove(Path(part.folder))
        world = World(world_size=self.place.world_size, replica_groups=self.place.replicas)
        provenance = Provenance(
            format=FORMAT,
            step=result.step,
            kind="gasp",
            job=self.place.job,
            attempt=self.place.attempt,
            world=world,
        )
        staged.publish(provenance, markers=where.markers, aside=True)
        self._prune(result.target, where)
        return staged.kept

    def _prune(self, newest: Path, where: Target) -> None:
        config = self._config
        job = self.place.job if config.resume == "never" else None
        try:
            apply([newest.parent], where.layout, config.keep, job=job, protected=[newest])
        except (OSError, LastgaspError) as error:  # the gasp itself is safe; old ones may stay
            log.warning("old checkpoints could not be removed: %s", error)

    def discard(self, result: SaveResult) -> None:
        """Remove what was written. Never raises."""
        assert isinstance(result, Saved)
        try:
            DISK.remove(result.folder)
        except OSError as error:
            log.debug("%s stays: %s", result.folder, error)


def _statistics(data: bytes) -> tuple[Statistic, ...]:
    return decode(data).statistics if data else ()


def _inside(folder: Path, where: Target) -> Path:
    """Of a checkpoint that is a directory: what becomes that directory (`Staged.adopt`)."""
    return folder / where.name if where.layout.owns(Path(where.name), where.name) else folder


def _linked(folder: Path, existing: Sequence[FileEntry], files: Sequence[str]) -> bool:
    """Whether `files` are now other names of `existing`: native files are replaced, never changed in place."""
    try:
        for entry, relative in zip(existing, files, strict=True):
            os.link(folder / entry.path, folder / relative)
    except OSError:  # a file system without hard links
        return False
    return True


def _durable(path: Path, relative: str) -> FileEntry:
    """Flush a file to disk and read it meanwhile: what was written last is still in memory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="lastgasp-fsync") as pool:
            flushed = pool.submit(DISK.fsync, descriptor)
            entry = digest_file(path, relative)
            flushed.result()
    finally:
        os.close(descriptor)
    return entry


def _write_bytes(folder: Path, relative: str, data: bytes) -> FileEntry:
    path: Any = folder / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return _durable(path, relative)
