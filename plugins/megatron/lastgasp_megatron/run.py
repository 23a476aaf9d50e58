"""What belongs to one training: session, state, chooser, saver; its beginning and its end."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

from lastgasp.config import check_writable
from lastgasp.deferred_source import DeferredSource
from lastgasp.exception_origin import is_success
from lastgasp.gasp.messages import Release
from lastgasp.gasp.rank_status import Released
from lastgasp.launch import framework_verdict
from lastgasp.pytorch.exception_origin import cause_of, kind_of
from lastgasp.pytorch.processgroups import process_groups
from lastgasp.session import Session, leave
from lastgasp.steps.attach import Marking
from lastgasp.testing import faults
from lastgasp.undoing import run_all
from lastgasp_megatron.args import options_of
from lastgasp_megatron.compose import file_in_checkpoint
from lastgasp_megatron.exits import verdict_of
from lastgasp_megatron.manifests import Manifests
from lastgasp_megatron.marks import MegatronMarks
from lastgasp_megatron.preload import Preload
from lastgasp_megatron.ranks import connect, device, place_of, untried, versions
from lastgasp_megatron.reload import MegatronSelector
from lastgasp_megatron.save import Saver
from lastgasp_megatron.settings import refuse, users_handler
from lastgasp_megatron.state import MegatronState
from lastgasp_megatron.topology import replicas_of, shard_of

log = logging.getLogger("lastgasp")


class Run:
    """One training of this process; made after `initialize_megatron`, before the model is built.

    Args:
        args: Megatron's namespace.

    Raises (constructor):
        ConfigError: settings that cannot be protected, or a directory that cannot be written.
        ControlError and its kin: the controller refused this rank or is not there.
    """

    state: MegatronState

    def __init__(self, args: Any) -> None:
        refuse(args)
        self.args, self.options = args, options_of(args)
        check_writable(self.options.gasp.directory)
        place = place_of(replicas_of(args))
        warning = untried(versions()["megatron-core"])
        if warning and place.rank == 0:
            log.warning("%s", warning)
        self._source, self._begun = DeferredSource(place.rank), False
        framework, local = f"megatron {versions()['megatron-core']}", int(os.environ.get("LOCAL_RANK") or 0)
        marking = Marking(config=self.options.marks, framework=framework, device=local)
        self.session = Session(self.options.gasp, place, self._source, connect(place), marking)
        self.progress = self.session.progress
        self.save_mark = self._source.mark = self.session.mark("save_checkpoint")
        self.marks: MegatronMarks | None = None
        self.selector = MegatronSelector(args, self.options, place, self.session.gather, _preload(args))
        self.selector.note = self.session.note
        self.saver = Saver(args, place.rank, Manifests(place, self.session.gather, self.session.status))
        self._undo: list[Callable[[], None]] = []
        self.session.register(str(device()), versions())

    def bind(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """The model is built and loaded."""
        self.state = MegatronState(
            self.args,
            model,
            optimizer,
            scheduler,
            config=self.options.gasp,
            place=self.session.place,
            before_update=self.session.before_update,
            step_completed=self._step_completed,
        )
        self._source.inner = self.state.source
        self.state.install()
        self._undo += [self.state.undo, _faults(model, optimizer)]
        self._mark(optimizer)

    def _mark(self, optimizer: Any) -> None:
        """What only measures never stops a job."""
        recorder = self.session.recorder
        if recorder is None:
            return
        try:
            self.marks = marks = MegatronMarks(recorder.marks, device(), int(self.state.step) + 1)
            self._undo.append(marks.close)
            marks.install(optimizer)
            recorder.set_groups(process_groups())
            recorder.set_device_rows(marks.device_rows)
        except Exception as error:
            log.warning("steps are not marked: %s", cause_of(error))
            self.marks = None

    def _step_completed(self, step: int) -> None:
        self.session.step_completed(step)  # looked up each time: the first one is another method

    def begin(self) -> None:
        """Training starts, or goes on from what was loaded."""
        step = int(self.state.step)
        if self.marks is not None:
            self.marks.place()
        self.state.source.alike = self.session.compare_replicas(self.state.digests)
        self.session.training_started(step, durable=step if step and step == self.selector.resumed else 0)
        self.session.take_sigterm(users_handler(self.args))
        self._begun = True

    def trained(self) -> None:
        """`train` has returned; a last save and the evaluation may follow."""
        self.progress("data")

    def park_if_held(self) -> None:
        """While a recovery is on, nobody writes where the gasp is going to stand.

        Raises:
            Released: the recovery is over.
        """
        status = self.session.status
        if status.held and not status.inside:
            self.session.before_update()
            status.inside = False

    def end_with(self, error: BaseException) -> None:
        """`train` raised: have the step saved. Returns when the exception shall go on as it is."""
        if isinstance(error, Released):
            leave(error.outcome)
        if is_success(error):
            self.close(goodbye=True)
            return
        verdict = verdict_of(error)
        if verdict is not None:  # all ranks end with it; what is worth saving Megatron has saved itself
            log.error("%s", verdict)
            framework_verdict.give(verdict)
            self.close(goodbye=True)
            return
        kind = kind_of(error)
        outcome = self._recover(error)
        if kind == "peer" and self.session.place.world_size > 1:
            leave(outcome, cause_of(error))
        self.close(goodbye=False)

    def end_early(self, error: BaseException) -> None:
        """Something raised outside of `train`, where there is no step to save; often while a checkpoint was loaded."""
        good = is_success(error)
        if not good and not isinstance(error, Released):
            self.session.failed_to_start(error, kind_of(error))
        self.close(goodbye=good)

    def _recover(self, error: BaseException) -> Release:
        status = self.session.status
        if not self.state.finish_step():
            status.broken = f"{cause_of(error)}: raised inside the update, so the state is between two steps"
        if not status.inside:
            status.broken = ""
        if missing := self.state.unlogged:
            self.session.note(missing)
        outcome = self.session.fault(kind_of(error), cause_of(error))
        if outcome.ending == "gave_up" and self.state.advice:
            log.error("%s", self.state.advice)
        return outcome

    def close(self, goodbye: bool) -> None:
        """Undo everything."""
        undone, self._undo = self._undo[::-1], []
        run_all([*undone, lambda: self.session.close(goodbye)])


def _preload(args: Any) -> Preload:
    """Of the files that Megatron itself would read on this rank."""
    gloo = getattr(args, "use_gloo_process_groups", getattr(args, "enable_gloo_process_groups", True))
    without = getattr(args, "finetune", False) or getattr(args, "no_load_optim", False)
    optimizer = bool(getattr(args, "use_distributed_optimizer", False) and gloo and not without)
    return Preload(file_in_checkpoint, optimizer=optimizer, first=shard_of(args).part == 0)


def _faults(model: Any, optimizer: Any) -> Callable[[], None]:
    """The faults that `LASTGASP_FAULT` asks for."""
    if not os.environ.get(faults.ENV_FAULT, "").strip():
        return lambda: None
    if importlib.util.find_spec("lastgasp_megatron.testing") is None:
        return lambda: None
    from lastgasp_megatron.testing import install_faults

    undo: Callable[[], None] = install_faults(model, optimizer)
    return undo
