"""What belongs to this process: the states of MindIO's processor, and the training that is protected.

MindIO's own states are kept only as far as calls are refused in them (docs/facts/mindio_tft.md §7.2).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from lastgasp.adapter import ConfigError
from lastgasp.adapter.again import Again, is_to_be_taken_in, order_of_this_process, order_when_taken_in, tell_code
from lastgasp_mindio import device, elastic, reload, settings
from lastgasp_mindio.classify import Classifier
from lastgasp_mindio.elastic import Wishes
from lastgasp_mindio.enums import Action, ReportState
from lastgasp_mindio.exchange import NotThere, infos_of_all
from lastgasp_mindio.handlers import Handlers
from lastgasp_mindio.notices import say
from lastgasp_mindio.shards import Info
from lastgasp_mindio.training import Protection, protect

log = logging.getLogger("lastgasp")


class NotRunning(Exception):
    """The processor has not been started, or has left."""


@dataclass
class Processor:
    """One per process; the functions of `framework_ttp` are its methods.

    Attributes:
        before_update, completed: the hot path; other functions before the first step, and where nothing is protected.
        framework: of `set_mindio_export_version`.
        copies: local copies were asked for.
        retry, recover, fewer: what may be answered in place (`enable_uce`, `enable_arf`, `enable_zit`).
        dp: of `tft_set_dp_group_info`.
        order: in the new process of a rank that was lost, until it has joined the others.
        waits: in the new process of a rank that is missing, until it has its order.
        repaired: the newest recovery in place.
        alone: nothing that this process does is protected any more: it was forked, or a rank does not take part.
    """

    rank: int = -1
    world_size: int = 0
    started: bool = False
    info: Info | None = None
    handlers: Handlers = field(default_factory=Handlers)
    faults: Classifier = field(default_factory=Classifier)
    framework: str = ""
    copies: bool = False
    retry: bool = False
    recover: bool = False
    fewer: bool = False
    dp: tuple[int, ...] = ()
    waits: bool = False
    order: Again | None = None
    repaired: Again | None = None
    alone: bool = False
    _trainings: int = 0
    _asked: int = 0
    _protection: Protection | None = None
    _inside: bool = False
    _decorated: bool = False
    _entered: bool = False

    def __post_init__(self) -> None:
        self.before_update: Callable[[], None] = self._first_update
        self.completed: Callable[[int], None] = self._first_completed

    # -- life -------------------------------------------------------------------------------------

    def init(self, rank: int, world_size: int) -> None:
        """Who this process is. A second time is refused, as by MindIO."""
        if self.rank >= 0:
            raise ConfigError("tft_init_processor", rank, "one call in a process", "Call it once.")
        self.rank, self.world_size, self.order = rank, world_size, order_of_this_process()
        self.waits = is_to_be_taken_in()

    @property
    def reboot(self) -> bool:
        """Whether this process has to get its state from the others, which have theirs."""
        return self.order is not None or self.waits

    def start(self) -> None:
        """The processor runs, though nothing is connected: the engine is, once the training function is called."""
        if self.rank < 0:
            raise NotRunning("tft_start_processor before tft_init_processor")
        self.started = True
        atexit.register(self._script_ended)
        os.register_at_fork(after_in_child=self._forked_here)

    def _forked_here(self) -> None:
        """In a process that this one has forked (a loader's worker): whatever it does is not said of this rank."""
        self._protection, self.order, self.waits, self.alone = None, None, False, True
        self._anew()

    def require_running(self, what: str) -> None:
        """Raises NotRunning."""
        if not self.started:
            raise NotRunning(f"{what}: tft_init_processor and tft_start_processor come first")

    def close(self) -> None:
        """Training ended well on this rank. Idempotent."""
        protection, self._protection = self._protection, None
        self._anew()
        self._decorated = False
        if protection is not None:
            protection.close()

    def _anew(self) -> None:
        """The next update is the first one of a training."""
        self._inside = False
        self.before_update, self.completed = self._first_update, self._first_completed
        if self.alone:
            self._unprotected()

    def _script_ended(self) -> None:
        """A script that does not call `tft_destroy_processor` has ended well, unless it was a traceback, or a dump.

        MindIO's own hook at exit tells even those as a normal end.
        """
        protection = self._protection
        if protection is None or getattr(sys, "last_value", None) is not None:
            return
        if protection.run.session.status.outcome is None:
            self.close()

    @property
    def trains(self) -> bool:
        """A training is under way, protected or not: its first update has begun."""
        return self._inside or self.before_update != self._first_update

    @property
    def protection(self) -> Protection | None:
        """Of the training that is under way; None where nothing is protected."""
        return self._protection

    # -- the training function --------------------------------------------------------------------

    def decorate(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """`tft_exception_handler`."""

        @wraps(func)
        def protected(*args: Any, **options: Any) -> Any:
            if self._entered:  # inside of another one, whose training it belongs to
                return func(*args, **options)
            self._entered = True
            try:
                return self._train(func, args if self.framework else list(args), options)
            finally:
                self._entered = False

        return protected

    def _train(self, func: Callable[..., Any], given: Any, options: dict[str, Any]) -> Any:
        self.handlers.args = given  # tft_set_step_args changes what handlers get, and not what the function does
        self._decorated = self.started  # what is started inside cannot be started twice
        if self._protection is None and not self.reboot:
            self._anew()
        while True:
            try:
                result = func(*given, **options)
                if self._protection is not None:
                    self._protection.run.finish()
            except BaseException as error:
                again = self._answered(error)
                if again is None:
                    self._decorated = False
                    raise
                traceback.clear_frames(error.__traceback__)
            else:
                if not self.started:
                    self._say_not_started()
                self.close()
                return result
            self._enter_again(again)

    def _connect(self) -> None:
        """Reach the controller, all ranks together. Where MindIO would save nothing, the job runs unprotected."""
        if not self.started:
            self._say_not_started()
            return
        device.remember()
        self._asked += 1
        incarnation = 0 if self.repaired is None else self.repaired.incarnation
        try:
            infos = infos_of_all(self.info, (self.rank, self.world_size), f"{incarnation}-{self._asked}")
            self._trainings += 1
            wishes = self._wishes() if self._decorated else Wishes()
            if wishes.dp is not None:
                tell_code(asked=True)
            self._protection = protect((self.rank, self.world_size), infos, self.handlers, self.faults, wishes)
        except ValueError as error:
            self.alone = isinstance(error, NotThere)
            say(f"nothing of this job can be saved after a fault: {error}", self.rank, logging.ERROR)
            self._unprotected()

    def _say_not_started(self) -> None:
        say("training is not protected: tft_init_processor and tft_start_processor were not called", self.rank)

    def _wishes(self) -> Wishes:
        """Which faults may be answered in place."""
        needed = ("stop", "clean", "repair", "rollback", "rebuild_group")
        missing = [name for name in needed if name not in self.handlers]
        if missing and (self.retry or self.recover):
            say(f"no {missing[0]} handler is registered: after a fault the job restarts", self.rank)
        if self.fewer and (name := elastic.missing(self.handlers)):
            say(f"the job does not go on with fewer ranks (enable_zit): no {name} handler is registered", self.rank)
        if threading.current_thread() is not threading.main_thread():
            return Wishes()
        first, fewer = self._trainings == 1, self.fewer and not elastic.missing(self.handlers)
        recovery = settings.recovery(self.retry and not missing, self.recover and not missing, first)
        return Wishes(recovery, self.dp if fewer and first and settings.may_be_fewer() else None)

    # -- recovery in place ------------------------------------------------------------------------

    def _answered(self, error: BaseException) -> Again | None:
        """What was agreed where the training function is to be called again; else None, and the error propagates."""
        if self.reboot:  # a new process: the adapter leaves the function where all others have state to give
            order, self.order, waits, self.waits = self.order, None, self.waits, False
            left = self.faults.state_of(error) is ReportState.RS_PREREPAIR_FINISH
            return None if not left else order_when_taken_in() if waits else order
        protection = self._protection
        if protection is None:
            return None
        protection.failed(error)
        if protection.again is None:
            self._protection = None
        return protection.again

    def _enter_again(self, again: Again) -> None:
        """Join the next incarnation of the job, and have the state brought to the step that was agreed on."""
        protection, self._protection = self._protection, None
        self.repaired, self._inside, self._asked = again, False, 0
        if protection is not None:
            found = protection.entered_again()
        else:
            self._trainings += 1
            found = Protection.in_place_of_a_dead_rank(
                again, (self.rank, self.world_size), self.handlers, self.faults, self._wishes()
            )
        self._protection = found
        self._count(found)

    def _unprotected(self) -> None:
        self.before_update, self.completed = _nothing, _nothing_completed

    # -- the hot path -----------------------------------------------------------------------------

    def _first_update(self) -> None:
        """Before the first update of a training: connect."""
        if self.reboot:
            raise RuntimeError("ARF FINISH: this process has to get its state from the others before it trains")
        if self._protection is None:
            self._connect()
        self._inside = True

    def _first_completed(self, step: int) -> None:
        """After the first update: only now is the step known from which training began."""
        protection, inside = self._protection, self._inside
        self._inside = False
        if not inside:
            self._ignored()
        if not inside or protection is None:
            return
        if settings.reuses_fp32() and not settings.is_update(step):
            return
        loaded = self._trainings == 1 and (step == 1 or protection.saver.has(step - 1))  # else it may count as it likes
        protection.begin(step - 1, loaded=loaded)
        session = protection.run.session
        if self.rank == 0 and self._trainings == 1 and (text := reload.passed_over(step - 1, protection.run.place)):
            if protection.run.place.attempt:
                session.note(text)
            else:
                log.warning("mindio_ttp: %s", text)
        session.before_update()
        session.step_completed(step)
        self._count(protection)

    def _count(self, protection: Protection) -> None:
        """From now on the engine is told of each update."""
        session = protection.run.session
        status, converts = session.status, settings.reuses_fp32()

        def completed(number: int) -> None:
            if not status.inside:
                self._ignored()
            else:
                session.step_completed(number if not converts or settings.is_update(number) else status.step)

        self.before_update, self.completed = session.before_update, completed

    def _ignored(self) -> None:
        say("tft_end_updating_os without tft_start_updating_os before it is ignored, as by MindIO", self.rank)

    # -- without the decorator --------------------------------------------------------------------

    def report(self, state: ReportState, code: str) -> None:
        """`tft_report_error`; returns when the recovery is over. Raises NotRunning where there is nothing to save."""
        protection = self._protection
        if protection is None or not protection.run.begun:
            raise NotRunning(f"tft_report_error({state.name}): no step was completed")
        if state in (ReportState.RS_INIT_FINISH, ReportState.RS_PREREPAIR_FINISH, ReportState.RS_STEP_FINISH):
            raise NotRunning(f"tft_report_error({state.name}): this engine lets no new process into a running job")
        protection.reported(state, code)

    def wait(self) -> int:
        """The end of the recovery. Raises NotRunning where there is none."""
        protection = self._protection
        if protection is None or not protection.run.session.status.held:
            raise NotRunning("there is no recovery to wait for")
        config = protection.run.config
        protection.run.session.status.wait_over(config.finish_timeout + 2 * config.save_timeout + 5)
        return int(Action.EXIT.value)

    def dump(self) -> bool:
        """Have the healthy job saved, and ended; whether that was begun."""
        protection = self._protection
        if protection is None or not protection.run.begun:
            return False
        session = protection.run.session
        thread = threading.Thread(
            target=session.fault, args=("sigterm", "a dump was asked for"), name="lastgasp-dump", daemon=True
        )
        thread.start()
        return True


def _nothing() -> None:
    """Nothing is protected."""


def _nothing_completed(step: int) -> None:
    """Nothing is protected."""


PROCESSOR = Processor()
"""This process's."""
