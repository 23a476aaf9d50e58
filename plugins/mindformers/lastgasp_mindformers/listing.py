"""List what a job can resume from and rule out what cannot be meant; read-only, the same on every rank."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lastgasp.adapter import Layout, Place
from lastgasp.adapter.checkpoint import Candidate, Manifest, candidates, next_path, put_back
from lastgasp.adapter.checkpoint import read_manifest as read
from lastgasp.adapter.mindspore import (
    ITERATIONS,
    LEGACY,
    PLAIN,
    LegacyName,
    ModelCheckpointLayout,
    layout_of,
    rank_of,
    told_batch,
    told_step,
)
from lastgasp_mindformers.base import Base, key, lost_key
from lastgasp_mindformers.tracker import read_meta, read_tracker

ENDINGS = (".ckpt", ".safetensors")
"""Endings of files with parameters."""
_NOT_OF_TRAINING = ("strategy", ".corrupt")
"""MindSpore's strategy files have the endings of checkpoints, and say how those are sharded."""
_AT, _AGAIN = re.compile(r"-\d+_\d+(_breakpoint)?\.\w+$"), re.compile(r"_\d+$")
"""What follows the prefix in the name of a file, and the `_K` that MindSpore adds to the prefix."""


@dataclasses.dataclass(frozen=True)
class CheckpointCatalog:
    """Where checkpoints are looked for.

    Args:
        places: directories and the layout of checkpoints in each, in no order.
        ranks: how many this job has.
        bare: whether checkpoints without a manifest may be taken.
        same: whether all ranks should hold the same, so that one file may be for all.
        apart: directory, resolved, and prefix of files that are no checkpoints of this training, unless one has a
            manifest.
        base: the weights that this training began from, where it is to resume from its own checkpoints only.
    """

    places: Sequence[tuple[Path, Layout]]
    ranks: int
    bare: bool = True
    same: bool = True
    apart: frozenset[tuple[str, str]] = frozenset()
    base: Base | None = None

    @property
    def folders(self) -> list[Path]:
        """The directories, each once."""
        return list(dict.fromkeys(folder for folder, _ in self.places))

    def all(self) -> list[Candidate]:
        """Newest first. Raises ConfigError when a directory cannot be listed."""
        base = self.base
        own = [(c, layout) for c, layout in self._listed() if base is None or not base.is_other(c)]
        return by_samples(self._judged(c, layout) for c, layout in own)

    def others(self) -> list[Candidate]:
        """Of other trainings, in no order. Raises ConfigError as `all`."""
        return [] if self.base is None else [c for c, _ in self._listed() if self.base.is_other(c)]

    def there(self) -> set[str]:
        """Everything of a training that there is, as `Base.before` has it."""
        paths = [*(c.path for c, _ in self._listed()), *map(Path, self.unknown())]
        return {key(path) for path in paths} | {lost_key(*one) for one in self.lost().items()}

    def _listed(self) -> list[tuple[Candidate, Layout]]:
        listed = [(c, layout) for folder, layout in self.places for c in candidates([folder], layout)]
        return [(c, layout) for c, layout in listed if not self._is_apart(c, layout)]

    def put_back(self) -> None:
        """Return what a gasp that was killed had moved aside; for rank 0, before it lists."""
        for folder, layout in self.places:
            put_back(folder, layout)

    def unknown(self) -> dict[str, str]:
        """Files of training that match no layout, with the reason: a directory with such files is not empty."""
        found: dict[str, str] = {}
        for folder, layout in self.places:
            known = {
                name for at, way in self.places if at == folder for path in way.discover(at) for name in way.files(path)
            }
            for name in _of_training(folder, layout):
                if name not in known and not self._was_there(key(folder / name)):
                    found[str(folder / name)] = "lastgasp cannot tell which checkpoint of this training it belongs to"
        return found

    def never_finished(self, candidate: Candidate) -> bool:
        """Whether these are the remains of an interrupted save, and not of lost files."""
        if candidate.manifest is not None:
            return False
        if candidate.path.is_dir():
            return read_tracker(candidate.path.parent) is None
        if _cut_short(candidate.path, LEGACY):
            return True
        name, layout = LegacyName.parse(candidate.path.name), layout_of(candidate.path)
        lacking = _lacking(candidate.path, layout, self.ranks)
        if name is None:
            return bool(lacking)
        at = (name.epoch, name.within)
        return bool(lacking) and not any(read_meta(candidate.path.parent, rank) == at for rank in lacking)

    def lost(self) -> dict[str, str]:
        """Directories whose markers name checkpoints, with the reason to think that they are lost."""
        found = {}
        for folder, layout in self.places:
            metas = {rank: at for rank in range(self.ranks) if (at := read_meta(folder, rank)) is not None}
            if metas and layout is LEGACY:
                epoch, step = max(metas.values())
                found[str(folder)] = f"its meta.json names epoch {epoch}, step {step}, and no checkpoint is there"
            tracker = read_tracker(folder) if layout is ITERATIONS else None
            if tracker is not None:
                found[str(folder)] = f"its tracker names iteration {tracker}, and no checkpoint is there"
        return {folder: why for folder, why in found.items() if not self._was_there(lost_key(folder, why))}

    def _was_there(self, what: str) -> bool:
        return self.base is not None and what in self.base.before

    # -- judgement --------------------------------------------------------------------------------

    def _is_apart(self, candidate: Candidate, layout: Layout) -> bool:
        if not self.apart or layout.manifest_path(candidate.path).exists():
            return False
        files = layout.files(candidate.path).values()
        named = [(os.path.realpath(file.parent), _AT.sub("", file.name)) for file in files]
        return any({(at, prefix), (at, _AGAIN.sub("", prefix))} & self.apart for at, prefix in named)

    def _judged(self, candidate: Candidate, layout: Layout) -> Candidate:
        if not self.same and isinstance(layout, ModelCheckpointLayout) and not _ranks(candidate.path, layout):
            why = f"is one file, but each of the {self.ranks} ranks of this job holds something of its own"
            return dataclasses.replace(candidate, problem=why)
        if candidate.manifest is not None:
            problem = candidate.problem or self._of_another_size(candidate, layout)
            return dataclasses.replace(candidate, problem=problem)
        if layout.manifest_path(candidate.path).exists():
            return candidate  # there is one, but it cannot be used
        if layout is not ITERATIONS:
            candidate = dataclasses.replace(candidate, step=told_step(candidate.path, layout))
        if not self.bare:
            return candidate
        return dataclasses.replace(candidate, problem=self._unfinished(candidate, layout))

    def _of_another_size(self, candidate: Candidate, layout: Layout) -> str | None:
        """Sharded files are useless to a job of another size; equal ones are not, if there is one for each rank."""
        assert candidate.manifest is not None
        world = candidate.manifest.world
        if layout is ITERATIONS or world.world_size == self.ranks:
            return None
        if isinstance(layout, ModelCheckpointLayout) and not _ranks(candidate.path, layout):
            return None  # one file for all
        if len(world.replica_groups) == 1 and world.world_size > self.ranks:
            return None
        return f"was saved by {world.world_size} ranks, and this job has {self.ranks}"

    def _unfinished(self, candidate: Candidate, layout: Layout) -> str | None:
        """Why a checkpoint without a manifest cannot be meant to be loaded; None if only its content can show that."""
        if _cut_short(candidate.path, layout):
            return "its save was cut short"
        if layout is ITERATIONS:
            tracker = read_tracker(candidate.path.parent)
            if tracker is None or (candidate.step or 0) > tracker:
                return f"has no manifest, and the tracker says {tracker}: its save was not finished"
            return None
        lacking = _lacking(candidate.path, layout, self.ranks)
        if lacking:
            ranks = ", ".join(map(str, lacking[:5]))
            return f"has no manifest and no file of rank {ranks}: its save was not finished, or files were lost"
        extra = sorted(rank for rank in _ranks(candidate.path, layout) if rank >= self.ranks)
        if extra:
            return f"has no manifest and files of {extra[-1] + 1} ranks, and this job has {self.ranks}"
        return None if candidate.step is not None else "does not say how many steps it holds"


def by_samples(found: Iterable[Candidate]) -> list[Candidate]:
    """Newest first. A resume with another global batch size makes MindFormers count in steps of that size from then on.

    What does not tell its own counts as the largest: it is tried too early rather than passed over.
    """
    listed = list(found)
    batches = {c.path: told_batch(c.path, way) for c in listed if (way := layout_of(c.path)) in (LEGACY, ITERATIONS)}
    if len(known := {batch for batch in batches.values() if batch}) > 1:
        listed = [
            c if c.step is None else dataclasses.replace(c, samples=c.step * (batches.get(c.path) or max(known)))
            for c in listed
        ]
    return sorted(listed, key=lambda c: c.age_key, reverse=True)


def catalog_of(
    places: Iterable[tuple[Path, Layout]],
    job: Place,
    bare: bool,
    apart: Iterable[tuple[str, str]] = (),
    base: Base | None = None,
) -> CheckpointCatalog:
    """Each place once, for this job."""
    once = list(dict.fromkeys((folder.absolute(), layout) for folder, layout in places))
    return CheckpointCatalog(once, job.world_size, bare, len(job.replicas) == 1, frozenset(apart), base)


def _cut_short(checkpoint: Path, layout: Layout) -> bool:
    """Whether a gasp was killed while its files were put in place, so that some of them are missing.

    If all exist although it was killed, they belong to an earlier save, which is judged by its content.
    """
    waiting, there = read(next_path(layout.manifest_path(checkpoint))), set(layout.files(checkpoint))
    return isinstance(waiting, Manifest) and any(entry.path not in there for entry in waiting.files)


def _ranks(checkpoint: Path, layout: Layout) -> set[int]:
    return {rank for name in layout.files(checkpoint) if (rank := rank_of(checkpoint, name)) is not None}


def _lacking(checkpoint: Path, layout: Layout, ranks: int) -> list[int]:
    """Ranks without a file; none where one file is for all."""
    there = _ranks(checkpoint, layout)
    if isinstance(layout, ModelCheckpointLayout) and not there and layout.files(checkpoint):
        return []
    return [rank for rank in range(ranks) if rank not in there]


def _of_training(folder: Path, layout: Layout) -> list[str]:
    """Files that look like a part of a checkpoint, in `folder` and in the folders of ranks in it."""
    lies = layout if isinstance(layout, ModelCheckpointLayout) else PLAIN
    return [name for name in lies.everything(folder) if _is_of_training(folder, name)]


def _is_of_training(folder: Path, name: str) -> bool:
    if any(word in name for word in _NOT_OF_TRAINING):
        return False
    if name.endswith(ENDINGS):
        return (folder / name).is_file()
    return name.startswith("iteration_") and (folder / name).is_dir()
