"""The part of a step that a rank holds while its training is entered again: its arena, and nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lastgasp.arena import Arena
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig
from lastgasp.errors import CheckpointError, NotSaveable
from lastgasp.ports import Layout, Wanted
from lastgasp.pytorch.loop.record import KEY, SHARDED_FILE, notes_on, record_of
from lastgasp.pytorch.sharded import LAYOUT, gasp_path
from lastgasp.pytorch.sharded.files import DESCRIPTION
from lastgasp.pytorch.sharded_image import Payload
from lastgasp.pytorch.sharded_parts import described, merge, part_of
from lastgasp.pytorch.sharded_saves import ShardedSaves
from lastgasp.testing import faults

BUCKETS = "buckets"
"""In what a loop leaves in an arena: the layouts of DDP's buckets."""


class HeldParts(ShardedSaves):
    """Implements `ports.StateSource` and `ports.ShardSource`, on whatever thread saves.

    Args:
        arena: which holds the step; writer: names who writes; config: where gasps go.
        fit: number of the training in its script.
        partitioned: an optimizer is (`merge_all`).

    Attributes:
        alike: ranks that should be replicas held the same.
    """

    layout: Layout = LAYOUT
    buffer_fd = -1
    alike = True
    arena: Arena

    def __init__(self, arena: Arena, writer: ManifestWriter, config: GaspConfig, fit: int, partitioned: bool) -> None:
        super().__init__(writer, config)
        self.arena, self._fit = arena, fit
        self._world_size = writer.place.world_size if partitioned else 0

    def target(self, step: int) -> Path:
        """As of any gasp of the training."""
        return gasp_path(self.config.directory, step, self._fit)

    def capture(self, step: int) -> bytes:
        """From the arena."""
        try:
            with self._own_arena(step) as payload:
                return Payload(payload).aux
        except NotSaveable:
            return b""

    def kept(self, step: int) -> dict[str, Any]:
        """What a checkpoint of the loop has besides tensors, but for the key `lastgasp`."""
        with self._own_arena(step) as payload:
            _, small = pickle.loads(Payload(payload).more)
        found: dict[str, Any] = small
        return found

    def dump_small(self, kept: dict[str, Any]) -> dict[str, Any]:
        """The same."""
        return kept

    def beside(self, kept: dict[str, Any], small: dict[str, Any], aux: Mapping[int, bytes]) -> Mapping[str, Any]:
        """As of a `ShardedLoop`."""
        place = self._writer.place
        loop = {name: value for name, value in small.items() if name != BUCKETS}
        record = record_of(aux, place, True, small[BUCKETS], notes_on(aux, place))
        return {SHARDED_FILE: loop | {KEY: record}}

    def _write(self, staged: Staged, step: int, wanted: Wanted) -> bytes:
        arenas = dict(wanted.arenas)
        with ExitStack() as stack:
            if wanted.own:
                arenas[self.rank] = stack.enter_context(self._own_arena(step))
            found, aux = self._write_arenas(staged, wanted, arenas, None)
        faults.fire_at("gasp_save")
        return part_of(staged, found, {rank: data for rank, data in aux.items() if data})

    def merge(self, staged: Staged, own: bytes, parts: Mapping[int, bytes], beside: Mapping[str, Any]) -> None:
        """As `merge_all`."""
        merge_all(staged, own, parts, beside, self._world_size)


def merge_all(
    staged: Staged, own: bytes, parts: Mapping[int, bytes], beside: Mapping[str, Any], world_size: int
) -> None:
    """As `sharded_parts.merge`.

    Args:
        world_size: where an optimizer is partitioned, so that no rank knows what the others have written; else 0.

    Raises:
        CheckpointError: shards are missing.
    """
    ranks = sorted(DESCRIPTION.decode(one).rank for one in described(parts)) if world_size else []
    if ranks != list(range(world_size)):
        raise CheckpointError(f"{staged.target}: files of ranks {ranks}, and those of all are needed")
    merge(staged, own, parts, beside)
