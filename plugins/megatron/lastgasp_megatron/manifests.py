"""Manifests of the checkpoints that Megatron itself writes: after each save, all ranks share the reading.

Files on disk are read back, so that what is proved is what landed there. Order: data durable, manifest,
tracker; a crash in between leaves the older checkpoints as the newest good ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lastgasp.checkpoint import DirectoryLayout, FileEntry, Provenance, World, candidates
from lastgasp.checkpoint.adopt import read_entries, remove_orphans, write_manifest
from lastgasp.checkpoint.manifest import Kind
from lastgasp.errors import CheckpointError, LastgaspError
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.ports import Gather
from lastgasp.topology import Place
from lastgasp_megatron.tracker import checkpoint_path, write_tracker

log = logging.getLogger("lastgasp")

LAYOUT = DirectoryLayout("iter_*")
FORMAT = "megatron"


class _Part(msgspec.Struct, frozen=True):
    """What one rank read, or why it could not."""

    entries: list[FileEntry]
    problem: str = ""


_PARTS = msgspec.json.Decoder(_Part)


def provenance(place: Place, step: int, kind: Kind, parent: str | None) -> Provenance:
    """Who wrote it, for the manifest."""
    world = World(world_size=place.world_size, replica_groups=place.replicas)
    return Provenance(
        format=FORMAT, step=step, kind=kind, job=place.job, attempt=place.attempt, world=world, parent=parent
    )


class Manifests:
    """Gives checkpoints their manifests. All ranks call `commit` together.

    Args:
        gather: the all-gather of the job.
        stand: learns which step is durable.
    """

    def __init__(self, place: Place, gather: Gather, status: RankStatus) -> None:
        self._place, self._gather, self._status = place, gather, status
        self._number = 0

    def commit(self, directory: Path, iteration: int) -> bool:
        """Write the manifest of a finished iteration, then the tracker.

        Nothing is raised: without a manifest the older checkpoints stand, and training goes on.

        Returns:
            Whether it is in place, on every rank.
        """
        self._number += 1
        try:
            self._commit(checkpoint_path(directory, iteration), iteration)
        except (OSError, LastgaspError) as error:
            log.error("checkpoint of iteration %d got no manifest and will not be trusted: %s", iteration, error)
            return False
        self._status.durable = max(self._status.durable, iteration)
        return True

    def _commit(self, checkpoint: Path, iteration: int) -> None:
        share = (self._place.rank, self._place.world_size)
        payloads = self._gather(f"manifest/{self._number}", msgspec.json.encode(_read_share(checkpoint, share)))
        problem = ""
        if self._place.rank == 0:
            try:
                made_by = provenance(self._place, iteration, "periodic", newest_name(checkpoint))
                write_manifest(checkpoint, LAYOUT, made_by, _join(payloads))
                remove_orphans(checkpoint.parent, LAYOUT)  # --save-retain-interval removes checkpoints
                write_tracker(checkpoint.parent, iteration)
            except (OSError, LastgaspError) as error:
                problem = str(error)
        said = self._gather(f"manifest/{self._number}/done", problem.encode())
        if any(said):
            raise CheckpointError(b"; ".join(filter(None, said)).decode())


def newest_name(checkpoint: Path) -> str | None:
    """The newest other checkpoint beside it that has a manifest; None where there is none."""
    found = candidates([checkpoint.parent], LAYOUT)
    return next((c.path.name for c in found if c.manifest is not None and c.path.name != checkpoint.name), None)


def _read_share(checkpoint: Path, share: tuple[int, int]) -> _Part:
    try:
        return _Part(read_entries(checkpoint, LAYOUT, share))
    except OSError as error:
        return _Part([], f"rank {share[0]}: {error}")


def _join(payloads: Sequence[bytes]) -> list[FileEntry]:
    parts = [_PARTS.decode(payload) for payload in payloads]
    problems = [part.problem for part in parts if part.problem]
    if problems:
        raise CheckpointError("; ".join(problems))
    return [entry for part in parts for entry in part.entries]
