"""MindIO before there is a process group: where it may have a single process started anew (`recover`, or scale out).

The new process has to be in MindIO before it can make a process group with the others, who are only let go when it is.
Whether a process is a new one MindIO alone knows, and only once the process has joined it. So all ranks join as early.
"""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lastgasp.config import GaspConfig
from lastgasp.errors import NotSaveable
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.gasp.secret import UNCOORDINATED, Secret
from lastgasp.ports import Repaired

from . import api as package
from . import exits, limits
from .controller import Endpoint
from .handlers import answering
from .parking import Parking
from .processor_start import JOIN, start_processor
from .scaling import OUT, check_parameter
from .strategies import nodes_of, wanted_strategies
from .validation import address_of, check_size, check_thread, taskd_address, wait_for_listener

log = logging.getLogger("lastgasp")

JOINS = 900.0
"""Seconds until a new process is let go: MindIO waits 10 minutes for all of them (docs/facts/mindio_tft.md §12)."""
CONTROLLER = "LASTGASP_CONTROLLER"
HOT_SWITCH = "hot switch"
STARTED_ANEW = "RESTART_FAULT_PROCESS_TYPE"
"""`worker` in a process that TaskD's agent has started in place of a dead one (docs/facts/taskd.md §2)."""


class AloneError(RuntimeError):
    """This process belongs to a job whose other ranks do not wait for it."""


class Succeeds(Protocol):
    """What the old process of a rank that is moved to another node and its new one agree on.

    All methods raise RuntimeError where they cannot ask.
    """

    def waits(self) -> None:
        """A new process waits for the rank; called again and again."""

    def take_over(self) -> None:
        """The rank is the new process's from now on."""

    def look_for_successor(self) -> bool:
        """Whether a new process waits for this one's rank."""

    def give_way(self) -> None:
        """To what was found."""

    def taken(self) -> bool:
        """Whether the new process has the rank."""


class Meets(Protocol):
    """Where ranks meet that have no session yet; called on MindIO's thread."""

    @property
    def succession(self) -> Succeeds:
        """Of this process's rank."""

    def runs_other_code(self) -> str:
        """In what this process differs from those that it is to train with; empty if in nothing."""

    def rebuild(self, lost: tuple[int, ...]) -> None:
        """All ranks get there; only then the next order comes."""

    def look(self) -> None:
        """What was agreed when all had got there."""


@dataclass
class Early:
    """MindIO's processor of this process.

    Attributes:
        anew: this process has taken the place of another one, which is dead, or lives until it has (`moves`).
        adopted: the session's backend has taken over.
        given: the job's controller by this process's own environment, before it was told of the running one.
        meeting: where it meets the others.
    """

    api: Any
    endpoint: Endpoint
    rank: int
    retry: bool
    device: int = -1
    anew: bool = False
    moves: bool = False
    adopted: bool = False
    given: str = ""
    meeting: Meets | None = None

    def joins(self, meeting: Meets) -> Repaired:
        """Wait until the others have sent it their step.

        Raises:
            RuntimeError: MindIO did not take this process into the job.
        """
        status = RankStatus()
        parking = Parking(self.api, self.rank, status, self.retry, JOINS)
        if self.moves:
            meeting.succession.waits()
            parking.at_each_look = meeting.succession.waits
        handlers = _Joining(self.rank, parking, meeting)
        for name in package.HANDLERS:
            handler = getattr(handlers, name, None) or _not_yet(name)
            getattr(self.api, f"tft_register_{name}_handler")(answering(handler))
        log.warning("MindIO takes this process into a job that runs, as rank %d; it waits for that for %g min, and "
                    "ends then", self.rank, JOINS / 60)  # fmt: skip
        repaired = parking.wait("exception", exits.ARF_FINISH)
        if repaired is None:
            waited = f", for which it has waited {JOINS / 60:g} min" if parking.unanswered else ""
            raise RuntimeError(f"{exits.ARF_FINISH}: MindIO did not take rank {self.rank} into the running job{waited}")
        return repaired

    def ended(self) -> None:
        """The training is over: all ranks look for the controller of a later one as at any start."""
        if self.anew:
            os.environ[CONTROLLER] = self.given

    def left(self) -> None:
        """The interpreter ends before training: MindIO's own exit hook would take that for a normal end of a rank."""
        if self.anew and not self.adopted:
            log.error("rank %d ends before it was taken into the running job", self.rank)
            os._exit(1)


class _Joining:
    """What MindIO orders a process that has no session yet."""

    def __init__(self, rank: int, parking: Parking, meeting: Meets) -> None:
        self._rank, self._parking, self._meeting = rank, parking, meeting

    def rebuild_group(self, fault_ranks: Any, args: Any, ctx: Any) -> None:
        """All ranks get this order, and only then the next one."""
        lost = tuple(int(rank) for rank in fault_ranks)
        if self._rank not in lost:
            raise NotSaveable(f"rank {self._rank} has a new process, and ranks {lost} are said to have one")
        if why := self._meeting.runs_other_code():
            raise NotSaveable(f"rank {self._rank} cannot be taken into the running job: {why}")
        self._meeting.rebuild(lost)
        self._meeting.succession.take_over()
        self._parking.rebuilt(lost)

    def repair(
        self, step: int, need_rebuild: bool, error_ranks: Any, repair_info: Mapping[str, Any], args: Any, ctx: Any
    ) -> None:
        """Another rank gives its state, once both are in the training function."""
        if int(repair_info.get("repair_type", 0)) in package.LOADS:
            raise NotSaveable("no rank holds the state: the job must start again, from its newest good checkpoint")
        self._parking.repair(repair_info)

    def rollback(self, step: int, args: Any, ctx: Any) -> None:
        """There is nothing here to roll back."""
        if not self._parking.takes:
            raise NotSaveable("no rank gives its state to this process")
        self._meeting.look()
        self._parking.rolled_back(step)

    def zit_upgrade_rebuild(self, rank_list: Any, args: Any, zit_param: str) -> None:
        """As `rebuild_group`, where the others have gone on without these ranks meanwhile."""
        check_parameter(OUT, zit_param)
        self.rebuild_group(rank_list, args, None)

    def zit_upgrade_repair(
        self, step: int, need_rebuild: bool, error_ranks: Any, repair_info: Mapping[str, Any], args: Any, zit_param: str
    ) -> None:
        """As `repair`."""
        self.repair(step, need_rebuild, error_ranks, repair_info, args, None)

    def zit_upgrade_rollback(self, step: int, args: Any, zit_param: str) -> None:
        """As `rollback`."""
        self.rollback(step, args, None)


def _not_yet(name: str) -> Callable[..., None]:
    def refuse(*given: Any) -> None:
        raise NotSaveable(f"{name}: this process was started anew, and holds nothing yet")

    refuse.__name__ = name
    return refuse


_early: list[Early] = []


def early_of_this_process() -> Early | None:
    """What `start_early` has made."""
    return _early[0] if _early else None


def is_asked_for(env: Mapping[str, str], fewer: bool = False) -> bool:
    """Whether the job is one in which TaskD may have single processes started anew, while the others train or wait.

    Args:
        fewer: the training may go on with fewer ranks, as far as is known before it begins.
    """
    asked = {"recover", "elastic-training"} if fewer else {"recover"}
    return bool(asked & wanted_strategies(env)) and limits.taskd_has_controller(env)


def why_not_early(env: Mapping[str, str]) -> str:
    """Why this process cannot join before its process group is made, though that is asked for; empty where it can."""
    if package.for_mindspore():
        return "MindSpore takes it from MindIO by itself (MS_ENABLE_TFT)"
    if nodes_of(env) < 2:
        return "it needs two nodes at least"
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "the ranks need the store of torch's agent, which outlives them, and no agent has started this process"
    if env.get(UNCOORDINATED) or Secret.from_environment(env).missing:
        return "the nodes share no secret, so that a new process could not join the job's controller"
    recovery = env.get("LASTGASP_RECOVERY", "auto")
    return "" if recovery in ("auto", "") else f"LASTGASP_RECOVERY={recovery}"


def start_early(fewer: bool = False) -> Early:
    """Join MindIO; `why_not_early` has found nothing.

    Args:
        fewer: as for `is_asked_for`. MindIO learns it now or never.

    Raises:
        ConfigError, DeadlineExceeded: TaskD's controller cannot be used.
        AloneError: this process was started in place of another one, and MindIO does not know of that.
    """
    env = os.environ
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    check_thread()
    check_size(rank, size)
    address = address_of(*taskd_address(False, first=env.get("GROUP_RANK", "0") == "0"))
    wait_for_listener(address, JOIN)
    default = GaspConfig(directory=Path(env.get("LASTGASP_DIR") or tempfile.gettempdir()))
    needed = limits.action_limit(0, default.save_timeout, default.finish_timeout)
    for line in limits.prepare(env, needed, default.directory / "mindio" / "logs", taskd=True):
        log.warning("%s", line)
    device = _take_device(int(env.get("LOCAL_RANK") or 0))
    wanted = wanted_strategies(env)
    granted = ("retry" in wanted, "recover" in wanted, fewer and "elastic-training" in wanted)
    found = Early(package.load(), Endpoint(address.host, address.port), rank, granted[0], device)
    atexit.register(found.left)  # behind MindIO's own hook, so that it is called before that
    found.anew = start_processor(found.api, found.endpoint, (rank, size), granted)
    found.moves = found.anew and reboot_type(found.api) == HOT_SWITCH
    if not found.anew and env.get(STARTED_ANEW) == "worker":
        found.anew = True
        raise AloneError(f"TaskD has started rank {rank} anew, and MindIO has not noticed that it was dead")
    _early[:] = [found]
    return found


def reboot_type(api: Any) -> str:
    """`arf`, or `hot switch`; older packages have no other than the first."""
    ask = package.hidden(api, "tft_get_reboot_type")
    return str(ask()) if ask is not None else "arf"


def _take_device(number: int) -> int:
    """MindIO takes the current device when it is started, and the script has chosen none yet; -1: not known."""
    try:
        import torch_npu  # type: ignore[import-not-found, unused-ignore]

        torch_npu.npu.set_device(number)
        return int(torch_npu.npu.current_device())
    except (ImportError, AttributeError):
        return -1


def other_device(early: Early) -> str:
    """Why MindIO must not be given orders about this rank's device; empty where it has the right one."""
    try:
        import torch_npu  # type: ignore[import-not-found, unused-ignore]

        now = int(torch_npu.npu.current_device())
    except (ImportError, AttributeError):
        return ""
    if early.device in (-1, now):
        return ""
    return f"MindIO was started on device {early.device} (LOCAL_RANK), and the training is on device {now}"
