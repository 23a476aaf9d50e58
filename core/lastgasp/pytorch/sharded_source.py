"""The state of a torch training of which each rank holds a part, as the engine's ports, for every framework."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from lastgasp.adapter.run import AdapterRun
from lastgasp.arena import Arena, DamagedArena, steps, verified
from lastgasp.arena_filling import ArenaMode, Filling
from lastgasp.arena_taking import Taken, taken_over
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig, buddy_of
from lastgasp.errors import ConfigError, NotSaveable
from lastgasp.ports import Layout, SaveResult, Wanted
from lastgasp.pytorch.aux_state import AuxRecorder
from lastgasp.pytorch.extrastate import ExtraStates
from lastgasp.pytorch.sharded import Groups, Shards, write_arena, write_live
from lastgasp.pytorch.sharded.files import Rename, same
from lastgasp.pytorch.sharded.table import Path as TablePath
from lastgasp.pytorch.sharded_image import Payload, head_of
from lastgasp.pytorch.sharded_parts import aux_of_parts, merge, part_of
from lastgasp.pytorch.staged import StagedGasp, contribute, publish
from lastgasp.replicas import require_alike
from lastgasp.testing import faults


class SmallState(Protocol):
    """What an adapter keeps of a step besides tensors; not changed afterwards."""

    @property
    def step(self) -> int:
        """Completed updates."""

    @property
    def groups(self) -> Sequence[Sequence[Mapping[str, Any]]]:
        """The values of each optimizer's parameter groups, without `params`."""


@dataclass(frozen=True)
class ShardedGasp(StagedGasp):
    """Implements `ports.SaveResult`. `beside`: what `ShardedSource.dump_small` has returned."""

    beside: Any = field(default=None)


class ShardedSource:
    """Implements `ports.StateSource` and `ports.ShardSource`; an adapter's subclass says what belongs to a checkpoint
    besides the shards.

    Order, on the training thread of all ranks: `describe` once the state is loaded; at the end of each step `keep`,
    then `fill`, once the auxiliary state is captured. A step counts as complete after that.

    Args:
        life: of the training; writer: names who writes; config: where gasps go.
        mode: which steps are copied into the arena.

    Attributes:
        arena: this rank's; None where nothing is copied.
        shards: once `describe` was called.
        present: the manifests that were there when training began.
        durable: the newest step on disk, where training begins with what was left in arenas; else None.
        layout, rename: how checkpoints lie, and what the framework calls what is in them.

    Raises:
        ConfigError: another engine than the embedded one leads.
    """

    layout: Layout
    rename: Rename = staticmethod(same)

    def __init__(self, life: AdapterRun, writer: ManifestWriter, config: GaspConfig, mode: ArenaMode) -> None:
        self.life, self._writer, self.config = life, writer, config
        self.rank = writer.place.rank
        self.present: frozenset[str] | None = None
        self._kept: dict[int, Any] = {}
        self._extra: tuple[int, dict[TablePath, Any]] = -1, {}
        self.durable: int | None = None
        self._completed = False
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
            life.on_close(self.arena.close, last=True)

    def describe(self, shards: Shards) -> None:
        """The state is loaded: these are its parts. All ranks call it together.

        Raises:
            ConfigError: what is saved once for all ranks is not alike on them.
        """
        self.shards, self._extra_states = shards, ExtraStates(shards.extra_modules)
        plain = self.life.session.gather("sharded/plain", shards.plain_digest())
        if len(set(plain)) > 1:
            raise ConfigError("model", "parameters that are not sharded differ between ranks", "the same on all ranks",
                              "Initialise them with the same seed, or shard them with fully_shard.")  # fmt: skip

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
        def refused(payload: memoryview) -> str:
            found = Payload(payload)
            return found.why_not(self.rank, self._writer.place.world_size) or why_not(found)

        with taken_over(self.life.session, self.arena, refused, newer=newer) as taken:
            if taken is None:
                return False
            self._kept[taken.step] = take(taken, Payload(taken.payload))
            self.durable = taken.durable
        return True

    # -- what a subclass says -----------------------------------------------------------------------------

    @property
    def recorder(self) -> AuxRecorder:
        """Of this rank's auxiliary state."""
        raise NotImplementedError

    def target(self, step: int) -> Path:
        """Where the gasp of a step will stand."""
        raise NotImplementedError

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

    def dump_small(self, kept: Any) -> Any:
        """What the checkpoint has of the step besides shards, dumped while the step is saved.

        Raises:
            NotSaveable: it is not known any more.
        """
        raise NotImplementedError

    def beside(self, kept: Any, small: Any, aux: Mapping[int, bytes]) -> Mapping[str, Any]:
        """Further files of a checkpoint: name -> what `torch.save` writes. aux: all auxiliary states that were had."""
        raise NotImplementedError

    # -- a step -------------------------------------------------------------------------------------------

    def keep(self, small: SmallState) -> None:
        """A step is complete: follow the tensors, and keep its small state."""
        self.shards.look()
        held = steps(self.arena.fd, self.arena.identity) if self.arena is not None else ()
        for step in self._kept.keys() - {small.step - 1, *held}:
            del self._kept[step]
        self._kept[small.step] = small
        self._extra = small.step, self._extra_states.step_over(small.step)
        self._completed = True

    def fill(self, step: int) -> None:
        """Copy the parts into the arena, with the auxiliary state that was just captured. Never raises."""
        if self._filling is not None:
            self._filling.fill(step, lambda: self._payload(step))

    def _payload(self, step: int) -> list[bytes | memoryview]:
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

    # -- a save -------------------------------------------------------------------------------------------

    @property
    def buffer_fd(self) -> int:
        """As in the port."""
        return self.recorder.fd

    def capture(self, step: int) -> bytes:
        """This rank's auxiliary state of `step`; empty when it is no longer known."""
        return self.recorder.read(step) or b""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> ShardedGasp:
        """As in the port, where this rank holds all shards."""
        return self.save_shards(step, aux, reason, Wanted(own=True, arenas={}, common=self.rank))

    def save_shards(self, step: int, aux: Mapping[int, bytes], reason: str, wanted: Wanted) -> ShardedGasp:
        """As in the port.

        Raises:
            NotSaveable: this rank's state is not that of `step`, or ranks that should be replicas hold something else.
            OSError: the disk refused; nothing is left.
        """
        require_alike(self.life.alike)
        target, small = self.target(step), self.dump_small(self.kept(step))
        staged = Staged(target, self.layout, sha256=self.config.sha256)
        try:
            part = self._write(staged, step, wanted)
        except BaseException:
            staged.discard()
            raise
        about = self._writer.provenance(step, "gasp", self._writer.newest_beside(target, self.layout))
        return ShardedGasp(staged, about, self.present, dict(aux), part, small)

    def _write(self, staged: Staged, step: int, wanted: Wanted) -> bytes:
        aux, found, groups = dict[int, bytes](), list[bytes](), self.kept(step).groups
        arenas = dict(wanted.arenas)
        with ExitStack() as stack:
            if wanted.own and self.durable is not None and not self._completed:
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
            for owner, payload in arenas.items():
                there, plain = Payload(payload), wanted.common == owner
                aux[owner] = there.aux
                found.append(self.write_other(staged, there, wanted, plain=plain, groups=groups))
        faults.fire_at("gasp_save")
        return part_of(staged, found, {rank: data for rank, data in aux.items() if data})

    @contextmanager
    def _own_arena(self, step: int) -> Iterator[memoryview]:
        """What this training began with: until its first step the live state may lag behind (random states).

        Raises:
            NotSaveable: it is not of that step, or damaged.
        """
        assert self.arena is not None
        try:
            with verified(self.arena.fd, self.arena.identity, step) as payload:
                yield payload
        except DamagedArena as error:
            raise NotSaveable(str(error)) from error

    def write_own(
        self, staged: Staged, step: int, *, plain: bool, buffers: Mapping[str, Tensor] | None = None,
        extra: Mapping[TablePath, Any] | None = None,
    ) -> bytes:  # fmt: skip
        """`write_live` of this rank's parts."""
        groups = self.kept(step).groups
        return write_live(
            staged, self.shards, plain=plain, groups=groups, buffers=buffers, extra=extra, rename=self.rename
        )

    def write_other(self, staged: Staged, there: Payload, wanted: Wanted, *, plain: bool, groups: Groups) -> bytes:
        """`write_arena` of another rank's parts; `wanted`: as of `save_shards`."""
        return write_arena(
            staged, there.shards, plain=plain, groups=groups, rename=self.rename, verify=wanted.verify
        )

    def merge(self, staged: Staged, own: bytes, parts: Mapping[int, bytes], beside: Mapping[str, Any]) -> None:
        """As `sharded_parts.merge`."""
        merge(staged, own, parts, beside)

    def kept(self, step: int) -> Any:
        """What `keep` got. Raises NotSaveable where it is not known any more."""
        found = self._kept.get(step)
        if found is None:
            raise NotSaveable(f"the schedules and counters of step {step} are no longer known here")
        return found

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
