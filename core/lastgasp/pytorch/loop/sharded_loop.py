"""A loop whose ranks hold shards of their own (`fully_shard`): captured, copied into the arena, saved and loaded."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lastgasp.adapter.selection import CheckpointSelector
from lastgasp.arena_filling import ArenaMode
from lastgasp.arena_taking import Taken
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.retention import prune
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.gasp.again import Again
from lastgasp.ports import Layout
from lastgasp.pytorch.aux_state import AuxRecorder, Since
from lastgasp.pytorch.buffers import persistent_buffers
from lastgasp.pytorch.loop.held_parts import BUCKETS, HeldParts, merge_all
from lastgasp.pytorch.loop.parts import under_join
from lastgasp.pytorch.loop.periodic import failed, together
from lastgasp.pytorch.loop.record import KEY, SHARDED_FILE, buffers_of, not_alike, notes_on, record_of
from lastgasp.pytorch.loop.state import Snapshot
from lastgasp.pytorch.sharded import LAYOUT, Shards, fill
from lastgasp.pytorch.sharded.flat import stays_alive
from lastgasp.pytorch.sharded_image import Payload
from lastgasp.pytorch.sharded_parts import part_of
from lastgasp.pytorch.sharded_source import ShardedSource
from lastgasp.testing import faults

log = logging.getLogger("lastgasp")

MEMORY = Path("memory (arenas)")
"""Stands for the path of a checkpoint, in what is logged."""


class ShardedLoop(ShardedSource):
    """The part of a `loop.run.Run` that has to do with shards.

    Args:
        run: the run; writer: names who writes.
        mode: which steps are copied into the arena.
    """

    layout: Layout = LAYOUT

    def __init__(self, run: Any, writer: ManifestWriter, mode: ArenaMode) -> None:
        super().__init__(run.life, writer, run.config, mode)
        self._run = run
        self.kept_equal = run.state.replicated
        self._small: dict[str, Any] = {}

    @property
    def never_again(self) -> str:
        """Why the training can never be entered again; empty if it can."""
        if self.arena is None:
            return "without arenas, where a rank's part goes with it"
        if any(map(stays_alive, self._run.state.modules.values())):
            return "with FSDP1's HYBRID_SHARD or NO_SHARD, which keeps a model in memory whose backward pass fails"
        return ""

    def started(self) -> None:
        """The state is loaded: describe it, and check what is saved once for all ranks."""
        state, place = self._run.state, self._run.place
        shards = Shards(
            state.modules, state.optimizers.items, self.rank, place.world_size,
            single_model=state.models.single, single_optimizer=state.optimizers.single,
        )  # fmt: skip
        self.describe(shards)

    def complete(self, snapshot: Snapshot) -> Since:
        """Capture the end of a step: auxiliary state, then the copy, and only then it counts as complete.

        Returns:
            What happened since the last capture.
        """
        self.keep(snapshot, compare=not under_join(self._run.state))
        since: Since = self._run.capture_aux(snapshot.step, settled=False, at_end=True)
        self.fill(snapshot.step)
        self._run.capture_aux(snapshot.step, settled=True)
        return since

    def look(self) -> None:
        """As in the base; under torch's `Join` parts of one number of steps may be of different moments."""
        if under_join(self._run.state):
            raise ValueError("under torch's Join ranks may come to different numbers of steps, and each holds a part")
        super().look()

    def fill(self, step: int) -> None:
        """As in the base."""
        if self._filling is not None and under_join(self._run.state):
            self._filling.stop(self._cannot)
        super().fill(step)

    # -- from what was left in arenas -----------------------------------------------------------------------

    def begin_with(self, selector: CheckpointSelector) -> bool:
        """Fill the state with it; False where there is nothing. All ranks call it together.

        Raises:
            CheckpointMismatch: it is of another model or optimizer.
            LastgaspError: as `take_over`.
        """
        if not self.take_over(self._why_not, self._take):
            return False
        selector.pass_over()
        self.present = selector.present
        return True

    # -- entered again --------------------------------------------------------------------------------------

    def settle_buffers(self, step: int) -> None:
        """As `ShardedSource.settle_buffers`."""
        live = dict(persistent_buffers(self._run.state.container))
        for name, value in self.buffers(step, self.capture(step)).items():
            holder, key = live[name]
            if (there := holder[key]) is not None:
                there.detach().copy_(value)

    def held(self, step: int) -> HeldParts:
        """What this rank holds of `step`, for the time in which nothing is trained. It keeps nothing else alive.

        Raises:
            NotSaveable: it does not hold the step.
        """
        self.bring(step)
        for note in self.kept(step).notes:
            self._run.engine.note(note)
        fit = self._run.fit
        writer = replace(self._writer, fit=lambda: fit)
        found = HeldParts(self.hand_on(), writer, self.config, fit.number, self._run.state.partitioned)
        found.alike, found.present = self.alike, self.present
        return found

    def enter(self, again: Again, held: HeldParts | None) -> None:
        """Fill the state with this rank's part of the step. As `enter_again`.

        Raises:
            CheckpointMismatch: it is of another model or optimizer.
        """
        self.enter_again(again, held, self._why_not, self._take)

    def more(self, kept: Snapshot) -> bytes:
        """All that a loop's checkpoint has besides tensors; and of which training it is."""
        try:
            small = self.dump_small(kept) | {BUCKETS: self._run.buckets.layouts}
            return pickle.dumps((self._about(), small), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # of the user's objects
            raise ValueError(f"schedules, scaler or extra cannot be pickled: {error}") from error

    def _about(self) -> str:
        return f"training {self._run.fit.number} in {self.config.directory}"

    def _why_not(self, payload: Payload) -> str:
        try:
            found, self._small = pickle.loads(payload.more)
        except Exception as error:  # of the user's objects
            return f"schedules, scaler or extra cannot be unpickled: {type(error).__name__}: {error}"
        here = self._about()
        return "" if found == here else f"it is of {found}, and this is {here}"

    def _take(self, taken: Taken, payload: Payload) -> Snapshot:
        run, loop = self._run, self._small
        owner = taken.arena.rank  # or a replica
        small = {self.rank: aux} if (aux := payload.aux if owner == self.rank else taken.aux) else {}
        record = record_of(small, run.place, True, loop.pop(BUCKETS), [])
        run.fill(loop | {KEY: record}, MEMORY, partial(self._fill, payload.shards, owner))
        snapshot: Snapshot = run.state.snapshot(taken.step, loop["epoch"])
        return snapshot

    def _fill(self, shards: memoryview, owner: int) -> None:
        state, place = self._run.state, self._run.place
        fill(
            shards, state.modules, state.optimizers.items, rank=owner, world_size=place.world_size,
            single_model=state.models.single, single_optimizer=state.optimizers.single,
        )  # fmt: skip

    # -- what a loop's checkpoint has -----------------------------------------------------------------------

    @property
    def recorder(self) -> AuxRecorder:
        """The run's."""
        found: AuxRecorder = self._run.recorder
        return found

    def target(self, step: int) -> Path:
        """As of any gasp of this session."""
        found: Path = self._run.state.layout.gasp_path(self.config.directory, step, self._run.fit.number)
        return found

    def require(self, step: int) -> None:
        """As `Run.require`."""
        self._run.require(step)

    def buffers(self, step: int, own: bytes) -> Mapping[str, Tensor]:
        """As `buffers_of`."""
        return buffers_of(step, {self.rank: own} if own else {}, self.recorder, [self.rank])

    def dump_small(self, kept: Snapshot) -> dict[str, Any]:
        """As `TorchState.dump_small`, of what can be saved."""
        self._run.state.settle(kept)
        found: dict[str, Any] = self._run.state.dump_small(kept)
        return found

    def beside(self, kept: Snapshot, small: dict[str, Any], aux: Mapping[int, bytes]) -> Mapping[str, Any]:
        """The loop's own file, with what a bit-equal resume needs."""
        run = self._run
        notes = [*kept.notes, *run.not_saved.notes(), *notes_on(aux, run.place, run.state.extra)]
        if not self.alike:
            notes.append(not_alike(f"ranks {', '.join(map(str, sorted(self._firsts)))}"))
        for note in notes:
            run.engine.note(note)
        return {SHARDED_FILE: small | {KEY: record_of(aux, run.place, True, run.buckets.layouts, notes)}}

    def merge(self, staged: Staged, own: bytes, parts: Mapping[int, bytes], beside: Mapping[str, Any]) -> None:
        """As `merge_all`."""
        merge_all(staged, own, parts, beside, self._run.place.world_size if self._run.state.partitioned else 0)

    # -- periodic checkpoints -----------------------------------------------------------------------------

    @property
    def _firsts(self) -> set[int]:
        """The ranks that write: of those which should hold the same parts the first."""
        return {group[0] for group in self._run.place.replicas}

    def save_periodic(self, step: int) -> None:
        """Write a periodic checkpoint; all ranks call it at the same step. What fails does not end training."""
        run, engine = self._run, self._run.engine
        engine.progress("save")
        target = run.state.layout.periodic_path(run.config.directory, step, run.fit.number)
        mine = self.rank in self._firsts
        if not mine:
            faults.fire_at("periodic_save", step)
        staged, own = None, b""
        try:
            if mine:
                staged = Staged(target, self.layout, sha256=run.config.sha256, moved=partial(engine.progress, "save"))
                own = self._write_periodic(staged, step)
        except Exception as error:  # also of the user's own objects
            failed(f"the part of rank {self.rank} of {target}", error)
        try:
            parts = together(engine, f"loop/save/{step}", own, run.config)
            aux = parts and together(engine, f"loop/save/aux/{step}", self.capture(step), run.config)
            if parts and aux:  # who was late once would be waited for again
                chosen = {rank: parts[rank] for rank in self._firsts}
                done = b""
                if self.rank == 0 and staged is not None and all(chosen.values()):
                    done = self._publish_periodic(staged, own, chosen, dict(enumerate(aux)))
                if (together(engine, f"loop/saved/{step}", done, run.config) or [b""])[0]:
                    engine.status.durable = max(engine.status.durable, step)
        finally:
            if staged is not None:
                staged.discard()
        if self.rank == 0 and engine.status.durable >= step:
            prune(run.config, self.layout, target, run.place, kind="periodic", fit=run.fit.number)
        engine.progress("data")

    def _write_periodic(self, staged: Staged, step: int) -> bytes:
        description = self.write_own(staged, step, plain=self.rank == 0)
        faults.fire_at("periodic_save", step)
        return part_of(staged, [description], {})

    def _publish_periodic(self, staged: Staged, own: bytes, parts: Mapping[int, bytes], aux: dict[int, bytes]) -> bytes:
        step, known = self._run.step, {rank: data for rank, data in aux.items() if data}
        try:
            kept = self.kept(step)
            self.merge(staged, own, parts, self.beside(kept, self.dump_small(kept), known))
            staged.publish(self._writer.provenance(step, "periodic"), aside=True)
        except Exception as error:
            failed(f"checkpoint {staged.target}", error)
            return b""
        return b"1"
