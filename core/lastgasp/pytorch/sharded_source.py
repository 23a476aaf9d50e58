"""The state of a torch training of which each rank holds a part, as the engine's ports, for every framework."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from torch import Tensor

from lastgasp.adapter.run import AdapterRun
from lastgasp.arena import Arena, steps
from lastgasp.arena_filling import ArenaMode, Filling
from lastgasp.arena_taking import Known, Taken, taken_by_all, taken_over
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig, buddy_of
from lastgasp.errors import ConfigError, NotSaveable
from lastgasp.gasp.again import Again
from lastgasp.gasp.arena_ref import ArenaRef
from lastgasp.ports import Wanted
from lastgasp.pytorch.aux_state import AuxRecorder
from lastgasp.pytorch.extrastate import ExtraStates
from lastgasp.pytorch.held_shards import HeldShards
from lastgasp.pytorch.sharded import Shards, write_live
from lastgasp.pytorch.sharded.table import Path as TablePath
from lastgasp.pytorch.sharded_alike import SharedParts
from lastgasp.pytorch.sharded_image import Payload, head_of
from lastgasp.pytorch.sharded_parts import part_of
from lastgasp.pytorch.sharded_saves import ShardedSaves
from lastgasp.testing import faults

log = logging.getLogger("lastgasp")


class SmallState(Protocol):
    """What an adapter keeps of a step besides tensors; not changed afterwards."""

    @property
    def step(self) -> int:
        """Completed updates."""

    @property
    def groups(self) -> Sequence[Sequence[Mapping[str, Any]]]:
        """The values of each optimizer's parameter groups, without `params`."""


class ShardedSource(ShardedSaves):
    """Implements `ports.StateSource` and `ports.ShardSource`; an adapter's subclass says what belongs to a checkpoint
    besides the shards.

    Order, on the training thread of all ranks: `describe` once the state is loaded; at the end of each step `keep`,
    then `fill`, once the auxiliary state is captured. A step counts as complete after that.

    Args:
        life: of the training; writer: names who writes; config: where gasps go.
        mode: which steps are copied into the arena.

    Attributes:
        shards: once `describe` was called.
        entering: whether `enter_again` was called: what was held goes with this training.
        durable: the newest step on disk, where training begins with what was left in arenas; else None.

    Raises:
        ConfigError: another engine than the embedded one leads.
    """

    def __init__(self, life: AdapterRun, writer: ManifestWriter, config: GaspConfig, mode: ArenaMode) -> None:
        super().__init__(writer, config)
        self.life = life
        self._kept: dict[int, Any] = {}
        self._extra: tuple[int, dict[TablePath, Any]] = -1, {}
        self.durable: int | None = None
        self._completed = self._handed_on = False
        self._cannot = ""
        session = life.session
        if session.backend.backend != "embedded":
            raise ConfigError("LASTGASP_BACKEND", session.backend.backend, "embedded for a sharded model",
                              "Set LASTGASP_BACKEND=embedded.")  # fmt: skip
        protected = writer.place.world_size > 1 and mode != 0
        self.arena = Arena() if protected else None
        self._filling: Filling | None = None
        if self.arena is not None:
            self._filling = Filling(
                self.arena, mode, session.gather, session.note, self.rank, buddy=buddy_of()
            )
            life.on_close(self._close_arena, last=True)

    @property
    def alike(self) -> bool:
        """As the run has found it, and the parts that several ranks hold."""
        return self.life.alike and self._shared.alike

    def _close_arena(self) -> None:
        if self.arena is not None and not self._handed_on:
            self.arena.close()

    def describe(self, shards: Shards) -> None:
        """The state is loaded: these are its parts. All ranks call it together.

        Raises:
            ConfigError: what is saved once for all ranks is not alike on them.
        """
        self.shards, self._extra_states = shards, ExtraStates(shards.extra_modules)
        self._shared = SharedParts(self.life.session, shards, self.kept_equal)
        self._shared.loaded(differed_before=self.durable is not None)

    def take_over(
        self, why_not: Callable[[Payload], str], take: Callable[[Taken, Payload], SmallState], *, newer: bool = False
    ) -> bool:
        """Begin with what the ranks before have left in their arenas; False where that cannot be.

        Before `describe`; all ranks call it together.

        Args:
            why_not: says why a payload is none for this training; empty if it is one. take: fills the state with it.
            newer: as `taken_over`.

        Raises:
            LastgaspError: as `taken_over`, and what `take` raises.
        """
        with taken_over(self.life.session, self.arena, self._refused(why_not, self.rank), newer=newer) as taken:
            if taken is not None:
                self._take_step(taken, take)
        return taken is not None

    def _refused(self, why_not: Callable[[Payload], str], rank: int) -> Callable[[memoryview], str]:
        def refused(payload: memoryview) -> str:
            found = Payload(payload)
            return found.why_not(rank, self._writer.place.world_size) or why_not(found)

        return refused

    def _take_step(self, taken: Taken, take: Callable[[Taken, Payload], SmallState]) -> None:
        self._kept[taken.step] = take(taken, Payload(taken.payload))
        self.durable = taken.durable

    # -- what a subclass says -----------------------------------------------------------------------------

    entering = False
    kept_equal = False
    """The user says that ranks which no mesh joins are kept equal all the same."""

    @property
    def recorder(self) -> AuxRecorder:
        """Of this rank's auxiliary state."""
        raise NotImplementedError

    def reading(self) -> AbstractContextManager[None]:
        """As in the base: on streams of its own, whatever the training thread's wait for."""
        return self.recorder.queued.reading()

    def require(self, step: int) -> None:
        """Raises NotSaveable where the live tensors are not those of the end of `step`."""
        raise NotImplementedError

    def buffers(self, step: int, own: bytes) -> Mapping[str, Tensor]:
        """This rank's buffers at the end of `step`, as `write_live` wants them; own: its auxiliary state of then."""
        raise NotImplementedError

    def more(self, kept: Any) -> bytes:
        """What goes into the arena besides, so that a restart can begin with it; by default it cannot.

        Raises:
            ValueError: it cannot be had.
        """
        return b""

    # -- a step -------------------------------------------------------------------------------------------

    def keep(self, small: SmallState, compare: bool = True) -> None:
        """A step is complete: follow the tensors, and keep its small state, unless they cannot be saved any more.

        Args:
            compare: with what the other ranks hold, where all of them have completed the step.
        """
        before = self._cannot
        try:
            self.look()
            self._cannot = ""
        except ValueError as error:
            why = error.value if isinstance(error, ConfigError) else error
            self._cannot = before or f"from step {small.step} on nothing can be saved: {why}"
        if self._cannot and not before:
            self.life.session.note(self._cannot)
        self._shared.updated(small.step, together=compare, describable=not self._cannot)
        held = steps(self.arena.fd, self.arena.identity) if self.arena is not None else ()
        for step in self._kept.keys() - {small.step - 1, *held}:
            del self._kept[step]
        if not self._cannot:
            self._kept[small.step] = small
        self._extra = small.step, self._extra_states.step_over(small.step)
        self._completed = True

    def look(self) -> None:
        """As `Shards.look`. Raises ValueError: nothing can be saved of this step; says why."""
        self.shards.look()

    def fill(self, step: int) -> None:
        """Copy the parts into the arena, with the auxiliary state that was just captured. Never raises."""
        if self._filling is not None:
            self._filling.fill(step, lambda: self._payload(step), self.recorder.queued.settle)

    def _payload(self, step: int) -> list[bytes | memoryview]:
        if self._cannot:
            raise ValueError(self._cannot)
        kept = self.kept(step)
        more = self.more(kept)
        try:
            parts = self.shards.payload(kept.groups if more else None, self._extra_of(step))
            return [head_of(self.capture(step), more), *parts]
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(f"values of the optimizer or the model cannot be pickled: {error}") from error

    def _extra_of(self, step: int) -> dict[TablePath, Any]:
        """The extra states of modules that were taken at the end of that step."""
        taken_at, found = self._extra
        return found if taken_at == step else {}

    # -- entered again ------------------------------------------------------------------------------------

    def cannot_again(self) -> str:
        """Why the training cannot be entered again now; empty if it can. Called on the control thread."""
        why = self._filling.cannot if self._filling is not None else ""
        return f"its arena is not filled: {why}" if why else ""

    def held(self, step: int) -> HeldShards:
        """What this rank holds of `step`, for the time in which nothing is trained. It keeps nothing else alive.

        Raises:
            NotSaveable: it does not hold the step.
        """
        raise NotImplementedError

    def enter_again(
        self, again: Again, held: HeldShards | None, why_not: Callable[[Payload], str],
        take: Callable[[Taken, Payload], SmallState],
    ) -> None:  # fmt: skip
        """Begin with this rank's part of the step that was agreed on. Before `describe`; all ranks call it together.

        Args:
            held: what this process has of it; None where it takes a dead one's place.
            why_not, take: as for `take_over`.

        Raises:
            BadArena, ControlError, DeadlineExceeded: as `taken_by_all`, and what `take` raises.
        """
        self.entering, known = True, None
        if held is None:
            there = (again.arenas or ())[again.lost.index(self.rank)]
        else:
            there = ArenaRef(rank=self.rank, pid=os.getpid(), fd=held.arena.fd, identity=held.arena.identity)
            aux = again.aux if again.source == self.rank else {}
            known = Known(self.life.session.status.durable, held.present, aux)
            self.life.on_close(held.arena.close, last=True)
        assert self.arena is not None
        with taken_by_all(
            self.life.session, self.arena, there, again.step, self._refused(why_not, there.rank), known=known
        ) as (taken, present):  # fmt: skip
            self._take_step(taken, take)
        self.present = present

    def bring(self, step: int) -> None:
        """Have this rank's arena hold `step`, if need be from the live state: nobody trains on with that.

        On the training thread, while no update can begin.

        Raises:
            NotSaveable: this rank does not hold the step (any more), or it cannot be copied.
        """
        assert self.arena is not None and self._filling is not None
        if step in steps(self.arena.fd, self.arena.identity):
            return
        self.require(step)
        self.recorder.queued.let_copy()
        self.settle_buffers(step)
        if missing := self._extra_states.missing(self._extra_of(step)):
            self.life.session.note(missing)
        try:
            self._filling.copy_now(step, self._payload(step))
        except (OSError, ValueError, MemoryError) as error:
            raise NotSaveable(f"step {step} cannot be copied into the arena: {error}") from error

    def settle_buffers(self, step: int) -> None:
        """Give module buffers their values of the end of `step`, which a forward pass may have changed since."""
        raise NotImplementedError

    def hand_on(self) -> Arena:
        """The arena, which is not closed with this training any more."""
        assert self.arena is not None
        self._handed_on = True
        return self.arena

    # -- a save -------------------------------------------------------------------------------------------

    @property
    def buffer_fd(self) -> int:
        """As in the port."""
        return self.recorder.fd

    def capture(self, step: int) -> bytes:
        """This rank's auxiliary state of `step`; empty when it is no longer known."""
        return self.recorder.read(step) or b""

    def _write(self, staged: Staged, step: int, wanted: Wanted) -> bytes:
        aux, found, groups = dict[int, bytes](), list[bytes](), self.kept(step).groups
        arenas = dict(wanted.arenas)
        with ExitStack() as stack:
            if wanted.own and self.durable is not None and not self._completed:  # random states may lag behind
                arenas[self.rank] = stack.enter_context(self._own_arena(step))
            elif wanted.own:
                self.require(step)
                aux[self.rank] = own = self.capture(step)
                plain, buffers = wanted.common == self.rank, self.buffers(step, own)
                extra = self._extra_of(step)
                if plain and (missing := self._extra_states.missing(extra)):
                    self.life.session.note(missing)
                found.append(self.write_own(staged, step, plain=plain, buffers=buffers, extra=extra))
                self.require(step)
            others, theirs = self._write_arenas(staged, wanted, arenas, groups)
        faults.fire_at("gasp_save")
        return part_of(staged, found + others, {rank: data for rank, data in (aux | theirs).items() if data})

    def write_own(
        self, staged: Staged, step: int, *, plain: bool, buffers: Mapping[str, Tensor] | None = None,
        extra: Mapping[TablePath, Any] | None = None,
    ) -> bytes:  # fmt: skip
        """`write_live` of this rank's parts."""
        groups = self.kept(step).groups
        return write_live(
            staged, self.shards, plain=plain, groups=groups, buffers=buffers, extra=extra, rename=self.rename
        )

    def kept(self, step: int) -> Any:
        """What `keep` got. Raises NotSaveable where it is not known any more."""
        found = self._kept.get(step)
        if found is None:
            raise NotSaveable(self._cannot or f"the schedules and counters of step {step} are no longer known here")
        return found
