"""The part of a step that a rank holds while its training is entered again: its arena, and nothing else."""

from __future__ import annotations

from contextlib import ExitStack

from lastgasp.arena import Arena
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig
from lastgasp.errors import NotSaveable
from lastgasp.ports import Wanted
from lastgasp.pytorch.sharded_image import Payload
from lastgasp.pytorch.sharded_parts import part_of
from lastgasp.pytorch.sharded_saves import ShardedSaves
from lastgasp.testing import faults


class HeldShards(ShardedSaves):
    """Implements `ports.StateSource` and `ports.ShardSource`, on whatever thread saves.

    A subclass says where gasps stand and what is in them besides shards; it must not keep the model alive.

    Args:
        arena: which holds the step; writer: names who writes; config: where gasps go.

    Attributes:
        alike: ranks that should be replicas held the same.
    """

    buffer_fd = -1
    alike = True
    arena: Arena

    def __init__(self, arena: Arena, writer: ManifestWriter, config: GaspConfig) -> None:
        super().__init__(writer, config)
        self.arena = arena

    def capture(self, step: int) -> bytes:
        """From the arena."""
        try:
            with self._own_arena(step) as payload:
                return Payload(payload).aux
        except NotSaveable:
            return b""

    def _write(self, staged: Staged, step: int, wanted: Wanted) -> bytes:
        arenas = dict(wanted.arenas)
        with ExitStack() as stack:
            if wanted.own:
                arenas[self.rank] = stack.enter_context(self._own_arena(step))
            found, aux = self._write_arenas(staged, wanted, arenas, None)
        faults.fire_at("gasp_save")
        return part_of(staged, found, {rank: data for rank, data in aux.items() if data})
