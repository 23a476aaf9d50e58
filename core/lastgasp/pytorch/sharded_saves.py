"""How a step is saved of which each rank writes the parts that it was asked for, from wherever it has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lastgasp.arena import Arena, DamagedArena, verified
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig
from lastgasp.errors import NotSaveable
from lastgasp.ports import Layout, SaveResult, Wanted
from lastgasp.pytorch.sharded import Groups, write_arena
from lastgasp.pytorch.sharded.files import Rename, same
from lastgasp.pytorch.sharded_image import Payload
from lastgasp.pytorch.sharded_parts import aux_of_parts, merge
from lastgasp.pytorch.staged import StagedGasp, contribute, publish
from lastgasp.replicas import require_alike


@dataclass(frozen=True)
class ShardedGasp(StagedGasp):
    """Implements `ports.SaveResult`. `beside`: what `ShardedSaves.dump_small` has returned."""

    beside: Any = field(default=None)


class ShardedSaves:
    """The saving part of `ports.StateSource` and `ports.ShardSource`; a subclass says where the state is.

    Args:
        writer: names who writes; config: where gasps go.

    Attributes:
        arena: this rank's; None where it has none.
        present: the manifests that were there when training began.
        layout, rename: how checkpoints lie, and what the framework calls what is in them.
    """

    layout: Layout
    rename: Rename = staticmethod(same)

    def __init__(self, writer: ManifestWriter, config: GaspConfig) -> None:
        self._writer, self.config = writer, config
        self.rank = writer.place.rank
        self.present: frozenset[str] | None = None
        self.arena: Arena | None = None

    # -- what a subclass says -----------------------------------------------------------------------------

    @property
    def alike(self) -> bool:
        """Ranks that should be replicas hold the same."""
        raise NotImplementedError

    def target(self, step: int) -> Path:
        """Where the gasp of a step will stand."""
        raise NotImplementedError

    def capture(self, step: int) -> bytes:
        """This rank's auxiliary state of `step`; empty when it is no longer known."""
        raise NotImplementedError

    def kept(self, step: int) -> Any:
        """What there is of the step besides tensors. Raises NotSaveable where it is not known any more."""
        raise NotImplementedError

    def dump_small(self, kept: Any) -> Any:
        """What the checkpoint has of the step besides shards, dumped while the step is saved.

        Raises:
            NotSaveable: it is not known any more.
        """
        raise NotImplementedError

    def beside(self, kept: Any, small: Any, aux: Mapping[int, bytes]) -> Mapping[str, Any]:
        """Further files of a checkpoint: name -> what `torch.save` writes. aux: all auxiliary states that were had."""
        raise NotImplementedError

    def reading(self) -> AbstractContextManager[None]:
        """What the live state is read in."""
        return nullcontext()

    def _write(self, staged: Staged, step: int, wanted: Wanted) -> bytes:
        """Write these parts, and say what was written (`part_of`)."""
        raise NotImplementedError

    # -- a save -------------------------------------------------------------------------------------------

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> ShardedGasp:
        """As in the port, where this rank holds all shards."""
        return self.save_shards(step, aux, reason, Wanted(own=True, arenas={}, common=self.rank))

    def save_shards(self, step: int, aux: Mapping[int, bytes], reason: str, wanted: Wanted) -> ShardedGasp:
        """As in the port.

        Raises:
            NotSaveable: this rank's state is not that of `step`, or ranks that should be replicas hold something else.
            OSError: the disk refused; nothing is left.
        """
        require_alike(self.alike)
        with self.reading():
            target, small = self.target(step), self.dump_small(self.kept(step))
            staged = Staged(target, self.layout, sha256=self.config.sha256)
            try:
                part = self._write(staged, step, wanted)
            except BaseException:
                staged.discard()
                raise
        about = self._writer.provenance(step, "gasp", self._writer.newest_beside(target, self.layout))
        return ShardedGasp(staged, about, self.present, dict(aux), part, small)

    @contextmanager
    def _own_arena(self, step: int) -> Iterator[memoryview]:
        """What this rank's arena holds of that step.

        Raises:
            NotSaveable: nothing, or it is damaged.
        """
        assert self.arena is not None
        try:
            with verified(self.arena.fd, self.arena.identity, step) as payload:
                yield payload
        except DamagedArena as error:
            raise NotSaveable(str(error)) from error

    def _write_arenas(
        self, staged: Staged, wanted: Wanted, arenas: Mapping[int, memoryview], groups: Groups | None
    ) -> tuple[list[bytes], dict[int, bytes]]:
        """Write the parts of these ranks; returns their descriptions and auxiliary states."""
        found, aux = list[bytes](), dict[int, bytes]()
        for owner, payload in arenas.items():
            there, plain = Payload(payload), wanted.common == owner
            aux[owner] = there.aux
            found.append(self.write_other(staged, there, wanted, plain=plain, groups=groups))
        return found, aux

    def write_other(
        self, staged: Staged, there: Payload, wanted: Wanted, *, plain: bool, groups: Groups | None
    ) -> bytes:
        """`write_arena` of another rank's parts; `wanted`: as of `save_shards`."""
        return write_arena(
            staged, there.shards, plain=plain, groups=groups, rename=self.rename, verify=wanted.verify
        )

    def merge(self, staged: Staged, own: bytes, parts: Mapping[int, bytes], beside: Mapping[str, Any]) -> None:
        """As `sharded_parts.merge`."""
        merge(staged, own, parts, beside)

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """As in the port: merge the parts of all savers."""
        assert isinstance(result, ShardedGasp)
        aux = {**result.aux, **aux_of_parts(parts)}
        step = result.provenance.step
        self.merge(result.staged, result.part, parts, self.beside(self.kept(step), result.beside, aux))
        return publish(replace(result, aux=aux), self.layout, self.config, self._writer.place)

    def discard(self, result: SaveResult) -> None:
        """As in the port."""
        assert isinstance(result, ShardedGasp)
        result.staged.discard()

    def contribute(self, step: int, path: str) -> str:
        """As `ports.Contributor` says."""
        own = self.capture(step)
        return contribute(Path(path), self.layout, {self.rank: own}) if own else ""
