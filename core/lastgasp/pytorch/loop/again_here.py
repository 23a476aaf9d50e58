"""What a session's run does for `train`: keeps the state of a step, and begins with it when entered again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lastgasp.adapter.run import AdapterRun
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.errors import NotSaveable
from lastgasp.gasp.again import Again
from lastgasp.pytorch.gasp_source import GaspSource
from lastgasp.pytorch.handover import cloned
from lastgasp.pytorch.io import save_verified
from lastgasp.pytorch.loop import files
from lastgasp.pytorch.loop.again import LATER, received
from lastgasp.pytorch.loop.kept_objects import KeptObjects
from lastgasp.pytorch.loop.memory import FromMemory, Held, HeldTraining, Memory, RecorderOfMemory
from lastgasp.pytorch.loop.parts import ddp_of
from lastgasp.pytorch.loop.ranks import connect
from lastgasp.pytorch.loop.record import KEY
from lastgasp.pytorch.loop.sigterm_between import SigtermBetween
from lastgasp.topology import Place

MEMORY = Path("memory")
"""Stands for the path of a checkpoint, in what is logged."""


class AgainHere:
    """One per run.

    Args:
        run: the `loop.run.Run`.
        make: makes an `AdapterRun` like the run's, for a place and a contact.
        writer: names who writes.
        held: what the training is entered again with; None at a start.
    """

    def __init__(
        self, run: Any, make: Callable[[Place, Any], AdapterRun], writer: ManifestWriter, held: Held | None
    ) -> None:
        self._run, self._make, self._writer, self._held = run, make, writer, held
        self._memory: Memory | None = None
        self._source: FromMemory | None = None
        entry, status = run.entry, run.engine.status
        embedded = run.engine.backend.backend == "embedded"
        if embedded and entry is not None and not entry.why and entry.sessions == 1:
            status.recovery = run.recovery if entry.first else LATER.get(run.recovery, run.recovery)
            run.life.before_again = self.keep
            entry.objects = entry.objects or KeptObjects(run.state)

    def fill(self) -> bool:
        """Fill the run's state from memory; False where it is to begin with files. All ranks call it together."""
        if self._held is None:
            return False
        memory = self._memory = received(self._held)
        self._run.fill(cloned(memory.checkpoint), MEMORY)  # optimizers would train the very tensors that they are given
        return True

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
            source = FromMemory(memory.step, self._source_of(memory))
        self._run.source.present = memory.present
        source.live = self._run.source
        self._source = self._run.source = source
        self._held = None

    def forget(self) -> None:
        """A step is complete."""
        if self._source is not None:
            self._source.forget()
            self._source = self._memory = None

    # -- a fault ------------------------------------------------------------------------------------------

    def keep(self, again: Again) -> None:
        """The training will be entered again: keep what this rank has of the step.

        Raises:
            NotSaveable: it is not the step that was agreed on.
        """
        between = SigtermBetween(self._run.engine.status, self._run.users_handler)
        try:
            self._keep(again, between)
        except BaseException:
            between.over()
            raise

    def _keep(self, again: Again, between: SigtermBetween) -> None:
        run, memory, rejoin, alone = self._run, None, None, None
        if run.rank not in again.takers:
            checkpoint = cloned(run.dump(again.step, again.aux))
            durable = again.step if again.saved else run.engine.status.durable
            memory = Memory(again.step, checkpoint, durable, run.source.present)
            place = replace(run.place, incarnation=again.incarnation)
            known = run.engine.status.recovery, run.users_handler, run.life.alike
            source = self._source_of(memory)
            rejoin = partial(_rejoin, self._make, place, memory, source, known, between)
            alone = partial(_save_alone, run.life, FromMemory(memory.step, source))
        wrapped = [ddp for model in run.state.models.values() if (ddp := ddp_of(model)) is not None]
        held = Held(
            again,
            memory,
            run.fit,
            rejoin,
            None,
            wrapped,
            run.state,
            users_handler=run.users_handler,
            between=between,
            alone=alone,
        )
        run.entry.keep(held)

    def _source_of(self, memory: Memory) -> GaspSource:
        config, number, alike = self._run.config, self._run.fit.number, self._run.life.alike
        own = memory.checkpoint[KEY]["small"].get(self._run.rank)
        found = GaspSource(
            partial(_write, memory),
            lambda step: files.gasp_path(config.directory, step, number),
            files.LAYOUT,
            recorder=RecorderOfMemory(memory.step, own),
            writer=self._writer,
            config=config,
            alike=lambda: alike,
        )
        found.present = memory.present
        return found


def _write(memory: Memory, staged: Staged, step: int, aux: Mapping[int, bytes]) -> None:
    if step != memory.step:
        raise NotSaveable(f"this rank holds step {memory.step} in memory, not {step}")
    save_verified(memory.checkpoint, staged)


def _rejoin(
    make: Callable[[Place, Any], AdapterRun],
    place: Place,
    memory: Memory,
    source: GaspSource,
    known: tuple[str, Any, bool],
    between: SigtermBetween,
) -> AdapterRun:
    life = make(place, connect(place))
    life.alike_before = known[2]
    try:
        life.session.status.recovery = known[0]
        between.step_aside()
        life.enter_again(HeldTraining(FromMemory(memory.step, source)), memory.step, memory.durable, known[1])
    except BaseException:
        life.close(completed=False)
        raise
    return life


def _save_alone(life: AdapterRun, held: FromMemory, error: BaseException) -> None:
    """This rank could not join again: save what it holds, by the rule of a rank without a controller."""
    life.source.inner = held
    life.save_alone(error)


def users_handler(held: Held | None) -> Any:
    """The user's own SIGTERM handler, if any; ours is in its place while the training is entered again."""
    if held is not None and held.life is not None:
        return held.users_handler
    users = signal.getsignal(signal.SIGTERM)
    return users if callable(users) else None
