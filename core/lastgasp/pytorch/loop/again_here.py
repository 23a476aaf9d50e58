"""What a run does for `train`: keeps the state of a step, and begins with it when its training is entered again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lastgasp.adapter.run import AdapterRun
from lastgasp.arena import available
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.errors import NotSaveable
from lastgasp.gasp.again import NEW, Again
from lastgasp.gasp.going_on import Fewer
from lastgasp.ports import Layout, StateSource
from lastgasp.pytorch.cut import cut_connections, cut_from, cut_hosts, outside
from lastgasp.pytorch.gasp_source import GaspSource
from lastgasp.pytorch.handover import cloned
from lastgasp.pytorch.io import save_verified
from lastgasp.pytorch.loop import files
from lastgasp.pytorch.loop.again import LATER, Renewed, received
from lastgasp.pytorch.loop.kept_objects import KeptObjects
from lastgasp.pytorch.loop.led import NO_STEP, NOT_FEWER, Led, meet, why_no_new_process
from lastgasp.pytorch.loop.memory import FromMemory, Held, HeldTraining, Memory, RecorderOfMemory, bytes_of
from lastgasp.pytorch.loop.parts import ddp_of
from lastgasp.pytorch.loop.ranks import connect
from lastgasp.pytorch.loop.record import KEY
from lastgasp.pytorch.loop.renumber import place_after, renumbered
from lastgasp.pytorch.loop.sigterm_between import SigtermBetween
from lastgasp.pytorch.queued import FREED_AFTER
from lastgasp.topology import Place

COPIES = 2
"""Of the state, in host memory: what is held, and what the next session begins with. A rank that gives or takes the
state has as many at a time."""
FREED_EVERY = 0.1
"""Seconds between two times that the training thread's wait for others is ended: it may just have begun another one."""
NO_ENTRY = "the training is not inside of a function that lastgasp.pytorch.train calls"
MEMORY = Path("memory")
"""Stands for the path of a checkpoint, in what is logged."""


class AgainHere:
    """One per run; a subclass says where things are in its framework.

    Args:
        run: what is entered again. Its attributes: `entry` (None or the `Entry`), `recovery`, `life`, `place`,
            `config`, `source`, `recorder`, `users_handler`, `fit` (of `Held`), and `dump(step, aux)`, the checkpoint of
            a step.
        make: makes an `AdapterRun` like the run's, for a place and a contact.
        writer: names who writes.
        held: what the training is entered again with; None at a start.
    """

    layout: Layout = files.LAYOUT

    def __init__(
        self, run: Any, make: Callable[[Place, Any], AdapterRun], writer: ManifestWriter, held: Held | None
    ) -> None:
        self.run, self._make, self._writer, self._held = run, make, writer, held
        self._memory: Memory | None = None
        self._source: FromMemory | None = None
        self._orders: Led | None = None
        self._bytes = 0
        entry, status = run.entry, run.life.session.status
        if run.life.session.backend.backend != "embedded":
            self._led()
        elif entry is not None and not entry.why and entry.sessions == 1:
            status.recovery = run.recovery if entry.first else LATER.get(run.recovery, run.recovery)
            status.ends, status.free = outside, frees(run.life)
            status.fewer, status.cut_off = Fewer(self.elastic()), cut_hosts
            status.cannot_again, run.life.before_again, self._bytes = self._cannot_here, self.keep, -1
            entry.objects = entry.objects or self.objects()

    def _led(self) -> None:
        """Another backend leads: let it order that the training is entered again, where that can be on all ranks."""
        run, life = self.run, self.run.life
        if run.place.world_size == 1 and self._held is None:
            return  # else all others are missing, and may come back
        if self._held is not None and self._held.again.lost:
            dist.barrier()  # a new process has joined the controller before it is asked with the others
        peers, life.source.not_in_place, life.source.no_recover = meet(
            life.session, self._cannot_be_led(), self._cannot_recover()
        )
        if life.source.not_in_place:
            return
        self._orders = led = Led(self, peers)
        life.source.in_place, life.before_again, life.stays = led, led.keep, True
        run.entry.objects, self._bytes = run.entry.objects or self.objects(), -1

    def agree_on_fewer(self) -> None:
        """It is known what the training takes its data from. All ranks call it together."""
        if self._orders is not None:
            self._orders.agree_on_fewer(Fewer(may=True) if self.elastic() else Fewer(why=NOT_FEWER))

    def _cannot_be_led(self) -> str:
        entry, recovery = self.run.entry, self.run.recovery
        if entry is None:
            return NO_ENTRY
        if entry.why or entry.sessions != 1:
            return entry.why or "another session was opened in this training before"
        return "" if recovery in ("auto", "retry") else f"recovery={recovery}"

    def _cannot_recover(self) -> str:
        run = self.run
        if run.entry is not None and not run.entry.first:
            return "it is not the first training of its script, at which a new process would begin"
        return why_no_new_process(run.life.session, run.place, run.recovery)

    def cannot_now(self) -> str:
        """Why the training cannot be entered again at this moment; empty if it can."""
        if self._memory is not None or self._held is not None:
            return NO_STEP
        return self._cannot_here()

    def present(self) -> frozenset[str] | None:
        """The manifests that were there when training began."""
        found: frozenset[str] | None = self.run.source.present
        return found

    # -- of a framework -----------------------------------------------------------------------------------

    def objects(self) -> Renewed:
        """What goes on with the next entry; asked for in the first one."""
        raise NotImplementedError

    def target(self) -> Callable[[int], Path]:
        """Where the gasp of a step would stand; outlives the run, and must not keep it alive."""
        raise NotImplementedError

    def reach(self) -> Callable[[Place], Any]:
        """How the next incarnation reaches its controller; keeps nothing of the run alive."""
        raise NotImplementedError

    def let_go(self, again: Again) -> list[Any]:
        """Leave what belongs to this entry alone: the DDP wrappers, which must be gone before new ones are made."""
        raise NotImplementedError

    def state(self) -> Any:
        """What `objects()` are renewed with."""
        return None

    def elastic(self) -> bool:
        """It may be entered again with fewer ranks."""
        return False

    def nbytes(self) -> int:
        """Bytes of the tensors that a copy of the state takes; asked for once, when optimizers have made theirs."""
        raise NotImplementedError

    def changed(self) -> str:
        """What has become of the training's objects, so that an entry cannot begin with them; empty if nothing has."""
        return ""

    def before_dump(self, step: int) -> None:
        """The state of `step` is about to be dumped: have all that stands beside it as it was then."""

    def renumbered(self, checkpoint: dict[str, Any], again: Again) -> dict[str, Any]:
        """The checkpoint by the numbers that the ranks have from now on, where some are missing or are there again."""
        return renumbered(checkpoint, again)

    def values(self, gives: bool = True) -> bytes:
        """What the user's objects keep beside the state, for a rank that takes it from this one; gives: one does."""
        return b""

    # -- a start ------------------------------------------------------------------------------------------

    @property
    def enters(self) -> bool:
        """The training was entered again, and begins with what is in memory."""
        return self._held is not None

    def received(self) -> Memory:
        """What all begin with; all ranks call it together, `enters` is true on all of them."""
        assert self._held is not None
        self._memory = received(self._held)
        return self._memory

    def durable(self, step: int) -> int:
        """The newest step on disk, where training begins with `step`."""
        return step if self._memory is None else self._memory.durable

    def ready(self) -> None:
        """The run has the state: what was held is kept until the next step is complete."""
        held, memory = self._held, self._memory
        if held is None or memory is None:
            return
        source = held.life.source.inner if held.life is not None else None
        if not isinstance(source, FromMemory):
            source = FromMemory(memory.step, self.source_of(memory, self.run.place))
        self.run.source.present = memory.present
        source.live = self.run.source
        self._source = self.run.source = source
        self._held = None

    def forget(self) -> None:
        """A step is complete."""
        if self._source is not None:
            self._source.forget()
            self._source = self._memory = None
        if self._bytes < 0:
            self._bytes = self.nbytes()

    # -- a fault ------------------------------------------------------------------------------------------

    def keep(self, again: Again) -> None:
        """The training will be entered again: keep what this rank has of the step.

        Raises:
            NotSaveable: it is not the step that was agreed on.
        """
        between = SigtermBetween(self.run.life.session.status, self.run.users_handler)
        try:
            self._keep(again, between)
        except BaseException:
            between.over()
            raise

    def _keep(self, again: Again, between: SigtermBetween) -> None:
        run, memory, enters, alone, inner = self.run, None, None, None, None
        status = run.life.session.status
        self.before_dump(again.step)
        if run.place.rank not in again.takers:
            memory, place = self._memory_of(again), place_after(run.place, again)
            known = TakenAlong((status.recovery, status.fewer), memory.durable, run.life.alike)
            source, join = self.source_of(memory, place), partial(joined, self._make, self.reach())
            enters, inner = partial(rejoin, join, place, FromMemory(memory.step, source), known), source
            alone = partial(save_alone, run.life, FromMemory(memory.step, source))
        held = Held(
            again.for_rank(run.place.rank),
            memory,
            run.fit,
            enters,
            None,
            self.let_go(again),
            self.state(),
            users_handler=run.users_handler,
            between=between,
            alone=alone,
        )
        # Nothing keeps this run alive: there may be no room for two models.
        run.life.source.inner, status.cannot_again = inner, str
        run.entry.keep(held)

    def _memory_of(self, again: Again) -> Memory:
        """What this rank has of the step: its own state, or what it still holds since the last entry."""
        run, before = self.run, self._memory
        durable = again.step if again.saved else run.life.session.status.durable
        if self._held is not None or before is not None:
            before = before or (self._held.memory if self._held is not None else None)
            if before is None or before.step != again.step:
                raise NotSaveable(f"this rank does not hold step {again.step} any more")
            return replace(before, durable=durable)
        with run.recorder.queued.reading():
            checkpoint = self.renumbered(cloned(run.dump(again.step, again.aux)), again)
        # Another rank than `source` may have to give them if that one, or a further one, does not come.
        gives = run.place.rank == again.source and (bool(again.takers) or NEW in again.members)
        return Memory(again.step, checkpoint, durable, run.source.present, self.values(gives))

    def _cannot_here(self) -> str:
        return self.changed() or self._no_room()

    def _no_room(self) -> str:
        """Why no copies of the state can be made, or empty. For all ranks of this host: they make theirs at once."""
        needed, free = COPIES * max(self._bytes, 0) * int(os.environ.get("LOCAL_WORLD_SIZE", "1")), available()
        if free is None or needed <= free:
            return ""
        return (f"copies of the state would take {needed / 1e9:.3g} GB of this host's memory, "
                f"{free / 1e9:.3g} GB are available")  # fmt: skip

    def source_of(self, memory: Memory, place: Place) -> GaspSource:
        """Saves what is in `memory`, as the rank that this one is at `place`."""
        config, alike = self.run.config, self.run.life.alike
        own, writer = memory.checkpoint[KEY]["small"].get(place.rank), self._writer
        fit = writer.fit() if writer.fit is not None else None
        if fit is not None:
            writer = replace(writer, fit=lambda: fit)
        if place.world_size != writer.place.world_size:
            writer = replace(writer, place=place)
        found = GaspSource(
            partial(_write, memory),
            self.target(),
            self.layout,
            recorder=RecorderOfMemory(memory.step, own),
            writer=writer,
            config=config,
            alike=lambda: alike,
        )
        found.present = memory.present
        return found


class LoopAgain(AgainHere):
    """Of a custom loop's run."""

    @property
    def kept(self) -> KeptObjects | None:
        """What is known of the objects from the first call, if this is the session that is entered again."""
        entry = self.run.entry
        found = entry.objects if entry is not None and entry.sessions == 1 else None
        return found if isinstance(found, KeptObjects) else None

    def _led(self) -> None:
        super()._led()
        self.agree_on_fewer()

    def fill(self) -> bool:
        """Fill the run's state from memory; False where it is to begin with files. All ranks call it together."""
        if not self.enters:
            return False
        if self.kept is not None:  # as in a new process
            self.kept.enter(self.run.state, self.run.engine.note)
        self.run.fill(cloned(self.received().checkpoint), MEMORY)  # optimizers train the very tensors they are given
        return True

    def durable(self, step: int) -> int:
        """As in the base; and where training begins with what was left in arenas."""
        shards = self.run.shards
        return super().durable(step) if shards is None or shards.durable is None else int(shards.durable)

    def nbytes(self) -> int:
        """Of models, buffers and optimizer states."""
        return bytes_of([self.run.state.container], self.run.state.optimizers.values())

    def objects(self) -> Renewed:
        """What the user has made outside of the function."""
        return KeptObjects(self.run.state, self.run.entry.hooks)

    def target(self) -> Callable[[int], Path]:
        """As of any gasp of the loop."""
        directory, number = self.run.config.directory, self.run.fit.number
        return lambda step: files.gasp_path(directory, step, number)

    def elastic(self) -> bool:
        """Its `ElasticLoader` has the micro-batches of missing ranks done."""
        return self.run.state.elastic is not None

    def ready(self) -> None:
        """As in the base; the incident gets the digest of all samples that were used before it.

        A periodic checkpoint of this step may have been cut short; ranks do not know it alike, so all save the next.
        """
        elastic, enters = self.run.state.elastic, self.enters
        super().ready()
        if enters and self.run.every and self.run.step % self.run.every == 0:
            self.run.want_save()
        if elastic is not None:
            elastic.found_rigid = self.run.engine.status.found_rigid
            if enters and self.run.place.rank == 0:
                self.run.engine.note(elastic.told)

    def reach(self) -> Callable[[Place], Any]:
        """Its launcher's controller."""
        return connect

    def let_go(self, again: Again) -> list[Any]:
        """The function makes its wrappers itself, and drops them."""
        return [ddp for model in self.run.state.models.values() if (ddp := ddp_of(model)) is not None]

    def state(self) -> Any:
        """The objects of the session that has ended."""
        return self.run.state


def _write(memory: Memory, staged: Staged, step: int, aux: Mapping[int, bytes]) -> None:
    if step != memory.step:
        raise NotSaveable(f"this rank holds step {memory.step} in memory, not {step}")
    save_verified(memory.checkpoint, staged)


def joined(make: Callable[[Place, Any], AdapterRun], contact: Callable[[Place], Any], place: Place) -> AdapterRun:
    """The run of the next incarnation, connected."""
    return make(place, contact(place))


@dataclass(frozen=True)
class TakenAlong:
    """What a rank takes along from one incarnation to the next.

    Attributes:
        status: `recovery` and `fewer` of its status.
        durable: the newest step on disk.
        alike: all ranks that should be replicas held the same.
    """

    status: tuple[str, Fewer]
    durable: int
    alike: bool


def rejoin(
    join: Callable[[Place], AdapterRun], place: Place, source: StateSource, known: TakenAlong, held: Held
) -> AdapterRun:
    """Join the incarnation of `held.again` with what `source` holds."""
    again, waits = held.again, threading.Event()
    life = join(replace(place, incarnation=again.incarnation))
    life.alike_before = known.alike
    life.on_close(waits.set)
    try:
        status = life.session.status
        (status.recovery, status.fewer), status.free = known.status, lambda: partial(_free, again.port, waits)
        if held.between is not None:
            held.between.step_aside()
        life.enter_again(HeldTraining(source), again.step, again.step if again.saved else known.durable,
                         held.users_handler)  # fmt: skip
    except BaseException:
        life.close(completed=False)
        raise
    return life


def frees(life: AdapterRun) -> Callable[[], Callable[[], None]]:
    """For `RankStatus.free`: the training thread may wait for a rank that stays where it is, or others for this one."""
    status, left = life.session.status, threading.Event()
    life.on_close(left.set)

    def free() -> None:
        again = None if left.wait(FREED_AFTER) or status.outcome is None else status.outcome.again
        if again is not None:
            cut_connections(again.pids, again.ends, again.port)

    return lambda: free


def _free(port: int, over: threading.Event) -> None:
    """End the wait of the training thread for ranks that do not come: in the store where they were to meet."""
    while not over.wait(FREED_EVERY):
        cut_from(port)


def save_alone(life: AdapterRun, held: StateSource, error: BaseException) -> None:
    """This rank could not join again: save what it holds, by the rule of a rank without a controller."""
    life.source.inner = held
    life.save_alone(error)


def users_handler(held: Held | None) -> Any:
    """The user's own SIGTERM handler, if any; ours is in its place while the training is entered again."""
    if held is not None and held.life is not None:
        return held.users_handler
    users = signal.getsignal(signal.SIGTERM)
    return users if callable(users) else None
