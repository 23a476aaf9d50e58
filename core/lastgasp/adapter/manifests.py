"""Manifests of the checkpoints that a framework itself writes: after each save, all ranks together.

Files on disk are made durable and read back, so that what is proved is what landed there. Order: data durable,
manifest, then whatever names the checkpoint to the framework (a tracker); a crash in between leaves the older
checkpoints as the newest good ones. Nothing here ends a training: without a manifest the older checkpoints remain.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lastgasp._fs import remove_stale_temps
from lastgasp.checkpoint import FileEntry, Manifest, Provenance, manifest
from lastgasp.checkpoint.adopt import data_files, read_files, remove_orphans, write_manifest
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.errors import CheckpointError, LastgaspError
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.ports import Gather, Layout
from lastgasp.topology import Place

log = logging.getLogger("lastgasp")


@dataclass(frozen=True)
class NativeSave:
    """A checkpoint that the framework has finished writing, as far as this rank knows.

    Args:
        path: the same on all ranks; layout: of its files.
        step: completed updates.
        aux: this rank's auxiliary state of that step, for a format that has room for it beside the native files.
    """

    path: Path
    layout: Layout
    step: int
    aux: bytes = b""


class _Begun(msgspec.Struct, frozen=True):
    """What one rank has saved."""

    path: str
    aux: bytes = b""


class _Part(msgspec.Struct, frozen=True):
    """What one rank read, or why it could not."""

    entries: list[FileEntry]
    problem: str = ""


_BEGUN, _PARTS = msgspec.msgpack.Decoder(_Begun), msgspec.msgpack.Decoder(_Part)
_encode = msgspec.msgpack.encode


class NativeManifests:
    """Gives the framework's own checkpoints their manifests. All ranks make the same calls.

    A framework that needs more overrides `share`, `add_aux` and `committed`.

    Args:
        writer: names who writes; its `place` is replaced once the replicas are known.
        gather: the all-gather of the job.
        status: learns which step is durable.
    """

    def __init__(self, writer: ManifestWriter, gather: Gather, status: RankStatus) -> None:
        self.writer, self._gather, self._status = writer, gather, status
        self._numbers = itertools.count(1)

    @property
    def place(self) -> Place:
        """Who this rank is."""
        return self.writer.place

    def commit(self, save: NativeSave, *, alone: bool = False) -> bool:
        """Write the manifest of a finished checkpoint. All ranks call it together; nothing is raised.

        Args:
            alone: this rank is the only one that saves here, and asks nobody.

        Returns:
            Whether it is in place, on every rank.
        """
        try:
            if alone:
                self._write(save, self._digested(data_files(save.path, save.layout)))
            else:
                self._commit(save)
        except (OSError, LastgaspError) as error:
            found = manifest.read(save.layout.manifest_path(save.path))
            if isinstance(found, Manifest) and (found.kind, found.step) == ("gasp", save.step):
                log.warning("%s is what was saved after a fault, not the framework's own: %s", save.path, error)
            else:
                log.error("%s got no manifest and will not be trusted: %s", save.path, error)
            return False
        self._status.durable = max(self._status.durable, save.step)
        return True

    # -- what a framework may change --------------------------------------------------------------

    def share(self, save: NativeSave, files: Mapping[str, Path]) -> dict[str, Path]:
        """The files that this rank reads: every n-th. Each file must be read by one rank; called on all of them."""
        rank, world = self.place.rank, self.place.world_size
        return dict(sorted(files.items())[rank::world])

    def add_aux(self, save: NativeSave, aux: Mapping[int, bytes]) -> None:
        """Put the auxiliary states of all ranks beside the native files, durably. On rank 0, before anybody reads.

        Raises:
            OSError: the disk refused; the checkpoint then gets no manifest.
        """

    def committed(self, save: NativeSave) -> None:
        """The manifest is in place: name the checkpoint to the framework, tidy up. On rank 0.

        Raises:
            OSError: as `add_aux`.
        """
        remove_orphans(save.path.parent, save.layout)
        remove_stale_temps(save.path.parent)  # of a rank that was replaced in its save: no start comes that would do it

    # -- inside -----------------------------------------------------------------------------------

    def _commit(self, save: NativeSave) -> None:
        tag = f"manifest/{next(self._numbers)}"
        begun = [_BEGUN.decode(part) for part in self._gather(tag, _encode(_Begun(str(save.path), save.aux)))]
        problem = self._add(save, begun)
        if any(one.aux for one in begun):  # only now do all ranks see the same files
            problem = self._gather(f"{tag}/added", problem.encode())[0].decode()
        payloads = self._gather(f"{tag}/read", _encode(self._read(save, begun, problem)))
        problem = ""
        if self.place.rank == 0:
            try:
                self._write(save, _join(payloads))
            except (OSError, LastgaspError) as error:
                problem = str(error) or type(error).__name__
        said = self._gather(f"{tag}/done", problem.encode())
        if any(said):
            raise CheckpointError(b"; ".join(filter(None, said)).decode())

    def _add(self, save: NativeSave, begun: Sequence[_Begun]) -> str:
        """On rank 0, have the auxiliary states put beside the files. Returns why that was not possible, or nothing."""
        try:
            if self.place.rank == 0 and len({one.path for one in begun}) == 1:
                self.add_aux(save, {rank: one.aux for rank, one in enumerate(begun) if one.aux})
        except OSError as error:
            return f"rank 0: {error}"
        return ""

    def _read(self, save: NativeSave, begun: Sequence[_Begun], problem: str) -> _Part:
        """This rank's files, durable and read."""
        paths = sorted({one.path for one in begun})
        if len(paths) > 1:
            problem = f"the ranks save under different names: {', '.join(paths)}"
        if problem:
            return _Part([], problem)
        try:
            return _Part(self._digested(self.share(save, data_files(save.path, save.layout))))
        except OSError as error:
            return _Part([], f"rank {self.place.rank}: {error}")

    def _digested(self, files: Mapping[str, Path]) -> list[FileEntry]:
        return read_files(files, sha256=self.writer.sha256)

    def _write(self, save: NativeSave, entries: Sequence[FileEntry]) -> None:
        write_manifest(save.path, save.layout, self.provenance(save), entries)
        self.committed(save)

    def provenance(self, save: NativeSave) -> Provenance:
        """Who wrote it, for the manifest."""
        return self.writer.provenance(save.step, "periodic", self.writer.newest_beside(save.path, save.layout))


def _join(payloads: Sequence[bytes]) -> list[FileEntry]:
    parts = [_PARTS.decode(payload) for payload in payloads]
    problems = sorted({part.problem for part in parts if part.problem})
    if problems:
        raise CheckpointError("; ".join(problems))
    return [entry for part in parts for entry in part.entries]
