"""Manifests of the checkpoints that MindFormers and MindSpore themselves write: after each save, all ranks together.

Files on disk are made durable, which MindSpore does not do (mindformers.md §5), and read back, so that what is
proved is what landed there. Each rank reads its own. Nothing here ends a training: without a manifest the older
checkpoints stand.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lastgasp._fs import write_atomically
from lastgasp.checkpoint import FileEntry, Provenance, World, candidates
from lastgasp.checkpoint.adopt import data_files, read_files, remove_orphans, write_manifest
from lastgasp.checkpoint.manifest import Kind
from lastgasp.errors import CheckpointError, LastgaspError
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.ports import Gather, Layout
from lastgasp.topology import Place
from lastgasp_mindformers.layouts import FORMAT, ITERATIONS, encode_aux, rank_of
from lastgasp_mindformers.monitors import Monitor, Saved, is_monitor, places_of, told_by_all

log = logging.getLogger("lastgasp")

AUX_SUFFIX = "lastgasp.small"
"""The small-state file of a directory checkpoint, in it."""


def provenance(place: Place, step: int, kind: Kind, parent: str | None) -> Provenance:
    """Who wrote it, for the manifest."""
    world = World(world_size=place.world_size, replica_groups=place.replicas)
    return Provenance(
        format=FORMAT, step=step, kind=kind, job=place.job, attempt=place.attempt, world=world, parent=parent
    )


def newest_name(checkpoint: Path, layout: Layout) -> str | None:
    """The newest other checkpoint beside it that has a manifest; None where there is none."""
    found = candidates([checkpoint.parent], layout)
    return next((c.path.name for c in found if c.manifest is not None and c.path.name != checkpoint.name), None)


class _Begin(msgspec.Struct, frozen=True):
    """What one rank has saved: the path of the checkpoint, which is the same on all."""

    path: str
    aux: bytes = b""


class _Part(msgspec.Struct, frozen=True):
    """What one rank read, or why it could not."""

    entries: list[FileEntry]
    problem: str = ""


_BEGINS, _PARTS = msgspec.msgpack.Decoder(_Begin), msgspec.msgpack.Decoder(_Part)


class Manifests:
    """Gives the framework's own checkpoints their manifests. All ranks make the same calls.

    Args:
        gather: the all-gather of the job.
        stand: learns which step is durable.
        small: this rank's auxiliary state of a step, for the file that stands beside the native ones; b"" where it is
            not known. Without it there is no such file.
        finished: called when a save is over, before it has a manifest; again for each.

    Attributes:
        place: who this rank is, and who holds the same.
    """

    def __init__(
        self,
        place: Place,
        gather: Gather,
        status: RankStatus,
        aux: Callable[[int], bytes] | None = None,
        finished: Callable[[], None] = lambda: None,
    ) -> None:
        self.place, self._gather, self._status, self._aux = place, gather, status, aux
        self._finished = finished
        self._monitors: list[Monitor] = []
        self._waiting: list[Saved] = []
        self._together = True
        self._numbers = itertools.count(1)

    def bind(self, callbacks: Iterable[Any]) -> None:
        """Find what saves among the callbacks of `Model.train`, and have all ranks number their files alike.

        Raises:
            DeadlineExceeded, ControlError: the ranks could not agree.
            ConfigError: files of the ranks that nobody could put together again.
        """
        self._monitors = [Monitor(callback, self.place.rank) for callback in callbacks if is_monitor(callback)]
        told = told_by_all(self._monitors, self._gather)
        self._together = len({len(each) for each in told}) == 1
        if self._together:
            for monitor, place, number in zip(self._monitors, places_of(told), itertools.count()):
                monitor.align(max(each[number].again for each in told))
                monitor.place = place
        for monitor in self._monitors:
            if monitor.by_time and self.place.world_size > 1:
                log.warning("checkpoints get no manifest: save_checkpoint_seconds lets ranks save at different steps")
        if any(monitor.by_time for monitor in self._monitors):
            self._finished()  # nobody sees when
        self._monitors = [m for m in self._monitors if not (m.by_time and self.place.world_size > 1)]

    def step_end(self, step: int, *, last: bool = False) -> None:
        """After each step, and once more (`last`) when training has ended, behind the framework's own callbacks.

        Never raises for what is on disk or for a rank that is gone: then there is no manifest.

        Args:
            step: completed updates.
            last: saves in the background are over.
        """
        self._waiting += [saved for monitor in self._monitors if (saved := monitor.saved(step)) is not None]
        if not self._waiting:
            return
        try:
            if last or self._all_there():
                waiting, self._waiting = self._waiting, []
                for saved in waiting:
                    self.commit(saved)
        except LastgaspError as error:
            names = ", ".join(saved.path.name for saved in self._waiting)
            self._waiting = []  # asking again would cost every step to come the same wait
            log.error("%s got no manifest and will not be trusted: %s", names, error)

    def commit(self, saved: Saved) -> bool:
        """Write the manifest of a finished checkpoint; all ranks, unless only this one saves at all.

        Returns:
            Whether it is in place, on every rank.
        """
        self._finished()
        try:
            if self._together:
                self._commit(saved)
            else:
                self._write(saved, read_files(data_files(saved.path, saved.layout)))
        except (OSError, LastgaspError) as error:
            log.error("%s got no manifest and will not be trusted: %s", saved.path, error)
            return False
        self._status.durable = max(self._status.durable, saved.step)
        return True

    # -- together ---------------------------------------------------------------------------------

    def _all_there(self) -> bool:
        """Whether the files are there on every rank: a save in the background may be under way."""
        here = all(saved.there for saved in self._waiting)
        if not self._together:
            return here
        return all(self._gather(f"manifest/there/{next(self._numbers)}", b"1" if here else b""))

    def _commit(self, saved: Saved) -> None:
        tag, aux = f"manifest/{next(self._numbers)}", self._aux(saved.step) if self._aux else b""
        begun = self._gather(tag, msgspec.msgpack.encode(_Begin(str(saved.path), aux)))
        payloads = self._gather(f"{tag}/read", msgspec.msgpack.encode(self._read(saved, begun)))
        problem = ""
        if self.place.rank == 0:
            try:
                self._write(saved, _join(payloads))
            except (OSError, LastgaspError) as error:
                problem = str(error) or type(error).__name__
        said = self._gather(f"{tag}/done", problem.encode())
        if any(said):
            raise CheckpointError(b"; ".join(filter(None, said)).decode())

    def _read(self, saved: Saved, begun: Sequence[bytes]) -> _Part:
        """This rank's files, durable and read; rank 0 adds the auxiliary states."""
        told = [_BEGINS.decode(payload) for payload in begun]
        paths = sorted({each.path for each in told})
        if len(paths) > 1:
            return _Part([], f"the ranks save under different names: {', '.join(paths)}")
        try:
            if self.place.rank == 0:
                put_aux(saved, {rank: each.aux for rank, each in enumerate(told) if each.aux})
            return _Part(read_files(self._share(saved.path, data_files(saved.path, saved.layout))))
        except OSError as error:
            return _Part([], f"rank {self.place.rank}: {error}")

    def _share(self, checkpoint: Path, files: Mapping[str, Path]) -> dict[str, Path]:
        """The files that this rank reads: its own, which its node has in memory; rank 0 those of nobody."""
        rank, world = self.place.rank, self.place.world_size
        owners = {}
        for number, name in enumerate(sorted(files)):
            told = rank_of(checkpoint, name)
            owner = (number % world if "/" in name else 0) if told is None else told
            owners[name] = owner if owner < world else 0
        return {name: path for name, path in files.items() if owners[name] == rank}

    def _write(self, saved: Saved, entries: Sequence[FileEntry]) -> None:
        made_by = provenance(self.place, saved.step, "periodic", newest_name(saved.path, saved.layout))
        write_manifest(saved.path, saved.layout, made_by, entries)
        tidy(saved.path.parent, saved.layout)


def put_aux(saved: Saved, aux: Mapping[int, bytes]) -> None:
    """Put the auxiliary states of all ranks beside (or into) the checkpoint, durably. Raises OSError."""
    if aux:
        inside = saved.layout is ITERATIONS
        path = saved.path / AUX_SUFFIX if inside else saved.path.with_name(f"{saved.path.name}.small")
        write_atomically(path, encode_aux(aux))


def tidy(directory: Path, layout: Layout) -> None:
    """Remove what stands beside checkpoints that keep_checkpoint_max has removed. Raises OSError."""
    for path in layout.discover(directory):
        left = layout.parts(path)
        if left and all(part.name.endswith(".small") for part in left):
            for part in left:
                part.unlink(missing_ok=True)
    remove_orphans(directory, layout)


def _join(payloads: Sequence[bytes]) -> list[FileEntry]:
    parts = [_PARTS.decode(payload) for payload in payloads]
    problems = sorted({part.problem for part in parts if part.problem})
    if problems:
        raise CheckpointError("; ".join(problems))
    return [entry for part in parts for entry in part.entries]
