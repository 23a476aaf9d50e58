"""What belongs to one training: life cycle, state, selection, saves, marks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as distributed

from lastgasp.adapter import AdapterRun, Framework, asked_recovery, cause_of, place_in_job
from lastgasp.adapter.torch import EnteredFromFiles, Files, connect, from_rank_0, kind_of, process_groups
from lastgasp_megatron.again import not_again, recovery_for
from lastgasp_megatron.args import options_of
from lastgasp_megatron.compose import file_in_checkpoint
from lastgasp_megatron.exits import ends_at, verdict_of
from lastgasp_megatron.fewer import fewer_of, note_of
from lastgasp_megatron.keeping import needs_arenas
from lastgasp_megatron.left import save_left
from lastgasp_megatron.marks import MegatronMarks
from lastgasp_megatron.own_buffers import OwnBuffers
from lastgasp_megatron.preload import MegatronPreload
from lastgasp_megatron.ranks import device, untried, versions
from lastgasp_megatron.reload import MegatronSelector
from lastgasp_megatron.save import Manifests, Saver
from lastgasp_megatron.settings import not_known, refuse, users_handler
from lastgasp_megatron.state import MegatronState
from lastgasp_megatron.steps import Built
from lastgasp_megatron.testing import install_faults
from lastgasp_megatron.topology import replicas_of, shard_of
from lastgasp_megatron.tracker import LAYOUT, checkpoint_path
from lastgasp_megatron.trainings import Trainings, writer_of

log = logging.getLogger("lastgasp")


class Run:
    """One training of this process; made after `initialize_megatron`, before the model is built.

    Args:
        args: Megatron's namespace.
        again: has the training entered again after a fault; None where it was not begun by `pretrain`.
        trainings: counts those of the script.
        parsed: its options were parsed before `pretrain` was called.

    Attributes:
        life: connects, begins, ends (`AdapterRun`); state: there once the model is bound; chunks: the model's.

    Raises (constructor):
        ConfigError: settings that cannot be protected, or a directory that cannot be written.
        ControlError and its kin: the controller refused this rank or is not there.
    """

    state: MegatronState
    chunks: Sequence[Any] = ()

    def __init__(
        self, args: Any, again: EnteredFromFiles | None, trainings: Trainings, *, parsed: bool = False
    ) -> None:
        refuse(args)
        self.args, self._again, self._options, found = args, again, options_of(args), versions()
        self._parsed, self._number = parsed, trainings.number(self._options.gasp.directory)
        self._asked = asked_recovery(getattr(args, "lastgasp_recovery", None)) is not None
        self._recovery = recovery_for(args)
        self._arena = self._options.arena
        rank, world = distributed.get_rank(), distributed.get_world_size()
        self._place = place = place_in_job(rank, world, replicas_of(args), from_rank_0)
        if place.rank == 0 and (warning := untried(found["megatron-core"])):
            log.warning("%s", warning)
        framework = Framework(
            name=f"megatron {found['megatron-core']}",
            kind_of=kind_of,
            verdict_of=verdict_of,
            device=int(os.environ.get("LOCAL_RANK") or 0),
            versions=found,
        )
        self.life = self._joined(framework)
        self.session, self.save_mark = self.life.session, self.life.source.mark
        self.session.register(str(device()), found)
        self.marks: MegatronMarks | None = None
        self.selector = MegatronSelector(
            args, self._options, place, self.session.gather, _preload(args), number=self._number
        )
        self.selector.note = self.session.note
        writer = writer_of(place, self._number, sha256=self._options.gasp.sha256)
        self.saver = Saver(args, Manifests(writer, self.life.gather_saved, self.session.status))
        self.life.on_close(self.saver.close)

    def _joined(self, framework: Framework) -> AdapterRun:
        """The run of the entry before, where MindIO leads it, or a new one."""
        again, options, place = self._again, self._options, self._place
        life = again.life if again is not None else None
        life = life or AdapterRun(framework, options.gasp, options.marks, place, connect(place))
        if again is not None:
            again.joined()
        return life

    def choose(self) -> None:
        """Choose the checkpoint that Megatron will load, with what ranks before have left in arenas."""
        place, session = self._place, self.session
        if self._arena != 0 and not place.incarnation and needs_arenas(place, session):
            save_left(session, place, self._options.gasp, self._number)
        self.selector.steer()

    def buffers_of(self, model: Any) -> Callable[[], None]:
        """Before that model is loaded; call what is returned behind it, for the buffers that are this rank's own."""
        own = OwnBuffers(model, self._place.rank, shard_of(self.args).sharers)
        return lambda: self.selector.restore(own)

    def bind(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """The model is built and loaded."""
        life, chunks = self.life, list(model) if isinstance(model, list | tuple) else [model]
        built, self.chunks = Built(self.args, chunks, optimizer, scheduler), chunks
        self.state = state = MegatronState(
            built, self._options.gasp, self._place, self.session, lambda: life.alike, arena=self._arena,
            number=self._number,
        )  # fmt: skip
        state.source.present = self.selector.present
        life.on_close(state.close, last=True)
        life.on_close(state.steps.uninstall)
        life.bind(state)
        state.install()
        life.on_close(install_faults(model, optimizer))
        self._mark(optimizer)

    def _mark(self, optimizer: Any) -> None:
        """Marks never stop a job."""
        recorder = self.session.recorder
        if recorder is None:
            return
        try:
            self.marks = marks = MegatronMarks(recorder.marks, device(), self.state.steps.step + 1)
            self.life.on_close(marks.close)
            marks.install(optimizer)
            recorder.set_groups(process_groups())
            recorder.set_device_rows(marks.device_rows)
        except Exception as error:
            log.warning("steps are not marked: %s", cause_of(error))
            self.marks = None

    def begin(self) -> None:
        """Training starts, or resumes from what was loaded."""
        again, step, directory = self._again, self.state.steps.step, self._options.gasp.directory
        if again is not None:
            again.why = again.why or not_again(self.args)
            again.begins_with(step)
            files = Files(lambda number: checkpoint_path(directory, number), LAYOUT)
            again.offer(self.life, self._recovery, self._asked, files, fewer=fewer_of(self.args, self._parsed))
            if again.resized and (note := note_of(self.args, step)):
                self.session.note(note)
        if self.marks is not None:
            self.marks.place()
        for text in filter(None, (*not_known(self.args), self._acceptance(step))):
            self.session.note(text)
        durable = step if step == self.selector.resumed else 0
        self.life.begin(step, durable, users_handler=users_handler(self.args))
        self.saver.training = True
        self.saver.loaded = checkpoint_path(Path(self.args.load).absolute(), step) if durable else None

    def _acceptance(self, step: int) -> str:
        """What Megatron counts in this process alone for TensorBoard; empty where that is nothing, or no fault was."""
        if not self.selector.goes_on or not getattr(self.args, "mtp_num_layers", None):
            return ""
        return f"--mtp-num-layers: cumulative acceptance rates are of the iterations behind {step} alone"

    def end_if_over(self) -> None:
        """A fault came behind the last iteration of this start, where Megatron's loop asks only once whether to end.

        Raises:
            SystemExit: with code 0, as Megatron's.
        """
        step = self.state.steps.step
        option = ends_at(self.args, step) if self.selector.goes_on and step == self.selector.resumed else ""
        if option:
            if self._place.rank == 0:
                log.info("iteration %d was the last one of this start (%s): it is saved, the job ends", step, option)
            raise SystemExit(0)

    def loads_from(self, dataset: Any, consumed: int) -> int:
        """The sample that a loader begins with: the first, where all were trained with before a fault.

        Megatron's loop then ends at once, and its last evaluation is made again; its sampler refuses to begin behind
        the last sample.
        """
        args, selector = self.args, self.selector
        over = selector.goes_on and selector.resumed >= int(getattr(args, "train_iters", None) or 0) > 0
        over = over and getattr(args, "dataloader_type", None) == "single"  # others do not refuse, or have no length
        if not over or dataset is None or consumed != args.consumed_train_samples or consumed < len(dataset):
            return consumed
        log.info("iteration %d was the last one, and it is saved: nothing is trained again", selector.resumed)
        return 0

    def park_if_held(self) -> None:
        """Wait while a recovery is in progress: nothing may write where the gasp is about to be published.

        Raises:
            Released: the recovery is over.
        """
        status = self.session.status
        if status.held and not status.inside:
            self.session.before_update()
            status.inside = False


def _preload(args: Any) -> MegatronPreload:
    """Of the files that Megatron itself would read on this rank."""
    gloo = getattr(args, "use_gloo_process_groups", getattr(args, "enable_gloo_process_groups", True))
    without = getattr(args, "finetune", False) or getattr(args, "no_load_optim", False)
    optimizer = bool(getattr(args, "use_distributed_optimizer", False) and gloo and not without)
    first = any(cut.part == 0 for cut in shard_of(args).cuts)
    return MegatronPreload(file_in_checkpoint, optimizer=optimizer, first=first)
