"""The state of a MindSpore run as the engine's port (ports.StateSource): checkpoints in MindFormers' own layout."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from lastgasp.adapter import GaspConfig, ManifestWriter, Moved, NotSaveable, SaveResult, clock
from lastgasp.adapter.arenas import Arena, DamagedArena, Wanted, verified
from lastgasp.adapter.checkpoint import Candidate, FileEntry, SavedPart, Staged, part_of, prune, read_files
from lastgasp.adapter.files import DISK, unique_temp
from lastgasp.adapter.mindspore import encode_aux
from lastgasp.adapter.testing import faults
from lastgasp_mindformers.aux_state import Numbers, Statistic, decode
from lastgasp_mindformers.image import Image
from lastgasp_mindformers.listing import by_samples
from lastgasp_mindformers.state import MindSporeState
from lastgasp_mindformers.targets import Target

log = logging.getLogger("lastgasp")


@dataclass(frozen=True, kw_only=True)
class _Saved(SavedPart):
    """Args: where: the checkpoint's names."""

    where: Target


class Writer(Protocol):
    """How checkpoints of this job are named and written (`native.Native`, `iterations.Iterations`)."""

    @property
    def directory(self) -> Path:
        """The directory of checkpoints."""

    def target(self, numbers: Numbers, ranks: Iterable[int]) -> Target:
        """The path of the checkpoint of a step of so many ranks."""

    def write(self, folder: Path, files: Sequence[str], numbers: Numbers, statistics: Mapping[str, Any]) -> None:
        """The live parameters, and `statistics` as given, into the files of one rank."""


class ShardWriter(Writer, Protocol):
    """One that also writes what only one rank holds, from memory that has outlived the rank (`native.Native`)."""

    def parameters(self) -> Mapping[str, Any]:
        """The live parameters that are written, by name."""

    def write_image(self, folder: Path, files: Sequence[str], image: Image, numbers: Numbers,
                    statistics: Mapping[str, Any]) -> None:  # fmt: skip
        """As `write`, with those of the image in place of the live ones."""


class MindSporeSource:
    """Called by the engine's threads while the training thread is in the graph, waiting at the gate, or has raised.

    Args:
        state: the state of training; native: how checkpoints are named and written.
        writer: names who writes; config: how many gasps to keep.
        note: reports what people must know about what is saved (`Session.note`).

    Attributes:
        arena: this rank's, where it alone holds what it holds; else None.
        present: the manifests that were there when training began (`CheckpointSelector.present`).
        in_order: which checkpoints of a directory count towards `keep`, newest first.
    """

    def __init__(
        self,
        state: MindSporeState,
        native: Writer,
        writer: ManifestWriter,
        config: GaspConfig,
        note: Callable[[str], None] = lambda text: log.warning("%s", text),
    ) -> None:
        self._state, self._native, self._writer, self._config, self._note = state, native, writer, config, note
        self.rank = writer.place.rank
        self.arena: Arena | None = None
        self.present: frozenset[str] | None = None
        self.in_order: Callable[[list[Candidate]], list[Candidate]] = by_samples

    @property
    def buffer_fd(self) -> int:
        """The crash-safe buffer's descriptor."""
        return self._state.aux.buffer.fd

    def capture(self, step: int) -> bytes:
        """This rank's auxiliary state of `step`; empty when it is no longer known."""
        return self._state.aux.read(step)

    # -- saving -----------------------------------------------------------------------------------

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> SavedPart:
        """Write the files of every rank that holds the same as this one, dead or alive, under a temporary name."""
        return self.save_shards(step, aux, reason, Wanted(own=True, arenas={}, common=self.rank))

    def save_shards(self, step: int, aux: Mapping[int, bytes], reason: str, wanted: Wanted) -> SavedPart:
        """The same, if its own are wanted, and the files of the ranks of the arenas."""
        wanted.verify()
        images = [Image(payload) for payload in wanted.arenas.values()]
        states = {image.rank: image.aux for image in images} | {rank: data for rank, data in aux.items() if data}
        if wanted.own:
            self._require(step)
            states[self.rank] = self.capture(step)
            if images and (why := self.changed_since_copied(step)):
                raise NotSaveable(why)
        numbers = self._state.numbers if wanted.own else images[0].numbers
        where = self._native.target(numbers, range(self._writer.place.world_size))
        target, begun = self._native.directory / where.name, clock.wall_ns()
        staged = Staged(target, where.layout, sha256=self._config.sha256)
        try:
            nbytes = self._write(staged, where, states, images, own=wanted.own)
            if self._writes_first([self.rank] * wanted.own + [image.rank for image in images]):
                nbytes += staged.open(where.aux).write(encode_aux(states))
            faults.fire_at("gasp_save", step)
            if wanted.own:
                if why := self._state.ahead():
                    raise NotSaveable(why)
                self._require(step)
            part = part_of(staged)
        except BaseException:
            staged.discard()
            raise
        return _Saved(step=step, staged=staged, nbytes=nbytes, first_byte_ns=begun, part=part, where=where)

    def _require(self, step: int) -> None:
        why = self._state.stands_on(step)
        if not why:
            return
        if self._state.numbers.step > step or "has begun" in why:
            raise Moved(why)
        raise NotSaveable(why)

    def _ranks(self) -> tuple[int, ...]:
        """Those whose files this rank can write."""
        return next(group for group in self._writer.place.replicas if self.rank in group)

    def _writes_first(self, owners: Iterable[int]) -> bool:
        """Whether who writes what those ranks hold writes what belongs to all ranks."""
        return bool(set(owners) & set(self._writer.place.replicas[0]))

    def changed_since_copied(self, step: int) -> str:
        """Why the copy of `step` in this rank's arena is not what it holds now, though it is at that step; or empty."""
        if self.arena is None:
            return ""
        left_out = {one.name for one in _statistics(self.capture(step))}
        try:
            with verified(self.arena.fd, self.arena.identity, step) as payload:
                changed = Image(payload).differing(self._shards().parameters(), left_out)
        except DamagedArena:  # it does not hold the step, which was not copied, or not by the training thread
            return ""
        more = f" and {len(changed) - 3} others" * (len(changed) > 3)
        return f"callbacks have changed {', '.join(changed[:3])}{more} behind the copy of the step" if changed else ""

    def parameters(self) -> Mapping[str, Any]:
        """What is copied into the arena. Raises ValueError: a parameter that cannot be read."""
        return self._shards().parameters()

    def _shards(self) -> ShardWriter:
        return cast(ShardWriter, self._native)

    def _write(
        self, staged: Staged, where: Target, states: Mapping[int, bytes], images: Sequence[Image], *, own: bool
    ) -> int:
        """The files of each rank. Returns how many bytes."""
        folder, entries = unique_temp(staged.target), list[FileEntry]()
        try:
            if own:
                entries += self._write_own(folder, where, states)
            for image in images:
                paths = _made(folder, where.files[image.rank])
                values = {one.name: one.array() for one in _statistics(states[image.rank])}
                numbers = decode(states[image.rank]).numbers
                self._shards().write_image(folder, where.files[image.rank], image, numbers, values)
                entries += read_files(paths, sha256=self._config.sha256)
            whole = where.layout.owns(staged.target, where.name)  # a directory, and its temporary name
            staged.adopt(folder / where.name if whole else folder, tuple(entries))
        finally:
            with contextlib.suppress(OSError):
                DISK.remove(folder)
        return sum(entry.size for entry in entries)

    def _write_own(self, folder: Path, where: Target, states: Mapping[int, bytes]) -> list[FileEntry]:
        """Those with the same content share their bytes on disk."""
        entries = list[FileEntry]()
        written: dict[tuple[Statistic, ...], list[FileEntry]] = {}
        own = _statistics(states[self.rank])
        self._compare_still(states)
        for rank in self._ranks():
            statistics = _statistics(states[rank]) if rank in states else own
            files = where.files[rank]
            paths = _made(folder, files)
            same = written.get(statistics)
            if same is None or not _linked(folder, same, sorted(files)):
                values = {one.name: one.array() for one in statistics}
                self._native.write(folder, files, self._state.numbers, values)
                same = written[statistics] = read_files(paths, sha256=self._config.sha256)
            pairs = zip(same, sorted(files), strict=True)
            entries += [msgspec.structs.replace(entry, path=relative) for entry, relative in pairs]
        return entries

    def _compare_still(self, states: Mapping[int, bytes]) -> None:
        """Note whose constants will be those of this rank, since nothing holds their own. Raises NotSaveable."""
        mine = states[self.rank]
        still, names = _still(mine), {one.name for one in _statistics(mine)}
        others = [rank for rank in self._ranks() if _still(states.get(rank, b"")) not in (b"", still)]
        for rank in others:
            if {one.name for one in _statistics(states[rank])} != names:
                raise NotSaveable(f"what changes on rank {rank} is not what changes on rank {self.rank}")
        if not others:
            return
        named = f"rank {', '.join(map(str, others))}"
        if changed := self._state.frozen.not_still():
            raise NotSaveable(
                f"{named} began with other values than this one in parameters that have changed: {changed}"
            )
        self._note(
            f"{named} began with other values than rank {self.rank} in parameters of the network that do not change: "
            f"saved are those of rank {self.rank}"
        )

    # -- publishing -------------------------------------------------------------------------------

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """Bring all savers' files together and make them visible, `meta.json` and the manifest last."""
        assert isinstance(result, _Saved)
        target, layout = result.staged.target, result.where.layout
        about = self._writer.provenance(result.step, "gasp", self._writer.newest_beside(target, layout))
        kept = result.publish(parts, about, result.where.markers, self.present)
        prune(self._config, layout, target, self._writer.place, in_order=self.in_order)
        return kept

    def discard(self, result: SaveResult) -> None:
        """Remove what was written. Never raises."""
        assert isinstance(result, SavedPart)
        result.staged.discard()


def _statistics(data: bytes) -> tuple[Statistic, ...]:
    return decode(data).statistics if data else ()


def _still(data: bytes) -> bytes:
    return decode(data).still if data else b""


def _made(folder: Path, files: Sequence[str]) -> dict[str, Path]:
    """Where they go, with the directories for them."""
    paths = {relative: folder / relative for relative in files}
    for path in paths.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    return paths


def _linked(folder: Path, existing: Sequence[FileEntry], files: Sequence[str]) -> bool:
    """Whether `files` are now other names of `existing`: native files are replaced, never changed in place."""
    try:
        for entry, relative in zip(existing, files, strict=True):
            os.link(folder / entry.path, folder / relative)
    except OSError:  # a file system without hard links
        return False
    return True
