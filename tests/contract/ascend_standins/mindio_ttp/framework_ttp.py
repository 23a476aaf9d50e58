"""The processor's half: one per rank process (mindio_tft.md §2.2, §5, §6, §7.2)."""

from __future__ import annotations

import _thread
import atexit
import importlib.util
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from . import _rules as rules
from ._rules import seconds, strict, trace
from .controller_ttp import tft_destroy_controller, tft_init_controller, tft_start_controller
from .utils import tft_can_do_uce_repair

if importlib.util.find_spec("mindspore" if rules.MINDSPORE else "torch_npu") is None:
    raise ImportError(f"No module named '{'mindspore' if rules.MINDSPORE else 'torch_npu'}'")

__all__ = [
    "Action", "OptimizerType", "RepairType", "ReportState", "tft_can_do_uce_repair", "tft_destroy_controller",
    "tft_destroy_processor", "tft_end_updating_os", "tft_exception_handler", "tft_get_reboot_type",
    "tft_get_repair_step", "tft_get_repair_type", "tft_init_controller", "tft_init_processor", "tft_is_reboot_node",
    "tft_pause_train", "tft_report_error", "tft_report_load_ckpt_step", "tft_reset_limit_step",
    "tft_set_optimizer_replica", "tft_set_step_args", "tft_start_controller", "tft_start_copy_os",
    "tft_start_processor", "tft_start_updating_os", "tft_wait_next_action",
]  # fmt: skip

ACTION_TIMEOUT = rules.number("TTP_NORMAL_ACTION_TIME_LIMIT", 180, 30, 1800)
"""Read at import (§4)."""


class Action(Enum):
    """What a wait returns."""

    RETRY = 0
    EXIT = 1


class OptimizerType(Enum):
    """Index into the replica info."""

    ATTENTION = 0
    MOE = 1


class ReportState(Enum):
    """What a rank reports."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(Enum):
    """What a repair handler is to do."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


_STATUS = {1: 9, 2: 2, 3: 4, 4: 12, 5: 7, 6: 8, 7: 10, 8: 1, 0: 0}
"""ReportState -> rank status of the controller (§3)."""
FAULTS = [
    ("UCE ERROR", "RS_UCE", True), ("HBM MULTI BIT ECC", "RS_UCE", True), ("FORCE STOP", "RS_NORMAL", False),
    ("ARF FINISH", "RS_PREREPAIR_FINISH", False), ("STEP FINISH", "RS_STEP_FINISH", False),
    ("HCCL OP RETRY FAILED", "RS_HCCL_FAILED", True), ("SUSPECT REMOTE ERROR", "RS_HCCL_FAILED", True),
]  # fmt: skip
ISOLATED, INIT_FINISH = 6, 7
"""Rank status: registered in the middle of a repair; ready to have groups made."""
HANDLERS = (
    "save_ckpt", "rename", "exit", "stop", "clean", "repair", "rollback", "rebuild_group", "stream_sync",
    "zit_downgrade_rebuild", "zit_upgrade_rebuild", "zit_upgrade_repair", "zit_upgrade_rollback",
)  # fmt: skip


NEEDED = {"save_ckpt", "rename", "stop", "clean", *(["exit"] if rules.MINDSPORE else [])}
"""Without them there is no checkpoint (a rename that is missing counts as done), and in MindSpore mode no end (§6)."""


class _Processor:
    """This process's; BEGIN -> INITED -> START -> NORMAL -> PAUSE or DUMP -> END (§7.2)."""

    def __init__(self) -> None:
        self.state, self.rank, self.world = "BEGIN", -1, 0
        self.uce = False
        self.wire: rules.Wire | None = None
        self.handlers: dict[str, tuple[Callable[..., Any], Any]] = {}
        self.args: Any = None
        self.step, self.updating, self.status = 0, False, 0
        self.limit, self.force = 0, False
        self.dumping = False
        self.repair_id, self.repair_step, self.replica_sent, self.reboot_asked = 0, 0, False, False
        self.exiting = threading.Condition()
        self.forced = threading.Condition()
        self.go, self.answered = threading.Semaphore(0), threading.Event()
        """One semaphore for both waits (§7.2): who waits for the wrong one gets the other's word."""
        self.parked, self.refused = threading.Event(), False
        self.arf = self.zit = False
        self.next_action = Action.RETRY.value
        self.corrupt = False
        self.least_replicas = self.pause_at = 0
        self.pause_raises = self.hot = False
        self.in_pause = threading.Event()

    # -- threads ----------------------------------------------------------------------------------

    def heartbeats(self) -> None:
        """Goes on while the GIL is held in the real one; here Python's thread will do."""
        while self.state != "END":
            self.beat()
            time.sleep(seconds(2.0))

    def beat(self) -> None:
        """Status, step, data status."""
        if self.wire is not None:
            self.wire.send(kind="heartbeat", step=self.step, status=self.status, updating=self.updating)

    def listen(self) -> None:
        """Orders one at a time, on one foreign thread (P): a handler that blocks also blocks later orders."""
        assert self.wire is not None
        while (message := self.wire.receive()) is not None:
            kind = message["kind"]
            if kind == "registered":
                self.repair_id, self.refused = message["repair_id"], message["result"] == "error"
                self.hot = message["hot"]
                if message["result"] == "repair":
                    self.status = ISOLATED
                self.answered.set()
            elif kind == "replica_ok":
                self.answered.set()
            elif kind == "exit":
                self.exit()
            elif kind != "destroyed":
                self.repair_id = message["repair_id"]
                result = getattr(self, "do_" + kind)(message)
                self.wire.send(kind="reply", serial=message["serial"], result=result)

    # -- orders -----------------------------------------------------------------------------------

    def do_collect(self, message: dict[str, Any]) -> str:
        """The status goes out first, on the same connection."""
        self.beat()
        return "ok"

    def do_prelock(self, message: dict[str, Any]) -> str:
        """Wait until the data are complete at exactly this step."""
        self.limit, self.force, self.state = message["step"], False, "PAUSE"
        trace("prelock", step=self.limit)
        deadline = time.monotonic() + seconds(30.0)
        while time.monotonic() < deadline and self.status == 0:
            if not self.updating and self.step == self.limit:
                self.beat()  # what the controller had heard may be from the middle of that step
                return "ok"
            if self.step > self.limit:
                self.beat()
                return "retry"
            time.sleep(0.001)
        return "timeout"

    def do_save(self, message: dict[str, Any]) -> str:
        """On a fresh thread (S); P waits for it."""
        self.state, self.dumping, self.dump_step = "DUMP", True, message["step"]
        if os.environ.get("TTP_STOP_CLEAN_BEFORE_DUMP") == "1":
            if self.do_stop(message) != "ok" or self.do_clean(message) != "ok":
                return "stop failed"
            self.at_gate(5 * seconds(5.0))
        result: list[str] = []
        thread = threading.Thread(target=lambda: result.append(self.call_save(message["per_rank"])))
        thread.start()
        thread.join()
        return result[0] if result else "no status: the handler's thread died"

    def call_save(self, info: list[dict[str, Any]]) -> str:
        return self.call("save_ckpt", self.dump_step, info, self.args)

    def call(self, name: str, *given: Any, ctx: bool = True) -> str:
        """Exception: failed. A BaseException ends the thread and nobody answers: the whole action hangs."""
        found = self.handlers.get(name)
        if found is None:
            rules.violation(f"no {name} handler is registered")
            return "failed"
        trace(name, given=[item for item in given if isinstance(item, int | list)])
        _inside.handler = name
        try:
            answer = found[0](*given, found[1]) if ctx else found[0](*given)
        except Exception as error:
            trace(name + "_failed", error=f"{type(error).__name__}: {error}")
            return "failed"
        except BaseException as error:
            rules.violation(f"the {name} handler raised {type(error).__name__}: nobody answers the controller")
            raise
        finally:
            _inside.handler = ""
        trace(name + "_done")
        if name == "clean" and type(answer) is not int:
            rules.violation(f"the clean handler returned {answer!r}, not 0, 1 or 2")
        return "ok" if name != "clean" or answer in (0, 2) else "not clean"

    def do_rename(self, message: dict[str, Any]) -> str:
        """Torch gets args and no ctx, MindSpore ctx and no args."""
        ctx = self.handlers["rename"][1] if "rename" in self.handlers else None
        return self.call("rename", self.dump_step, ctx if rules.MINDSPORE else self.args, ctx=False)

    def do_stop(self, message: dict[str, Any]) -> str:
        """Then wait until the main thread reports, for the action limit."""
        self.parked.clear()
        with self.forced:
            result = self.call("stop", self.args)
            self.limit, self.force = 0, True
            if self.status in (0, 1) and not self.forced.wait(seconds(ACTION_TIMEOUT)):
                result = "the main thread did not leave its loop"
        return result

    def do_clean(self, message: dict[str, Any]) -> str:
        """True only where this rank had the UCE."""
        result = self.call("clean", self.status in (2, 4), self.args)
        self.next_action = Action.RETRY.value if result == "ok" else Action.EXIT.value
        self.go.release()
        return result

    def at_gate(self, limit: float) -> None:
        time.sleep(min(0.05, limit))

    def do_rebuild(self, message: dict[str, Any]) -> str:
        """On all, the new processes included; who said INIT_FINISH goes on with it."""
        result = self.call("rebuild_group", message["among"], self.args)
        if result == "ok" and self.status == INIT_FINISH:
            self.go.release()
        return result

    def do_pause(self, message: dict[str, Any]) -> str:
        """Once the training thread is in `tft_pause_train` at that step; `stream_sync` runs on a thread of its own.

        `hot`: it leaves its loop there, for a hot switch.
        """
        if self.state != "NORMAL":
            return f"cannot pause in state {self.state}"
        self.in_pause.clear()
        self.pause_raises, self.pause_at = message.get("hot", False), message["at"]
        trace("pause_known", at=self.pause_at)
        if not self.in_pause.wait(seconds(ACTION_TIMEOUT)):
            return "the training thread has not come to the pause"
        _thread.start_new_thread(lambda: self.call("stream_sync", ctx=False), ())
        return "ok"

    def do_continue(self, message: dict[str, Any]) -> str:
        """Released."""
        self.pause_at = 0
        return "ok"

    def do_downgrade(self, message: dict[str, Any]) -> str:
        """On those that are left. The registered ctx is not handed over; a handler that is missing has succeeded."""
        dp, world, param = message["per_rank"]
        if not self.parked.wait(rules.PATIENCE):
            rules.violation("the downgrade came, and the training thread is not in tft_wait_repair_action")
            return "failed"
        return self.zit_call("zit_downgrade_rebuild", dp, world, self.args, param)

    def do_upgrade(self, message: dict[str, Any]) -> str:
        """On all, the new processes included."""
        if not self.parked.wait(rules.PATIENCE):
            rules.violation("the upgrade came, and the training thread is not in tft_wait_repair_action")
            return "failed"
        return self.zit_call("zit_upgrade_rebuild", message["among"], self.args, message["param"])

    def do_upgrade_rollback(self, message: dict[str, Any]) -> str:
        if self.state != "PAUSE":
            trace("rollback_refused", state=self.state)
            return "failed"
        self.repair_step = message["step"]
        return self.zit_call("zit_upgrade_rollback", message["step"], self.args, message["param"])

    def do_upgrade_repair(self, message: dict[str, Any]) -> str:
        """As `do_repair`."""
        return self.do_repair(message)

    def zit_call(self, name: str, *given: Any) -> str:
        return self.call(name, *given, ctx=False) if name in self.handlers else "ok"

    def do_repair(self, message: dict[str, Any]) -> str:
        """On sources and targets, once the framework is parked; each gets only the pairs that it is in."""
        units = message["per_rank"]
        kinds = {unit[0] for unit in units}
        if not self.parked.wait(rules.PATIENCE):
            rules.violation("the repair came, and the training thread is not in tft_wait_repair_action")
            return "failed"
        if len(kinds) != 1 or self.state != "PAUSE":
            trace("repair_refused", kinds=sorted(kinds), state=self.state)
            return "failed"
        kind, self.repair_step = kinds.pop(), message["step"]
        pairs = {"type": [u[1] for u in units], "src": [u[2] for u in units], "dst": [u[3] for u in units]}
        info = {**pairs, "repair_type": kind, "rank_list": message["among"]}
        rebuild = kind in (RepairType.RT_UCE_HIGHLEVEL.value, RepairType.RT_LOAD_REBUILD.value)
        given = (message["step"], rebuild, pairs["dst"], info, self.args)
        if message["kind"] == "upgrade_repair":
            return self.zit_call("zit_upgrade_repair", *given, message["param"])
        return self.call("repair", *given)

    def do_rollback(self, message: dict[str, Any]) -> str:
        if self.state != "PAUSE":
            trace("rollback_refused", state=self.state)
            return "failed"
        self.repair_step = message["step"]
        return self.call("rollback", message["step"], self.args)

    def do_normal(self, message: dict[str, Any]) -> str:
        """Back to training."""
        self.status, self.limit, self.force, self.state = 0, 0, False, "NORMAL"
        self.step, self.updating = message["step"], False
        self.beat()
        self.parked.clear()
        self.go.release()
        return "ok"

    def exit(self) -> None:
        """Torch: 10 s, then os._exit(2). MindSpore: the handler, which must end the process."""
        trace("exit_came")
        with self.exiting:
            self.exiting.notify()
        self.next_action = Action.EXIT.value
        self.go.release()
        self.go.release()
        if rules.MINDSPORE:
            self.call("exit")
            rules.violation("the exit handler returned: it must end the process itself")
        else:
            _thread.start_new_thread(self.killer, ())

    def killer(self) -> None:
        """Whatever the process does by then."""
        time.sleep(rules.EXIT_WAIT)
        trace("killed_by_2")
        os._exit(2)

    # -- the window -------------------------------------------------------------------------------

    def locked(self, step: int) -> None:
        """Blocks while the controller holds a step lock; FORCE STOP after a stop (torch only)."""
        noted = False
        while self.limit and step >= self.limit:
            if not noted:
                trace("blocked", step=step)
                noted = True
            time.sleep(0.001)
        if self.force and not rules.MINDSPORE:
            self.force = False
            raise RuntimeError("FORCE STOP. the stand-in's stop order")


_p = _Processor()
_inside = threading.local()
"""Set while this thread runs a handler: on P, which waits for orders, or on S, which P waits for."""


def _logs_only(*_: Any) -> None:
    trace("signal_ignored")


def _on_main(name: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        rules.refuse(f"{name} must be called on the main thread", ValueError)


def _not_in_handler(name: str) -> None:
    if getattr(_inside, "handler", ""):
        rules.violation(f"{name} was called inside the {_inside.handler} handler: it waits for what cannot come (§15)")


def tft_init_processor(
    rank: int, world_size: int, enable_local_copy: bool, enable_tls: bool = True, tls_info: str = "",
    enable_uce: bool = True, enable_arf: bool = False, enable_zit: bool = False,
) -> None:  # fmt: skip
    """Main thread only; bad values end the process."""
    _on_main("tft_init_processor")
    for name, value, kind in (
        ("rank", rank, int), ("world_size", world_size, int), ("enable_local_copy", enable_local_copy, bool),
        ("enable_tls", enable_tls, bool), ("tls_info", tls_info, str), ("enable_uce", enable_uce, bool),
        ("enable_arf", enable_arf, bool), ("enable_zit", enable_zit, bool),
    ):  # fmt: skip
        strict(name, value, kind)
    if not 0 <= rank < world_size <= 100000 or enable_tls or (rules.MINDSPORE and (enable_local_copy or enable_zit)):
        rules.wrap_exit(f"init_processor({rank}, {world_size}, tls={enable_tls})")
    if _p.state != "BEGIN":
        rules.refuse(f"init_processor in state {_p.state}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _logs_only)
    rules.rank, _p.rank, _p.world, _p.uce, _p.state = rank, rank, world_size, enable_uce, "INITED"
    _p.arf, _p.zit = enable_arf, enable_zit
    trace("init_processor", limit=ACTION_TIMEOUT, uce=enable_uce, arf=enable_arf, zit=enable_zit)


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Retries, then ends the process."""
    for name, value, kind in (("master_ip", master_ip, str), ("port", port, int), ("local_ip", local_ip, str)):
        strict(name, value, kind)
    if _p.state != "INITED" or rules.zero_ip(master_ip) or not 1024 <= port <= 65535:
        rules.wrap_exit(f"start_processor({master_ip!r}, {port}) in state {_p.state}")
    waits = iter([1, 2, 4, 8, *[10] * 300][: rules.number("TTP_RETRY_TIMES", 10, 1, 300)])
    while True:
        try:
            _p.wire = rules.Wire(socket.create_connection((master_ip, port), timeout=None))
            break
        except OSError:
            if (wait := next(waits, None)) is None:
                rules.wrap_exit(f"nobody listens at {master_ip}:{port}")
            time.sleep(seconds(wait))
    _p.wire.send(kind="register", rank=_p.rank, pid=os.getpid())
    _thread.start_new_thread(_p.listen, ())  # Python sees a _DummyThread, as with the C++ thread
    if not _p.answered.wait(rules.PATIENCE) or _p.refused:
        rules.wrap_exit(f"the controller {'refuses' if _p.refused else 'does not answer'} the registration")
    _p.answered.clear()
    _p.state = "NORMAL"
    _thread.start_new_thread(_p.heartbeats, ())
    trace("start_processor")


def tft_destroy_processor() -> None:
    """Tells the controller that this rank leaves normally. Can block for ever (§16.1)."""
    _not_in_handler("tft_destroy_processor")
    if _p.state in ("BEGIN", "END"):
        return
    if _p.wire is not None:
        _p.wire.send(kind="leave")
    trace("leave")
    if os.environ.get("MINDIO_STANDIN_DESTROY") == "hang":
        threading.Event().wait()
    _p.state = "END"
    if _p.wire is not None:
        _p.wire.close()


def tft_set_optimizer_replica(rank: int, replica_info: list[dict[str, Any]]) -> None:
    """After the start; the Exception may have no text."""
    strict("rank", rank, int)
    if not _p.reboot_asked:
        rules.violation("set_optimizer_replica before is_reboot_node, which tells only right after the start (§15)")
    if _p.state != "NORMAL" or _p.wire is None:
        rules.refuse("set_optimizer_replica before start_processor")
    if not replica_info or not isinstance(replica_info, list):
        rules.refuse("set_optimizer_replica: no info")
    for entry in replica_info:
        ranks: Any = entry.get("rank_list")
        count: Any = entry.get("replica_cnt")
        plain = isinstance(ranks, list) and all(type(r) is int for r in ranks) and type(count) is int
        if not plain or type(entry.get("replica_shift")) is not int:
            rules.refuse(f"set_optimizer_replica: {entry}")
        if rank != _p.rank or rank not in ranks:
            rules.violation(f"replica info of rank {rank} in {ranks} from rank {_p.rank}")
        if not 1 <= count <= len(ranks) or (rules.MINDSPORE and count != len(ranks)):
            rules.refuse(f"replica_cnt {count} of {len(ranks)}")
    _p.wire.send(kind="replica", info=replica_info, arf=_p.arf, zit=_p.zit)
    if not _p.answered.wait(rules.PATIENCE):
        raise Exception
    _p.replica_sent, _p.least_replicas = True, min(len(entry["rank_list"]) for entry in replica_info)
    trace("replica", info=replica_info)


def tft_set_dp_group_info(rank: int, dp_rank_list: list[int]) -> None:
    """Must hold this rank."""
    if type(rank) is not int or not all(type(r) is int for r in dp_rank_list) or rank not in dp_rank_list:
        rules.refuse(f"set_dp_group_info({rank}, {dp_rank_list})")
    if not _p.zit or _p.wire is None or len(dp_rank_list) >= _p.least_replicas:
        return  # only sent where it is shorter than every replica group (§2.2)
    _p.wire.send(kind="dp", ranks=dp_rank_list)
    trace("dp_group", ranks=dp_rank_list)


def tft_start_updating_os(backup_step: int = -1) -> None:
    """Blocks while locked, raises FORCE STOP after a stop, Exception once a dump has begun."""
    strict("backup_step", backup_step, int)
    _not_in_handler("tft_start_updating_os")
    if _p.state == "BEGIN":
        rules.violation("start_updating before init: the real one says nothing, and nothing is protected")
    elif not _p.replica_sent or not NEEDED.issubset(_p.handlers):
        rules.violation(f"an update without replica info or without handlers for {sorted(NEEDED)}: no dump")
    elif threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _logs_only:
        rules.violation("training with MindIO's handler of SIGTERM, which only logs: this rank cannot be asked to stop")
    _p.locked(_p.step)
    if _p.dumping:
        raise Exception("notify start to updating os failed, error num:1")
    if backup_step < -1:
        rules.refuse(f"backup_step {backup_step}")
    _p.updating = True


def tft_end_updating_os(step: int) -> None:
    """Ignored silently without a start (a violation here: the step is lost); then blocks while locked."""
    strict("step", step, int)
    _not_in_handler("tft_end_updating_os")
    if step < 1:
        rules.refuse(f"end_updating({step})")
    if not _p.updating:
        rules.violation(f"end_updating({step}) without start_updating is ignored: MindIO still stands on {_p.step}")
        return
    if step <= _p.step:
        rules.violation(f"end_updating({step}) behind step {_p.step}: MindIO takes the largest step that it has heard")
    _p.step, _p.updating = step, False
    _p.locked(step)


def tft_start_copy_os() -> None:
    """Local copy mode is not used."""
    rules.violation("start_copy_os without local copy")


def tft_set_step_args(args: Any) -> None:
    """What the handlers get."""
    if _p.dumping:
        raise Exception("already start dump, can not set model param")
    if args is not None:
        _p.args = args


def tft_report_error(error_type: int, error_code: str = "") -> None:
    """RS_UNKNOWN blocks until the exit notice or the action limit."""
    strict("error_type", error_type, int)
    strict("error_code", error_code, str)
    _not_in_handler("tft_report_error")
    if len(error_code) >= 16 or _p.state not in ("NORMAL", "PAUSE", "DUMP"):
        rules.refuse(f"report_error({error_type}, {error_code!r}) in state {_p.state}")
    state = ReportState(error_type)
    trace("report", state=state.name)
    _p.status = _STATUS.get(error_type, 0)
    if _p.state == "NORMAL":
        _p.state = "PAUSE"
    _p.beat()
    if state in (ReportState.RS_NORMAL, ReportState.RS_HCCL_FAILED):
        with _p.forced:
            _p.forced.notify()
    elif state is ReportState.RS_UNKNOWN:
        with _p.exiting:
            _p.exiting.wait(seconds(ACTION_TIMEOUT))


def tft_wait_next_action() -> int:
    """No limit."""
    _not_in_handler("tft_wait_next_action")
    _p.go.acquire()
    return _p.next_action


def tft_wait_repair_action() -> int:
    """Not exported by the package's __init__; no limit."""
    _not_in_handler("tft_wait_repair_action")
    _p.parked.set()
    _p.go.acquire()
    return _p.next_action


def tft_get_repair_step() -> int:
    """0: none."""
    return _p.repair_step


def tft_get_repair_type() -> str:
    """Sic."""
    return "retry" if _p.repair_step else "unknow"


def tft_is_reboot_node() -> bool:
    """Once, right after the start."""
    if _p.state != "NORMAL" or _p.reboot_asked:
        rules.violation(f"is_reboot_node {'again' if _p.reboot_asked else 'in state ' + _p.state}")
    _p.reboot_asked = True
    trace("is_reboot_node")
    return _p.repair_id != 0


def tft_get_reboot_type() -> str:
    """arf or hot switch."""
    return "hot switch" if _p.hot else "arf"


def tft_reset_limit_step() -> None:
    """Lifts the lock; the next start raises FORCE STOP."""
    _p.limit, _p.force = 0, True


def tft_pause_train(cur_step: int) -> None:
    """At the end of every step."""
    strict("cur_step", cur_step, int)
    _not_in_handler("tft_pause_train")
    if cur_step < 0:
        return  # logged, ignored
    if _p.pause_at and _p.pause_at <= cur_step:
        trace("pauses", step=cur_step)
    while _p.pause_at and _p.pause_at <= cur_step:
        _p.in_pause.set()
        if _p.pause_raises:
            _p.pause_at, _p.pause_raises = 0, False
            raise RuntimeError("STEP FINISH")
        time.sleep(0.001)
    _p.in_pause.clear()


def tft_report_load_ckpt_step(step: int) -> None:
    """1 or more."""
    strict("step", step, int)
    if step < 1:
        rules.refuse(f"report_load_ckpt_step({step})")


def tft_exception_handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Only RuntimeError is classified; the first pattern in the message wins; re-entry with the same args (§5)."""
    if not callable(func):
        raise TypeError("func must be a callable")

    def wrapper(*args: Any, **more: Any) -> Any:
        given = list(args)
        _p.args = given
        while True:
            try:
                result = func(*given, **more)
                tft_destroy_processor()
                return result
            except RuntimeError as error:
                found = next(((s, n) for s, n, uce in FAULTS if s in str(error) and (_p.uce or not uce)), None)
                if found is None:
                    tft_report_error(ReportState.RS_UNKNOWN.value)
                    raise
                tft_report_error(ReportState[found[1]].value)
                if tft_wait_next_action() != Action.RETRY.value or tft_wait_repair_action() != Action.RETRY.value:
                    time.sleep(rules.EXIT_WAIT)
                    os._exit(2)
            except Exception:
                tft_report_error(ReportState.RS_UNKNOWN.value)
                raise

    return wrapper


def _register(name: str) -> Callable[..., None]:
    def register(func: Callable[..., Any], ctx: Any = None) -> None:
        if not callable(func):
            rules.refuse(f"{name}: not callable", TypeError)
        _p.handlers[name] = (func, ctx)

    return register


for _name in HANDLERS:
    globals()[f"tft_register_{_name}_handler"] = _register(_name)
atexit.register(tft_destroy_processor)
