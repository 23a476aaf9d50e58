"""The controller's half: one per job (mindio_tft.md §2.1, §7.1, §8). Framework-free, as the real one."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import _mindx as mindx
from . import _pause as pausing
from . import _rules as rules
from . import _switch as switching
from . import _zit as zit
from ._mindx import ACTIONS, MindX
from ._rules import seconds, strict, trace

__all__ = [
    "tft_destroy_controller",
    "tft_notify_controller_change_strategy",
    "tft_notify_controller_dump",
    "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action",
    "tft_notify_controller_stop_train",
    "tft_query_high_availability_switch",
    "tft_register_mindx_callback",
    "tft_start_controller",
]
NPU_STATES = (2, 4, 9, 12)
"""UCE_HIGH, UCE_CORRUPTED, PRECISION_ERROR, HCCL_FAILED (§3)."""
HCCL = 12
OFFLINE, ISOLATED, INIT_FINISH, PREREPAIR_FINISH = 5, 6, 7, 8
NOT_TRAINING = (OFFLINE, ISOLATED, INIT_FINISH, PREREPAIR_FINISH)
"""Of a rank that is started anew: neither good nor bad to who looks for faults."""
EARLIER = ("pause", "upgrade")
"""What a healthy job is told, besides a stop."""
CHOSEN = ("recover", "retry", "dump", "downgrade")
RT_SEND, RT_UCE, RT_RECV, RT_LOAD = 0, 1, 3, 5


@dataclass
class Member:
    """What the controller knows of one rank."""

    wire: rules.Wire
    pid: int
    seen: float
    step: int = 0
    status: int = 0
    updating: bool = False
    replicas: list[dict[str, Any]] | None = None
    left: bool = False
    linked: bool = True
    dp: list[int] = field(default_factory=list)


@dataclass
class Controller:
    """The state machine; `lock` guards everything but the sockets."""

    rank: int
    world: int
    arf: bool
    zit: bool = False
    isolated: list[int] = field(default_factory=list)
    upgrade_listed: bool = False
    switching: list[int] = field(default_factory=list)
    shadows: dict[int, Member] = field(default_factory=dict)
    """New processes of a hot switch, until they have their ranks."""
    ghosts: list[rules.Wire] = field(default_factory=list)
    """Of old processes, which their ranks were taken from: what they beat still counts as their rank's."""
    members: dict[int, Member] = field(default_factory=dict)
    lock: threading.Condition = field(default_factory=threading.Condition)
    replies: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    state: str = "INIT"
    repair_id: int = 0
    serial: int = 0
    dump_wanted: bool = False
    stopped: bool = False
    mindx: MindX = field(default_factory=lambda: MindX(_callbacks))
    errors: dict[int, int] = field(default_factory=dict)
    must_report: bool = False
    unclean: bool = False
    target: int = 0
    server: socket.socket | None = None

    # -- connections ------------------------------------------------------------------------------

    def accept(self) -> None:
        """One reader thread per rank."""
        assert self.server is not None
        while not self.stopped:
            try:
                end, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self.read, args=(rules.Wire(end),), daemon=True).start()

    def read(self, wire: rules.Wire) -> None:
        """A broken link is not used as a sign of death (§7.1)."""
        first = wire.receive()
        if first is None or first["kind"] != "register":
            return
        rank = int(first["rank"])
        with self.lock:
            hot = switching.prepared(self)
            answer = self.registers(rank, wire, int(first["pid"]))
            wire.send(kind="registered", result=answer, repair_id=self.repair_id, hot=hot)
            self.lock.notify_all()
        while answer != "error" and (message := wire.receive()) is not None:
            with self.lock:
                if (member := self.known(rank, wire)) is not None:
                    self.heard(rank, message, member)
                self.lock.notify_all()
        with self.lock:
            table = self.shadows if switching.prepared(self) else self.members
            if rank in table and table[rank].wire is wire:
                table[rank].linked = False

    def known(self, rank: int, wire: rules.Wire) -> Member | None:
        """Of whom this wire tells: of the rank, except for a new process of a switch that has not got it yet."""
        shadow, member = self.shadows.get(rank), self.members[rank]
        if shadow is not None and shadow.wire is wire and switching.prepared(self):
            return shadow
        beside = shadow is not None and shadow.wire is wire
        return member if beside or member.wire is wire or wire in self.ghosts else None

    def registers(self, rank: int, wire: rules.Wire, pid: int) -> str:
        """A process of that rank is there; outside of a recovery nobody asks what became of the one before (§7.3)."""
        now, member = time.monotonic(), self.members.get(rank)
        if switching.prepared(self):
            switching.shadow(self, rank, Member(wire, pid, now))
            return "ok"
        if member is None:
            self.members[rank] = Member(wire, pid, now)
            return "ok"
        member.wire, member.pid, member.seen, member.linked = wire, pid, now, True
        if self.state in ("INIT", "NORMAL", "DUMP", "EXIT", "FINAL"):
            trace("registered_again", of=rank)
            return "ok"
        if rank not in (*self.errors, *self.isolated) and member.status == 0:
            return "error"
        member.status, member.step, member.updating = ISOLATED, 0, False
        trace("registered_anew", of=rank)
        return "repair"

    def heard(self, rank: int, message: dict[str, Any], member: Member) -> None:
        """Heartbeats, replica reports, farewells, replies."""
        kind = message["kind"]
        if kind == "heartbeat":
            if message["step"] != member.step:
                trace("heard", of=rank, step=message["step"])
            member.seen = time.monotonic()
            if member.status != OFFLINE:  # which only a new registration ends
                member.step, member.status, member.updating = message["step"], message["status"], message["updating"]
        elif kind == "replica":
            member.replicas = message["info"]
            self.arf, self.zit = self.arf and bool(message["arf"]), self.zit and bool(message["zit"])
            member.wire.send(kind="replica_ok")
        elif kind == "dp":
            member.dp = message["ranks"]
        elif kind == "leave":
            member.left = True
        elif kind == "reply":
            self.replies[message["serial"], rank] = message

    def order(self, ranks: list[int], limit: float, kind: str, **more: Any) -> dict[int, dict[str, Any]]:
        """Send to each and wait for all replies or the limit; who did not answer is missing."""
        self.serial += 1
        serial = self.serial
        for rank in ranks:
            own = {name: value[rank] if name == "per_rank" else value for name, value in more.items()}
            self.members[rank].wire.send(kind=kind, serial=serial, repair_id=self.repair_id, **own)
        deadline = time.monotonic() + limit
        with self.lock:
            while not self.stopped:
                got = {rank: self.replies[serial, rank] for rank in ranks if (serial, rank) in self.replies}
                if len(got) == len(ranks) or not self.lock.wait(deadline - time.monotonic()):
                    return got
        return {}

    # -- the state machine ------------------------------------------------------------------------

    def run(self) -> None:
        """NORMAL -> ABNORMAL -> DUMP or ENV_CLEAR -> ... (§7.1)."""
        self.state = "NORMAL"
        while not self.stopped and self.state != "FINAL":
            with self.lock:
                self.lock.wait_for(
                    lambda: bool(
                        self.stopped or self.bad_status() or self.summoned() or self.mindx.event in EARLIER
                        or switching.ready(self)
                    ),
                    seconds(2.0),
                )
                bad = self.bad()
            if self.stopped:
                return
            self.report_success()
            if self.dump_wanted and not self.mindx.registered:
                self.dump([])
            elif self.summoned():
                self.abnormal()
            elif self.mindx.event == "pause":
                pausing.pause(self)
            elif switching.ready(self):
                switching.switch(self)
            elif bad:
                time.sleep(seconds(2.0))  # the fixed debounce
                self.abnormal()
            else:
                zit.look(self)

    def summoned(self) -> bool:
        return self.dump_wanted or self.mindx.event in ("stop_train", "elegant dump")

    def report_success(self) -> None:
        """Only after one further step has been completed (§7.1)."""
        step = max((member.step for member in self.members.values() if member.status == 0), default=0)
        if self.must_report and step > self.target:
            self.must_report = False
            self.mindx.result(mindx.SUCCESS, "repaired", self.errors)
            self.errors = {}

    def bad_status(self) -> list[int]:
        bad = [rank for rank, member in self.members.items() if member.status not in (0, *NOT_TRAINING)]
        return [rank for rank in bad if not self.members[rank].left]

    def lost(self) -> list[int]:
        """Without heartbeats for 8 s; scaled, that may be a machine with other work, so who could send some is not."""
        limit = time.monotonic() - seconds(8.0)
        silent = [rank for rank, member in self.members.items() if member.seen < limit and not member.left]
        silent = [rank for rank in silent if self.members[rank].status not in NOT_TRAINING]
        return [rank for rank in silent if not rules.can_run(self.members[rank].pid)]

    def bad(self) -> list[int]:
        return sorted({*self.bad_status(), *self.lost()})

    def select_errors(self) -> None:
        """Add what is bad now; who is listed stays."""
        for rank in self.bad():
            kinds = {HCCL: mindx.NETWORK, **dict.fromkeys((2, 3, 4, 9), mindx.UCE)}
            self.errors.setdefault(rank, kinds.get(self.members[rank].status, mindx.PROCESS))

    def abnormal(self) -> None:
        """Collect, prelock, choose."""
        trace("abnormal", bad=self.bad())
        if any(member.left for member in self.members.values()):
            trace("no_dump", why="a rank has left normally")
            return self.exit()
        self.state, self.repair_id = "ABNORMAL", self.repair_id + 1
        self.collect(self.lost())
        self.select_errors()
        if not self.errors and not self.mindx.event:
            self.state = "DOWNGRADE" if self.isolated else "NORMAL"
            return None
        bad = sorted(self.errors)
        why = self.prelock(bad) or ("" if self.groups() else "no replica info from every rank")
        if self.mindx.registered:
            return self.ask_mindx(why)
        states = [self.members[rank].status for rank in bad if rank not in self.lost()]
        npu = bool(states) and len(states) == len(bad) and all(state in NPU_STATES for state in states)
        if why:
            trace("no_dump", why=why)
            return self.exit()
        return self.repair("retry") if npu else self.dump(bad)

    # -- MindX decides (§11) ----------------------------------------------------------------------

    def ask_mindx(self, why_not: str) -> None:
        """Steps 1 to 3; a time-out or another notification in a slot ends the job."""
        wait, engine = float(rules.number("MINDIO_WAIT_MINDX_TIME", 30, 1, 3600)), self.mindx
        if self.must_report:
            self.must_report = False
            engine.result(mindx.DUMP_STILL, "the last repair has failed", self.errors)
            return self.dump_or_exit(wait)
        if engine.event == "elegant dump":
            return self.dump(sorted(self.errors))
        if not engine.report("report_fault_ranks", dict(self.errors), dict.fromkeys(self.errors, "")):
            return self.exit()
        if not engine.wait(wait) or engine.event != "stop_train":
            return self.dump(sorted(self.errors)) if engine.event == "elegant dump" else self.exit()
        code = mindx.SUCCESS if any(m.replicas for m in self.members.values()) else mindx.NO_PROCESSORS
        if not engine.report("report_stop_complete", code, "stopped", dict(self.errors)) or code:
            return self.exit()
        if not engine.wait(wait) or engine.event != "on_global_rank":
            return self.exit()
        self.select_errors()
        engine.report("report_fault_ranks", dict(self.errors), dict.fromkeys(self.errors, ""))
        return self.confirm(why_not, wait)

    def confirm(self, why_not: str, wait: float) -> None:
        """Step 3: what could be done, and MindX's choice."""
        found, engine = ["exit"], self.mindx
        if not why_not:
            npu = all(kind != mindx.PROCESS for kind in self.errors.values())
            found += ["dump"]
            if not self.isolated:  # a later fault while ranks are missing allows a dump or an exit alone
                found += [*(["retry"] if npu else []), *(["recover"] if self.arf else [])]
                found += ["downgrade"] if zit.can_shrink(self) else []
        if not engine.report("report_strategies", dict(self.errors), found):
            return self.exit()
        if not engine.wait(max(wait, engine.waits_longer)) or engine.event not in CHOSEN:
            if engine.event == "invalid":
                engine.result(mindx.EXIT_ONLY, "no such strategy", self.errors)
            return self.exit()
        if engine.event == "downgrade":
            return zit.shrink(self)
        return self.dump(sorted(self.errors)) if engine.event == "dump" else self.repair(engine.event)

    def dump_or_exit(self, wait: float, dump: bool = True) -> None:
        """After a repair has failed."""
        chosen = self.mindx.event if self.mindx.registered and self.mindx.wait(wait) else ""
        if chosen == "dump" and not dump:
            self.mindx.result(mindx.EXIT_ONLY, "a dump is not allowed", self.errors)
        return self.dump(sorted(self.errors)) if chosen == "dump" and dump else self.exit()

    def collect(self, lost: list[int]) -> None:
        """The latest status of all linked ranks."""
        gone = (*lost, *self.isolated)
        self.order([rank for rank in self.members if rank not in gone], seconds(5.0), "collect")

    def prelock(self, bad: list[int]) -> str:
        """Why it failed, or nothing. The target counts dead ranks, too (§16.6); who is past it has it computed anew."""
        healthy = [rank for rank in self.members if rank not in (*bad, *self.isolated)]
        late: list[int] = []
        for _ in range(3):
            self.target = max((member.step for member in self.members.values()), default=0)
            if self.target == 0:
                return "step 0"
            answers = self.order(healthy, seconds(35.0), "prelock", step=self.target)
            told = {rank: answers.get(rank, {}).get("result", "late") for rank in healthy}
            late = [rank for rank, result in told.items() if result != "ok"]
            if not late or any(told[rank] != "retry" for rank in late):
                break
        return f"ranks {late} did not reach step {self.target} outside an update" if late else ""

    def groups(self) -> list[list[tuple[tuple[int, ...], int]]]:
        """Per type the distinct groups with their replica count; empty where they are not consistent (§8)."""
        infos = [member.replicas for member in self.members.values()]
        if len(infos) < self.world or any(info is None for info in infos):
            return []
        kinds = []
        for i in range(len(infos[0] or [])):
            found = {tuple(sorted(info[i]["rank_list"])): int(info[i]["replica_cnt"]) for info in infos if info}
            sizes = {len(group) for group in found}
            if len(sizes) != 1 or sum(len(group) for group in found) != self.world:
                rules.violation(f"replica groups of type {i} do not cover the world in equal sizes: {sorted(found)}")
                return []
            kinds.append(sorted(found.items()))
        return kinds

    def usable(self, rank: int, bad: list[int]) -> bool:
        member = self.members.get(rank)
        gone = (*bad, *self.isolated)
        return member is not None and rank not in gone and not member.updating and member.step == self.target

    def choose(self, bad: list[int]) -> list[tuple[int, list[int]]] | None:
        """(type, ranks by shard) for each group; None where a shard has nobody."""
        chosen = []
        for kind, found in enumerate(self.groups()):
            for group, count in found:
                if count == len(group):
                    good = [rank for rank in group if self.usable(rank, bad)][:1]
                    picked = [good]
                else:
                    shards = len(group) // count
                    picked = [[r for r in group[i::shards] if self.usable(r, bad)][:1] for i in range(shards)]
                if not all(picked):
                    return None
                chosen.append((kind, [shard[0] for shard in picked]))
        return chosen

    def dump(self, bad: list[int]) -> None:
        """Save on the chosen, rename on one, exit."""
        self.state = "DUMP"
        if not bad and not self.mindx.registered:
            self.collect(bad)
            if why := self.prelock(bad):
                trace("no_dump", why=why)
                return self.exit()
        chosen = self.choose(bad)
        if chosen is None:
            trace("no_dump", why="a shard has no usable holder")
            self.mindx.result(mindx.EXIT_ONLY, "nothing to save", self.errors)
            return self.exit()
        savers = sorted({rank for _, ranks in chosen for rank in ranks})
        infos = {r: [{"type": k, "ranks": ranks} for k, ranks in chosen if r in ranks] for r in savers}
        limit = float(rules.number("TTP_NORMAL_ACTION_TIME_LIMIT", 180, 30, 1800))
        trace("dump", step=self.target, savers=savers)
        answers = self.order(savers, seconds(limit), "save", step=self.target, per_rank=infos)
        if any(answers.get(rank, {}).get("result") != "ok" for rank in savers):
            trace("no_rename", why={rank: answers.get(rank, {}).get("result", "late") for rank in savers})
            self.mindx.result(mindx.EXIT_ONLY, "the save failed", self.errors)
            return self.exit()
        renamer = next((rank for rank in savers if rank != 0), 0)
        done = self.order([renamer], seconds(limit), "rename", step=self.target)
        renamed = done.get(renamer, {}).get("result") == "ok"
        trace("renamed", by=renamer, ok=renamed)
        self.mindx.result(mindx.SUCCESS if renamed else mindx.EXIT_ONLY, "dumped", self.errors)
        return self.exit()

    def exit(self) -> None:
        """The notice comes last; where MindX says a word meanwhile it is taken to end the ranks itself (§7.1)."""
        self.state = "EXIT"
        wait = float(rules.number("MINDIO_WAIT_MINDX_TIME", 30, 1, 3600))
        if self.mindx.registered and self.mindx.wait(wait, least=0.0):  # usually nothing comes
            trace("left_to_mindx")
            self.state = "FINAL"
            return
        for rank, member in self.members.items():
            if member.wire.send(kind="exit", serial=0):
                trace("exit_notice", to=rank)
        self.state = "FINAL"

    # -- repairs (§6, §7.3) -----------------------------------------------------------------------

    def linked(self, healthy: bool = False) -> list[int]:
        """Ranks with a connection; `healthy`: without those whose process is at fault."""
        there = [rank for rank, member in sorted(self.members.items()) if member.linked and not member.left]
        return [rank for rank in there if not healthy or self.errors.get(rank) != mindx.PROCESS]

    def all_did(self, ranks: list[int], kind: str, **more: Any) -> bool:
        """An order of the usual limit that each has carried out."""
        limit = float(rules.number("TTP_NORMAL_ACTION_TIME_LIMIT", 180, 30, 1800))
        answers = self.order(ranks, seconds(limit), kind, step=self.target, **more)
        failed = {rank: answers.get(rank, {}).get("result", "late") for rank in ranks}
        failed = {rank: result for rank, result in failed.items() if result != "ok"}
        if failed:
            trace("failed_order", order=kind, why=failed)
        if kind == "clean" and self.arf:  # the process counts as faulty then: another strategy could start it anew
            for rank in [rank for rank, result in failed.items() if result == "not clean"]:
                self.errors[rank], self.unclean = mindx.PROCESS, True
        return not failed

    def repair(self, how: str) -> None:
        """Stop and clean on all that have a good process; rebuild, repair, rollback and normal on all."""
        self.state, self.unclean, wait = "ENV_CLEAR", False, float(rules.number("MINDIO_WAIT_MINDX_TIME", 30, 1, 3600))
        there = self.linked(healthy=True)
        if not self.all_did(there, "stop") or not self.all_did(there, "clean"):
            trace("no_repair", failed="stop or clean", how=how)
            self.mindx.result(mindx.RECOVER_STILL if self.unclean else mindx.EXIT_ONLY, "not clean", self.errors)
            if self.unclean and how == "retry" and self.mindx.wait(wait) and self.mindx.event == "on_global_rank":
                return self.confirm("", wait)
            return self.dump_or_exit(wait, dump=False)
        self.state = "REPAIR"
        why = self.arf_repair() if how == "recover" else self.exchange(self.damaged())
        if not why:
            everybody = self.linked()
            done = self.all_did(everybody, "rollback") and self.all_did(everybody, "normal")
            why = "" if done else "rollback or normal"
        if why:
            trace("no_repair", failed=why, how=how)
            if why in ("dump", "exit"):
                return self.dump(sorted(self.errors)) if why == "dump" else self.exit()
            self.mindx.result(mindx.DUMP_STILL if how == "recover" else mindx.EXIT_ONLY, why, self.errors)
            return self.dump_or_exit(wait)
        self.must_report, self.state, self.mindx.event = self.mindx.registered, "NORMAL", ""
        self.errors = {}
        trace("repaired", how=how, step=self.target)
        return None

    def damaged(self) -> dict[int, int]:
        """Ranks whose memory is to be repaired, with how."""
        return {r: RT_UCE for r in self.errors if self.members[r].status not in (0, HCCL)}

    def arf_repair(self) -> str:
        """Why it failed; empty where state was given to all that were started anew."""
        anew = sorted(self.errors)
        for rank in anew:
            if self.members[rank].status not in NOT_TRAINING[1:]:
                self.members[rank].status = OFFLINE
        if why := self.arf_wait(first=True):
            return why
        if not self.all_did(self.linked(), "rebuild", among=anew):
            return "rebuild"
        return self.arf_wait(first=False) or self.exchange(dict.fromkeys(anew, RT_RECV))

    def arf_wait(self, first: bool) -> str:
        """Until all are there again: 10 minutes by the clock, as no test waits for its end."""
        deadline = time.monotonic() + rules.PATIENCE
        while time.monotonic() < deadline and not self.stopped:
            if self.mindx.event in ("dump", "exit"):
                return self.mindx.event
            if self.bad():
                return f"ranks {self.bad()} failed meanwhile"
            states = [member.status for member in self.members.values()]
            ready, begun = states.count(PREREPAIR_FINISH), states.count(INIT_FINISH)
            fine = states.count(0)
            if ready and ready + fine == len(states):
                return ""
            if first and ready + begun and ready + begun + fine == len(states):
                return ""
            time.sleep(0.001)
        return "the ranks did not come back"

    def exchange(self, damaged: dict[int, int], order: str = "repair", **more: Any) -> str:
        """`repair`, on those that give or take state: the next position at a shard's distance that is good gives."""
        units: dict[int, list[tuple[int, int, int, int]]] = {}
        for kind, found in enumerate(self.groups() if damaged else []):
            for group, count in found:
                for rank in [rank for rank in group if rank in damaged]:
                    distance, at = len(group) // count, group.index(rank)
                    ring = [group[(at + distance * k) % len(group)] for k in range(1, count)]
                    giver = next((r for r in ring if r not in damaged and self.usable(r, sorted(self.errors))), None)
                    if giver is None:
                        units = {r: [(RT_LOAD, 0, r, r)] for r in self.members}
                        break
                    units.setdefault(rank, []).append((damaged[rank], kind, giver, rank))
                    units.setdefault(giver, []).append((RT_SEND, kind, giver, rank))
        involved = sorted(units)
        return "" if self.all_did(involved, order, per_rank=units, among=involved, **more) else "repair"


_controller: Controller | None = None
_callbacks: dict[str, Callable[..., Any]] = {}


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """A second call while initialised is accepted and ignored."""
    global _controller
    for name, value, kind in (
        ("rank", rank, int), ("world_size", world_size, int), ("enable_local_copy", enable_local_copy, bool),
        ("enable_arf", enable_arf, bool), ("enable_zit", enable_zit, bool),
    ):  # fmt: skip
        strict(name, value, kind)
    if not 1 <= world_size <= 100000 or not -1 <= rank < world_size:
        rules.refuse(f"init controller: rank {rank} of {world_size}")
    if rules.MINDSPORE and (enable_local_copy or enable_zit):
        rules.refuse("MindSpore mode with local copy or zit")
    if _controller is None:
        _controller = Controller(rank, world_size, enable_arf, enable_zit)
        trace("init_controller", of=rank)


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """SystemExit(2) on any failure."""
    for name, value, kind in (("bind_ip", bind_ip, str), ("port", port, int), ("tls_info", tls_info, str)):
        strict(name, value, kind)
    strict("enable_tls", enable_tls, bool)
    if _controller is None:
        rules.refuse("start_controller before init_controller", SystemExit)
    if os.environ.get("MINDIO_STANDIN_START") == "fail":
        raise SystemExit(2)
    if enable_tls or rules.zero_ip(bind_ip) or not 1024 <= port <= 65535:
        rules.violation(f"start_controller({bind_ip!r}, {port}, {enable_tls})")
        raise SystemExit(2)
    _controller.mindx = MindX(_callbacks)  # the check is made once
    try:
        _controller.server = socket.create_server((bind_ip, port))
    except OSError:
        raise SystemExit(2) from None
    trace("start_controller", port=port, limit=os.environ.get("TTP_NORMAL_ACTION_TIME_LIMIT"))
    threading.Thread(target=_controller.accept, daemon=True).start()
    threading.Thread(target=_controller.run, daemon=True).start()


def tft_destroy_controller() -> None:
    """Tells every processor; takes 4-5 s."""
    global _controller
    controller, _controller = _controller, None
    if controller is None:
        return
    trace("destroy_controller")
    for member in controller.members.values():
        member.wire.send(kind="destroyed", serial=0)
    time.sleep(seconds(4.0))
    with controller.lock:
        controller.stopped = True
        controller.lock.notify_all()
    if controller.server is not None:
        controller.server.close()
    for member in controller.members.values():
        member.wire.close()


def tft_query_high_availability_switch() -> bool:
    """At least one processor is connected."""
    if _controller is None:
        return False
    recent = time.monotonic() - seconds(8.0)
    return any(not member.left and member.seen > recent for member in _controller.members.values())


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """All four before the start."""
    if action not in ACTIONS or not callable(func):
        rules.violation(f"register_mindx_callback({action!r})")
        return 1
    if _controller is not None and _controller.server is not None:
        rules.violation("register_mindx_callback after start_controller: the check is made once, at start")
    _callbacks[action] = func
    return 0


def tft_notify_controller_dump() -> int:
    """Dump the healthy job, then exit."""
    if _controller is None or _controller.state != "NORMAL":
        return 1
    if _controller.mindx.registered:
        _controller.mindx.strategy = "dump"
        _controller.mindx.notified("elegant dump")
    with _controller.lock:
        _controller.dump_wanted = True
        _controller.lock.notify_all()
    return 0


def _faults(ranks: dict[int, int]) -> bool:
    """Take them over; a rank that the controller does not know, or another type than 0 to 2, is refused."""
    strict("fault_ranks", ranks, dict)
    if _controller is None:
        return False
    with _controller.lock:
        for rank, kind in ranks.items():
            if rank not in _controller.members or kind not in (0, 1, 2):
                return False
            if _controller.errors.get(rank) != mindx.PROCESS:
                _controller.errors[rank] = kind
    return True


def tft_notify_controller_stop_train(fault_ranks: dict[int, int], stop_type: str = "stop", timeout: Any = None) -> int:
    """`timeout`, real seconds, is for a pause alone, and mandatory there."""
    if stop_type not in ("stop", "pause"):
        rules.violation(f"stop_train({stop_type!r})")
        return 1
    if stop_type == "pause":
        strict("timeout", timeout, int)
    if not _faults(fault_ranks) or _controller is None:
        return 1
    if stop_type == "pause":
        _controller.mindx.pause_for = float(timeout)
    _controller.mindx.notified("stop_train" if stop_type == "stop" else "pause")
    with _controller.lock:
        _controller.lock.notify_all()
    return 0


def tft_notify_controller_on_global_rank(fault_ranks: dict[int, int], time: int = 1) -> int:
    """All faults are known; `time` is how long the choice of a strategy may take, real seconds."""
    strict("time", time, int)
    if not 1 <= time <= 3600 or not _faults(fault_ranks) or _controller is None:
        return 1
    _controller.mindx.waits_longer = float(time)
    return _controller.mindx.notified("on_global_rank")


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """One that was not listed is an invalid event."""
    strict("strategy", strategy, str)
    if _controller is None or strategy not in mindx.STRATEGIES:
        return 1
    strict("params", params, str)
    if strategy in ("downgrade", "upgrade") and not 1 <= len(params) <= 1023:
        rules.violation(f"change_strategy({strategy!r}, {params!r}): 1 to 1023 characters of parameters are mandatory")
        return 1
    engine = _controller.mindx
    engine.params = params
    if engine.listed and strategy not in engine.listed and strategy != "continue":
        return engine.notified("invalid")
    engine.strategy = strategy
    return engine.notified(strategy)


def tft_notify_controller_prepare_action(action: str, fault_ranks: Any = None) -> int:
    """`hot switch` of these ranks, or `stop switch`."""
    strict("action", action, str)
    ranks = sorted(fault_ranks or {})
    if _controller is None or len(ranks) > _controller.world or action not in (switching.PREPARED, "stop switch"):
        return 1
    if action == "stop switch":
        switching.stop(_controller)
    else:
        switching.prepare(_controller, ranks)
    return 0


atexit.register(tft_destroy_controller)
