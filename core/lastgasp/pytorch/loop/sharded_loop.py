"""A loop whose ranks hold shards of their own (`fully_shard`): captured, copied into the arena, saved and loaded."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lastgasp.arena import Arena
from lastgasp.arena_filling import ArenaMode, Filling
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.retention import prune
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.errors import CheckpointError, ConfigError, LastgaspError, NotSaveable
from lastgasp.ports import SaveResult, Wanted
from lastgasp.pytorch.loop.record import KEY, buffers_of, notes_on, record_of
from lastgasp.pytorch.loop.sharded_parts import aux_of_parts, merge, part_of
from lastgasp.pytorch.loop.state import Snapshot
from lastgasp.pytorch.sharded import LAYOUT, Shards, gasp_path, periodic_path, write_arena, write_live
from lastgasp.pytorch.staged import StagedGasp, contribute, publish
from lastgasp.replicas import require_alike
from lastgasp.testing import faults

log = logging.getLogger("lastgasp")

KEPT = 3
"""Steps whose small state is kept: what arenas hold, and the one that is live."""
_HEAD = struct.Struct("<qq")  # bytes of the auxiliary state, where the image of the shards begins


class ShardedLoop:
    """The part of a `loop.run.Run` that has to do with shards. Implements `ports.StateSource` and `ports.ShardSource`.

    Args:
        run: the run; writer: names who writes.
        mode: which steps are copied into the arena.

    Attributes:
        arena: this rank's; None where nothing is copied.
        present: the manifests that were there when training began.
    """

    def __init__(self, run: Any, writer: ManifestWriter, mode: ArenaMode) -> None:
        self._run, self._writer = run, writer
        self.rank, self.present = run.rank, None
        self._snapshots: dict[int, Snapshot] = {}
        if run.engine.backend.backend != "embedded":
            raise ConfigError("LASTGASP_BACKEND", run.engine.backend.backend, "embedded for a sharded model",
                              "Set LASTGASP_BACKEND=embedded.")  # fmt: skip
        protected = run.place.world_size > 1 and mode != 0
        self.arena = Arena() if protected else None
        self._filling: Filling | None = None
        if self.arena is not None:
            self._filling = Filling(self.arena, mode, run.engine.gather, run.engine.note, self.rank)
            run.life.on_close(self.arena.close, last=True)

    def started(self) -> None:
        """The state is loaded: describe it, and check what is saved once for all ranks."""
        state, place = self._run.state, self._run.place
        self.shards = Shards(
            state.modules, state.optimizers.items, self.rank, place.world_size,
            single_model=state.models.single, single_optimizer=state.optimizers.single,
        )  # fmt: skip
        plain = self._run.engine.gather("loop/plain", self.shards.plain_digest())
        if len(set(plain)) > 1:
            raise ConfigError("model", "parameters that are not sharded differ between ranks", "the same on all ranks",
                              "Initialise them with the same seed, or shard them with fully_shard.")  # fmt: skip

    # -- a step -------------------------------------------------------------------------------------------

    def complete(self, snapshot: Snapshot) -> bool:
        """Capture the end of a step: auxiliary state, then the copy, and only then it counts as complete.

        Returns:
            Whether random numbers were drawn since the last capture.
        """
        recorder, step = self._run.recorder, snapshot.step
        self.keep(snapshot)
        self._run.capture_aux(step, settled=False, at_end=True)
        drew: bool = recorder.drew()
        if self._filling is not None:
            self._filling.fill(step, lambda: self._payload(recorder.read(step) or b""))
        self._run.capture_aux(step, settled=True)
        return drew

    def keep(self, snapshot: Snapshot) -> None:
        """A step is complete: follow the tensors, and keep its small state."""
        self.shards.look()
        held = self._filling.every if self._filling is not None else 1
        old = [step for step in self._snapshots if step < snapshot.step - 2 * held - 1]
        for step in old:
            del self._snapshots[step]
        if held > 1:  # of those in between only the newest
            for step in [s for s in self._snapshots if s % held]:
                del self._snapshots[step]
        self._snapshots[snapshot.step] = snapshot

    def _payload(self, aux: bytes) -> list[bytes | memoryview]:
        begin = -(-(_HEAD.size + len(aux)) // 64) * 64
        head = (_HEAD.pack(len(aux), begin) + aux).ljust(begin, b"\0")
        return [head, *self.shards.payload()]

    # -- a save -------------------------------------------------------------------------------------------

    @property
    def buffer_fd(self) -> int:
        """As in the port."""
        fd: int = self._run.recorder.fd
        return fd

    def capture(self, step: int) -> bytes:
        """This rank's auxiliary state of `step`; empty when it is no longer known."""
        return self._run.recorder.read(step) or b""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> StagedGasp:
        """As in the port, where this rank holds all shards."""
        return self.save_shards(step, aux, reason, Wanted(own=True, arenas={}, common=self.rank))

    def save_shards(self, step: int, aux: Mapping[int, bytes], reason: str, wanted: Wanted) -> StagedGasp:
        """As in the port.

        Raises:
            NotSaveable: this rank's state is not that of `step`, or ranks that should be replicas hold something else.
            OSError: the disk refused; nothing is left.
        """
        require_alike(self._run.life.alike)
        target = gasp_path(self._run.config.directory, step, self._run.fit.number)
        staged = Staged(target, LAYOUT, sha256=self._run.config.sha256)
        try:
            part = self._write(staged, step, wanted)
        except BaseException:
            staged.discard()
            raise
        about = self._writer.provenance(step, "gasp", self._writer.newest_beside(target, LAYOUT))
        return StagedGasp(staged, about, self.present, dict(aux), part)

    def _write(self, staged: Staged, step: int, wanted: Wanted) -> bytes:
        snapshot, aux, found = self._snapshot_of(step), {}, []
        if wanted.own:
            self._run.require(step)
            aux[self.rank] = own = self.capture(step)
            buffers = buffers_of(step, {self.rank: own} if own else {}, self._run.recorder, [self.rank])
            plain = wanted.common == self.rank
            found.append(write_live(staged, self.shards, plain=plain, groups=snapshot.groups, buffers=buffers))
            if self._run.require(step).step != step:
                raise NotSaveable(f"step {step} ended while it was being written")
        for owner, payload in wanted.arenas.items():
            length, begin = _HEAD.unpack_from(payload)
            aux[owner] = bytes(payload[_HEAD.size : _HEAD.size + length])
            plain = wanted.common == owner
            found.append(write_arena(staged, payload[begin:], plain=plain, groups=snapshot.groups))
        faults.fire_at("gasp_save")
        return part_of(staged, found, {rank: data for rank, data in aux.items() if data})

    def _snapshot_of(self, step: int) -> Snapshot:
        found = self._snapshots.get(step)
        if found is None:
            raise NotSaveable(f"the schedules and counters of step {step} are no longer known here")
        return found

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """As in the port: merge the parts of all savers."""
        assert isinstance(result, StagedGasp)
        aux = {**result.aux, **aux_of_parts(parts)}
        merge(result.staged, result.part, parts, self._loop_file(result.provenance.step, aux))
        return publish(replace(result, aux=aux), LAYOUT, self._run.config, self._run.place)

    def discard(self, result: SaveResult) -> None:
        """As in the port."""
        assert isinstance(result, StagedGasp)
        result.staged.discard()

    def contribute(self, step: int, path: str) -> str:
        """As `ports.Contributor` says."""
        own = self.capture(step)
        return contribute(Path(path), LAYOUT, {self.rank: own}) if own else ""

    def _loop_file(self, step: int, aux: Mapping[int, bytes]) -> dict[str, Any]:
        run, snapshot = self._run, self._snapshot_of(step)
        notes = [*snapshot.notes, *notes_on(aux, run.place)]
        for note in notes:
            run.engine.note(note)
        small: dict[str, Any] = run.state.dump_small(snapshot)
        return small | {KEY: record_of(aux, run.place, True, {}, notes)}

    # -- periodic checkpoints -----------------------------------------------------------------------------

    def save_periodic(self, step: int) -> None:
        """Write a periodic checkpoint; all ranks call it at the same step. A failing disk does not end training.

        Raises:
            ControlError, DeadlineExceeded: another rank is gone.
        """
        run, engine = self._run, self._run.engine
        engine.progress("save")
        target = periodic_path(run.config.directory, step, run.fit.number)
        mine = next(group for group in run.place.replicas if self.rank in group)[0] == self.rank
        staged, own = None, b""
        try:
            if mine:
                staged = Staged(target, LAYOUT, sha256=run.config.sha256)
                own = self._write_periodic(staged, step)
        except (OSError, LastgaspError) as error:
            log.error("rank %d: its part of %s could not be written (%s)", self.rank, target, error)
        try:
            parts = engine.gather(f"loop/save/{step}", own)
            savers = {group[0] for group in run.place.replicas}
            whole = all(parts[rank] for rank in savers)
            aux = engine.gather(f"loop/save/aux/{step}", self.capture(step))
            done = b""
            if self.rank == 0 and whole and staged is not None:
                chosen = {rank: parts[rank] for rank in savers}
                done = self._publish_periodic(staged, own, chosen, dict(enumerate(aux)))
            if engine.gather(f"loop/saved/{step}", done)[0]:
                engine.status.durable = max(engine.status.durable, step)
        finally:
            if staged is not None:
                staged.discard()
        if self.rank == 0 and engine.status.durable >= step:
            prune(run.config, LAYOUT, target, run.place.job, kind="periodic", fit=run.fit.number)
        engine.progress("data")

    def _write_periodic(self, staged: Staged, step: int) -> bytes:
        groups = self._snapshot_of(step).groups
        description = write_live(staged, self.shards, plain=self.rank == 0, groups=groups)
        faults.fire_at("periodic_save", step)
        return part_of(staged, [description], {})

    def _publish_periodic(self, staged: Staged, own: bytes, parts: Mapping[int, bytes], aux: dict[int, bytes]) -> bytes:
        step = self._run.step
        try:
            merge(staged, own, parts, self._loop_file(step, {rank: data for rank, data in aux.items() if data}))
            staged.publish(self._writer.provenance(step, "periodic"), aside=True)
        except (OSError, CheckpointError) as error:
            log.error("checkpoint %s could not be written (%s): training continues; older ones remain",
                      staged.target, error)  # fmt: skip
            return b""
        return b"1"

