"""A loop around a DeepSpeed engine: each rank's own files, from it or from its arena, as one DeepSpeed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import Tensor, nn

from lastgasp.adapter.selection import CheckpointSelector
from lastgasp.arena_filling import ArenaMode
from lastgasp.arena_taking import left_by_all
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.errors import CheckpointError
from lastgasp.ports import Layout, Wanted
from lastgasp.pytorch.deepspeed import Captured, capture, files_of, parse, recovery_scripts, restore
from lastgasp.pytorch.deepspeed.engine import COUNTERS, counters
from lastgasp.pytorch.deepspeed.layout import LAYOUT
from lastgasp.pytorch.io import save_verified
from lastgasp.pytorch.loop.sharded_loop import ShardedLoop
from lastgasp.pytorch.loop.state import Snapshot
from lastgasp.pytorch.sharded import Groups
from lastgasp.pytorch.sharded.table import Path
from lastgasp.pytorch.sharded_image import Payload
from lastgasp.pytorch.sharded_parts import bring, described

_FILES = "a DeepSpeed engine is filled from files alone"


class Written(msgspec.Struct, frozen=True):
    """Files of one rank. `tag`: the folder in the checkpoint."""

    rank: int
    tag: str


_WRITTEN = msgspec.msgpack.Decoder(Written)


class EngineParts:
    """What `ShardedSource` asks of the parts of a rank, for an engine.

    Args:
        engine: of this rank.
    """

    def __init__(self, engine: Any, rank: int, world_size: int) -> None:
        self._engine, self._rank, self._world_size = engine, rank, world_size
        self.extra_modules: dict[Path, nn.Module] = {}  # theirs is in what `look` keeps
        self.look()

    def look(self) -> bool:
        """At the end of a step: what is no tensor is kept as it is now."""
        self.now: Captured = capture(files_of(self._engine), self._rank, self._world_size)
        return True

    def payload(
        self, groups: Groups | None = None, extra: Mapping[Path, Any] | None = None
    ) -> list[bytes | memoryview]:
        """As of `Captured`; the optimizer's groups are in it anyway."""
        return self.now.payload()

    def digests(self) -> dict[str, bytes]:
        """No rank holds what another one holds."""
        return {}

    def shared(self) -> list[Any]:
        """Nothing is saved once for several ranks besides rank 0's own files."""
        return []

    def states_of_one(self) -> dict[str, bytes]:
        """Each rank writes all of its own."""
        return {}


class EngineLoop(ShardedLoop):
    """A loop whose model is a `DeepSpeedEngine`."""

    layout: Layout = LAYOUT
    never_again = "around a DeepSpeed engine"

    def __init__(self, run: Any, writer: ManifestWriter, mode: ArenaMode) -> None:
        super().__init__(run, writer, mode)
        self._counters = dict[int, dict[str, int]]()

    def started(self) -> None:
        """The state is loaded."""
        parts: Any = EngineParts(self._run.state.engine, self.rank, self._run.place.world_size)
        self.describe(parts)

    def begin_with(self, selector: CheckpointSelector) -> bool:
        """An engine is filled from files alone: where something newer was left in arenas, a note says what it costs."""
        with left_by_all(self.life.session, lambda payload: _FILES):
            pass
        return False

    def more(self, kept: Snapshot) -> bytes:
        """Nothing: a restart does not begin with arenas."""
        return b""

    def keep(self, small: Any, compare: bool = True) -> None:
        """With the engine's counters of now: it counts on with each batch of the next step."""
        super().keep(small, compare)
        kept = {step: found for step, found in self._counters.items() if step in self._kept}
        self._counters = kept | {small.step: counters(self._run.state.engine)}

    def dump_small(self, kept: Snapshot) -> dict[str, Any]:
        """With the engine's counters of then."""
        return super().dump_small(kept) | {COUNTERS: self._counters[kept.step]}

    def write_own(
        self, staged: Staged, step: int, *, plain: bool, buffers: Mapping[str, Tensor] | None = None,
        extra: Mapping[Path, Any] | None = None,
    ) -> bytes:  # fmt: skip
        """This rank's files, with its live tensors. Buffers are those of the end of the step already.

        Raises:
            NotSaveable: the engine could not be described at the end of the step: what is known is of an earlier one.
        """
        self.kept(step)
        parts: Any = self.shards
        return _write(staged, self.rank, parts.now.objects())

    def write_other(
        self, staged: Staged, there: Payload, wanted: Wanted, *, plain: bool, groups: Groups | None
    ) -> bytes:
        """The files of another rank, from its arena. All of it is verified first: most of it is pickled."""
        wanted.verify()
        return _write(staged, parse(there.shards)[0].rank, restore(there.shards))

    def merge(self, staged: Staged, own: bytes, parts: Mapping[int, bytes], beside: Mapping[str, Any]) -> None:
        """Bring the files of all ranks together, with those that name the newest step and that convert it.

        Raises:
            CheckpointError: files are missing, or of several steps.
        """
        found = [_WRITTEN.decode(one) for one in described(parts)]
        ranks, tags = sorted(one.rank for one in found), {one.tag for one in found}
        if ranks != list(range(self._run.place.world_size)) or len(tags) != 1:
            raise CheckpointError(f"{staged.target}: files of ranks {ranks} in {sorted(tags)}, and all ranks' of one "
                                  "step are needed")  # fmt: skip
        bring(staged, own, parts, beside)
        name = staged.target.name
        staged.open(f"{name}/latest").write(tags.pop().encode())
        for file, content in recovery_scripts().items():
            staged.open(f"{name}/{file}").write(content)


def _write(staged: Staged, rank: int, files: Mapping[str, Any]) -> bytes:
    for file, content in files.items():
        save_verified(content, staged, f"{staged.target.name}/{file}")
    return msgspec.msgpack.encode(Written(rank, next(iter(files)).split("/")[0]))
