"""The recovery backend on MindIO: start-up in the order of docs/facts/mindio_tft.md §15, faults, endings."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, cast

from lastgasp import _clock
from lastgasp.backends import mindio_ends
from lastgasp.config import GaspConfig
from lastgasp.deferred_source import TOO_LATE
from lastgasp.events import Fault, FaultKind
from lastgasp.gasp import messages as m
from lastgasp.gasp.again import INCARNATION, LED
from lastgasp.gasp.observer import IN_MINDX
from lastgasp.gasp.processor import Processor
from lastgasp.gasp.rank_status import RankStatus, exit_code, given_up, gone_on
from lastgasp.ports import Repaired, StateSource, in_place_of
from lastgasp.topology import Place, ReplicaGroups

from . import api as package
from . import exits, limits
from .controller import Endpoint, ask_for_dump, tell_used
from .early import early_of_this_process, other_device
from .finding import Finder
from .giving_way import GivingWay
from .handlers import Handlers
from .lastword import LastWord, park
from .limits import taskd_has_controller
from .parking import Parking
from .processor_start import start_processor
from .record import keep_record
from .replicas import replica_info
from .shutdown import destroy, hangs
from .strategies import CANNOT, NOT_FEWER, Strategies, asked_for, decide_strategies, nodes_of
from .validation import check_size, check_thread
from .window import Window

log = logging.getLogger("lastgasp")

NAME = "MindIO"
SETTLE = 5.0
"""Seconds for the publishing rank's report to reach the others."""
LAG = 1.0
"""Seconds for MindIO's threads to report the published checkpoint to its controller."""
TOGETHER = 60.0
"""Seconds that ranks wait for each other at the end of training: once one has exited, MindIO saves nothing."""
TURN = 5.0
"""Seconds by which rank 0 precedes the others when all are asked to stop and no dump can be requested."""
WAKE = 0.02
"""Seconds between two looks for an order to stop, while ranks wait for each other at the end."""


@dataclass(frozen=True)
class Control:
    """What the Session shares with its backend.

    Args:
        processor: the control thread: crash-safe buffers, all-gathers, the record; it leads no recovery here.
        gather: an all-gather over it. uncoordinated: the recovery by one rank's own decision.
        host: where our own controller listens, and MindIO's should. leave: ends the process at once.
    """

    status: RankStatus
    processor: Processor
    gather: Callable[[str, bytes], list[bytes]]
    uncoordinated: Callable[[Fault], m.Release]
    host: str
    leave: Callable[[int], NoReturn]


class MindioBackend:
    """Implements ports.RecoveryBackend.

    MindIO detects dead processes (in 8 to 12 s) and ranks that report an error, locks the step, and chooses savers and
    publisher. This class adds what it lacks: see `gasp.observer`, and `fault` for ranks that are the only holder of
    their shard.
    """

    name = "mindio"
    grace = 5.0

    def __init__(self, config: GaspConfig, place: Place, source: StateSource, control: Control) -> None:
        check_size(place.rank, place.world_size)
        self._info = replica_info(place)
        self._config, self._place, self._source, self._control = config, place, source, control
        self._status, self._processor = control.status, control.processor
        self._limit = config.finish_timeout + 2 * config.save_timeout + 5
        self._api: Any = None
        self._window: Window | None = None
        self._parking: Parking | None = None
        self._endpoint = Endpoint("", 0)
        self._state, self._leader = "new", NAME
        self._rebooted = False
        self._after_all = threading.Lock()
        self._last_word: LastWord | None = None
        self._giving_way = GivingWay(place.rank, control.processor, control.status, control.leave)
        self.strategies: Strategies | None = None

    # -- start ------------------------------------------------------------------------------------

    def training_started(self) -> None:
        """Start the controller if that is our task, the processor and the handlers; agree on the address."""
        if self._api is not None:  # it was entered again, and has its state
            self._status.broken, self._status.paused = "", 0.0
            self._processor.begin()
            return
        check_thread()
        nbytes = int(getattr(self._source, "nbytes", 0))
        needed = limits.action_limit(nbytes, self._config.save_timeout, self._config.finish_timeout)
        logs = self._config.directory / "mindio" / "logs"
        for line in limits.prepare(os.environ, needed, logs, taskd_has_controller(os.environ)):
            log.warning("%s", line)
        finder = Finder(self._place.rank, self._place.world_size, self._control.gather, self._control.host)
        taskds = finder.taskds()
        self.strategies = self._decide(taskds is not None)
        self._endpoint = taskds or finder.own(self.strategies)
        self._api = api = package.load()
        self._last_word = LastWord(api, self._leave)
        self._start_processor(api, self.strategies)
        # MindX is asked then, which takes its time.
        patience = limits.patience(os.environ) if self.strategies.more else exits.DETECTION
        self._parking = Parking(
            api, self._place.rank, self._status, self.strategies.retry, self._limit, patience=patience
        )
        self._parking.at_each_look, self._parking.stays = self._giving_way.look, self._giving_way.over
        self._handlers = Handlers(
            self._config, self._place, self._source, self._status, self._processor, self.strategies,
            over=self._published, leave=self._leave, parking=self._parking,
        )  # fmt: skip
        self._handlers.register(api)
        self._window = Window(api, self._status, self._limit, self._giving_way.begins)
        self._processor.led_elsewhere = self._told
        self._leader = NAME if taskds is None else IN_MINDX
        self._processor.tell(m.Led(by=self._leader))
        self._processor.begin()
        self._state = "running"
        self._last_word.install()
        atexit.register(self._left_unannounced)

    def regroup(self, replicas: ReplicaGroups) -> None:
        """As in `ports.Repairs`.

        MindIO would not take groups of several sizes.

        It keeps the original groups; a plan that lacks a shard is then refused when it is published, and our own
        controller, which knows the new groups, takes the lead.
        """
        self._place = replace(self._place, replicas=replicas)

    def renumber(self, rank: int, world_size: int, replicas: ReplicaGroups) -> None:
        """As in `ports.Repairs`. To MindIO all ranks keep their numbers (docs/facts/mindio_tft.md §7.4)."""
        self._place = replace(self._place, rank=rank, world_size=world_size, replicas=replicas)
        self._handlers.renumber(self._place)
        self._processor.tell(m.Led(by=self._leader))

    def _decide(self, taskd: bool) -> Strategies:
        why_not = "" if in_place_of(self._source) is not None else getattr(self._source, "not_in_place", "") or CANNOT
        early = early_of_this_process()
        if early is not None and (other := other_device(early)):
            why_not = why_not or other
        no_recover = getattr(self._source, "no_recover", TOO_LATE)
        fewer = getattr(in_place_of(self._source), "no_fewer", NOT_FEWER)
        found = decide_strategies(asked_for(), why_not, taskd, nodes_of(), package.for_mindspore(), no_recover, fewer)
        for name, why in found.refused.items():
            log.warning("strategy %s is refused: %s", name, why)
        return replace(found, told=early is not None)

    def _start_processor(self, api: Any, strategies: Strategies) -> None:
        place, zit = self._place, strategies.elastic
        if (early := early_of_this_process()) is not None:
            early.adopted = True
        else:
            granted = (strategies.retry, strategies.recover, zit)
            self._rebooted = start_processor(api, self._endpoint, (place.rank, place.world_size), granted)
        if self._rebooted:
            log.warning("MindIO takes rank %d into a job that runs", place.rank)
        if place.rank == 0:
            tell_used(self._endpoint)
        api.tft_set_optimizer_replica(place.rank, self._info)
        set_group = package.hidden(api, "tft_set_dp_group_info") if zit else None
        if set_group is not None:
            set_group(place.rank, self._info[0]["rank_list"])

    # -- the hot path -----------------------------------------------------------------------------

    def before_update(self) -> None:
        """As in the port; before `training_started` nothing is protected."""
        if self._window is not None:
            self._window.before_update()
        else:
            self._status.before_update()

    def step_completed(self, step: int) -> None:
        """As in the port."""
        if self._window is not None:
            self._window.step_completed(step)
        else:
            self._status.step_completed(step)

    # -- faults -----------------------------------------------------------------------------------

    def goes_on(self, kind: str, cause: str) -> Repaired | None:
        """As in `ports.Repairs`."""
        parking = self._parking
        if self._state != "running" or parking is None or not self._stays:
            return None
        fault = self._fault_here(kind, cause)
        moved = exits.state_of(cause, True) == "RS_STEP_FINISH"
        if moved:
            self._giving_way.step_finished()
        repaired = parking.wait(kind, cause)
        if repaired is None and self._status.outcome is None:
            self._giving_way.not_ordered(parking.unanswered)
        self._giving_way.over()
        if moved and repaired is not None:
            ranks = ", ".join(map(str, repaired.lost))
            self._processor.tell(m.Noted(text=f"{self._leader} has moved rank {ranks} to another node (hot switch)"))
        if repaired is not None and exits.state_of(cause, True) not in ("RS_UNKNOWN", "RS_NORMAL", *exits.PARKED):
            keep_record(self._config, self._place, fault, repaired, self._leader, self._status.from_files)
        return repaired

    @property
    def _stays(self) -> bool:
        return self.strategies is not None and (self.strategies.any_in_place or self.strategies.told)

    def fault(self, kind: str, cause: str) -> None:
        """Report to MindIO and wait for its ending; if it makes no checkpoint, our controller takes the lead."""
        fault = self._fault_here(kind, cause)
        if self._state != "running" or self._api is None:
            self._processor.over(given_up("MindIO was not running"))
            return
        self._state = "faulted"
        self._giving_way.over()
        self._processor.report(fault)
        try:
            if self._parking is None or not self._parking.told:
                self._tell(kind, cause)
        except BaseException as error:  # the fallback follows in any case
            log.error("MindIO could not be notified: %s", m.one_line(error))
        if self._status.wait_over(SETTLE) is None:
            self._lead_after_all(fault)

    def _tell(self, kind: str, cause: str) -> None:
        assert self.strategies is not None
        found = exits.telling(kind, cause, self.strategies.retry)
        if found.after and self._status.wait_over(found.after) is not None:
            return
        if found.after and self._status.held and self._status.wait_over(self._limit) is not None:
            return  # this rank saves, and must not count as faulty meanwhile
        # RS_UNKNOWN waits for MindIO's exit notice, for the action limit at most.
        self._api.tft_report_error(int(self._api.ReportState[found.state].value))
        if found.state == "RS_NORMAL":
            self._status.wait_over(self._limit)

    def _fault_here(self, kind: str, cause: str) -> Fault:
        now, text = _clock.wall_ns(), m.encodable(cause)
        return Fault(kind=cast(FaultKind, kind), rank=self._place.rank, cause=text, step=self._status.step, seen_ns=now)

    def _lead_after_all(self, fault: Fault) -> None:
        """Recover by our controller where MindIO saves nothing: faulty ranks are the only holders (mindio_tft.md §16).

        Both the training thread and MindIO's may call this, one after the other.
        """
        with self._after_all:
            if self._status.outcome is None:
                self._lead(fault)

    def _lead(self, fault: Fault) -> None:
        log.warning("MindIO made no checkpoint (its log is in %s)", os.environ.get(limits.LOG_PATH))
        nothing = m.Ended(ending="gave_up", step=-1, path="", reason=f"{NAME} made no checkpoint")
        if self._processor.tell(nothing) and self._status.wait_over(self._limit) is not None:
            return
        self._status.hold(self._limit)  # the training thread may be healthy, and must not continue meanwhile
        try:
            outcome = self._control.uncoordinated(fault)
        except BaseException as error:
            outcome = given_up(m.one_line(error))
        self._processor.over(outcome)

    def _told(self, fault: Fault) -> None:
        """Handle a fault seen by the control thread, which must not wait."""
        if fault.kind == "sigterm":
            threading.Thread(target=self._stop_job, args=(fault,), name="lastgasp-sigterm", daemon=True).start()

    def _stop_job(self, fault: Fault) -> None:
        """Told to stop: have the healthy job saved; if no dump can be requested, rank 0 reports first."""
        if self._giving_way.decided():
            self._giving_way.end()
        answer = ask_for_dump(self._endpoint)
        turn = TURN if self._place.rank else 0.0
        # A refusal means that a recovery is in progress, from which a report would only remove a holder.
        patience = {"granted": self._limit, "refused": exits.DETECTION}.get(answer, turn)
        if self._status.wait_over(patience) is not None:
            return
        try:
            self._api.tft_report_error(int(self._api.ReportState["RS_UNKNOWN"].value))
        except Exception as error:
            log.error("MindIO could not be notified: %s", m.one_line(error))
        if self._status.wait_over(SETTLE) is None:
            self._lead_after_all(fault)

    def _over(self, ended: m.Ended) -> None:
        """Report the ending, known to this rank, to the others by our controller, and to the training thread."""
        if self._processor.tell(ended) and self._status.wait_over(SETTLE) is not None:
            return  # the controller has received it and released this rank with the others
        self._processor.over(
            m.Release(recovery=0, ending=ended.ending, step=ended.step, path=ended.path, reason=ended.reason)
        )

    def _published(self, ended: m.Ended) -> None:
        """Runs on MindIO's thread before it answers its controller: the process must not end before that."""

        def later() -> None:
            self._status.wait_over(LAG)
            self._over(ended)

        threading.Thread(target=later, name="lastgasp-mindio-over", daemon=True).start()

    def _leave(self) -> None:
        """Handle MindIO's exit order (MindSpore mode) or its ending of the process (torch mode).

        If no fault was reported and MindIO has begun no save (mindio_tft.md §16), our recovery runs first.
        """
        if self._state == "left":
            park()  # training ended well, and what the process does afterwards does not concern MindIO
        if self._status.wait_over(SETTLE) is None:
            fault = self._fault_here("peer", "MindIO ended the job without a checkpoint")
            self._processor.report(fault)
            self._lead_after_all(fault)
        if self._state == "faulted":
            threading.Event().wait(self.grace)  # first the rank's own traceback and clean-up
        self._control.leave(exit_code(self._status.outcome or given_up("no outcome")))

    def protect(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """As in `ports.Repairs`.

        The loop must continue from the state that `rollback` has set. Without a granted strategy return `train` itself.
        """
        protected = exits.without_exits(train)
        if not self._stays:
            return train

        def run(*args: Any, **options: Any) -> Any:
            self._join_in()
            while True:
                try:
                    return protected(*args, **options)
                except RuntimeError as error:
                    if self.goes_on("exception", str(error)) is None:
                        raise

        return run

    def _join_in(self) -> None:
        """Let a restarted rank wait until the others have sent it their step (mindio_tft.md §6, ARF)."""
        rebooted, self._rebooted = self._rebooted, False
        if rebooted and self.goes_on("exception", exits.ARF_FINISH) is None:
            raise RuntimeError(f"{exits.ARF_FINISH}: MindIO did not take this rank into the running job")

    # -- end --------------------------------------------------------------------------------------

    def goodbye(self) -> None:
        """Leave MindIO together with the others, in bounded time."""
        if self._state == "running" and self._together():
            self._state = "left"
            destroy(self._api)
            self._hand_over()

    def _hand_over(self) -> None:
        """The embedded engine leads later trainings of this process; to it MindIO's repairs are no incarnations."""
        mindio_ends()
        self._processor.tell(m.Led(by=""))
        if INCARNATION in os.environ:
            os.environ[INCARNATION] = os.environ.get(LED) or "0"
        if (early := early_of_this_process()) is not None:
            early.ended()

    def _together(self) -> bool:
        """Wait until all ranks have reached the end of training: once one has exited, MindIO saves nothing (§7.1)."""
        self._status.progress("backward")  # to the hang watchdog this rank waits for others
        ended = self._ended_everywhere()
        if ended is None and (repaired := self.goes_on("peer", "a rank needs another one whose training has ended")):
            self._status.release(gone_on(repaired))
            return False
        whole = ended[0] if ended else None
        if whole is not None and whole.missing:  # this rank has the last step, even if others are lost
            granted = self.strategies is not None and self.strategies.recover
            if granted and (repaired := self.goes_on("peer", whole.missing)) is not None:
                self._status.release(gone_on(repaired))
                return False
            self.fault("peer", f"training ended here, but not everywhere: {whole.missing}")
            return False
        if self._status.held:  # a dump may need this rank
            self._status.wait_over(self._limit)
        return True

    def _ended_everywhere(self) -> list[m.Gathered | None] | None:
        """What `gather` has found; None where MindIO orders this rank to stop meanwhile."""
        found: list[m.Gathered | None] = []
        parking = self._parking
        tag = f"mindio-end-{parking.number if parking else 0}"
        ask = threading.Thread(target=lambda: found.append(self._processor.gather(tag, b"", TOGETHER)), daemon=True)
        ask.start()
        while ask.is_alive():
            if self._stays and parking is not None and parking.stop_came.is_set():
                return None
            ask.join(WAKE)
        return found

    def close(self) -> None:
        """Do nothing: the process's end informs MindIO."""
        self._processor.led_elsewhere = None
        if self._last_word is not None and self._state == "left" and not hangs():
            self._last_word.remove()

    def _left_unannounced(self) -> None:
        """The interpreter ends without a reported reason, which MindIO's exit hook would take for a normal end."""
        if self._state != "running":
            return
        log.error("rank %d ends in the middle of training: counted as a fault", self._place.rank)
        self.fault("exit", "the interpreter ended in the middle of training")
        self._control.leave(exit_code(self._status.outcome or given_up("no outcome")))
