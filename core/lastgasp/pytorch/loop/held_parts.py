"""What a custom loop's rank holds of a step while its training is entered again."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lastgasp.arena import Arena
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig
from lastgasp.errors import CheckpointError
from lastgasp.ports import Layout
from lastgasp.pytorch.held_shards import HeldShards
from lastgasp.pytorch.loop.record import KEY, SHARDED_FILE, notes_on, record_of
from lastgasp.pytorch.sharded import LAYOUT, gasp_path
from lastgasp.pytorch.sharded.files import DESCRIPTION
from lastgasp.pytorch.sharded_image import Payload
from lastgasp.pytorch.sharded_parts import described, merge

BUCKETS = "buckets"
"""In what a loop leaves in an arena: the layouts of DDP's buckets."""


class HeldParts(HeldShards):
    """Of a custom loop.

    Args:
        arena, writer, config: as of `HeldShards`.
        fit: number of the training in its script.
        partitioned: an optimizer is (`merge_all`).
    """

    layout: Layout = LAYOUT

    def __init__(self, arena: Arena, writer: ManifestWriter, config: GaspConfig, fit: int, partitioned: bool) -> None:
        super().__init__(arena, writer, config)
        self._fit = fit
        self._world_size = writer.place.world_size if partitioned else 0

    def target(self, step: int) -> Path:
        """As of any gasp of the training."""
        return gasp_path(self.config.directory, step, self._fit)

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
        record = record_of(aux, place, True, small[BUCKETS], notes_on(aux, place, small["extra"]))
        return {SHARDED_FILE: loop | {KEY: record}}

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
