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

from . import _rules as rules
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
ACTIONS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")


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
    registered_anew: bool = False


@dataclass
class Controller:
    """The state machine; `lock` guards everything but the sockets."""

    rank: int
    world: int
    arf: bool
    members: dict[int, Member] = field(default_factory=dict)
    lock: threading.Condition = field(default_factory=threading.Condition)
    replies: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    state: str = "INIT"
    repair_id: int = 0
    serial: int = 0
    dump_wanted: bool = False
    stopped: bool = False
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
            anew = self.state not in ("INIT", "NORMAL")
            self.members[rank] = Member(wire, int(first["pid"]), time.monotonic(), registered_anew=anew)
            wire.send(kind="registered", repair_id=self.repair_id if anew else 0)
        while (message := wire.receive()) is not None:
            with self.lock:
                self.heard(rank, message)
                self.lock.notify_all()

    def heard(self, rank: int, message: dict[str, Any]) -> None:
        """Heartbeats, replica reports, farewells, replies."""
        member, kind = self.members[rank], message["kind"]
        if kind == "heartbeat":
            if message["step"] != member.step:
                trace("heard", of=rank, step=message["step"])
            member.seen = time.monotonic()
            member.step, member.status, member.updating = message["step"], message["status"], message["updating"]
        elif kind == "replica":
            member.replicas = message["info"]
            member.wire.send(kind="replica_ok")
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
                self.lock.wait_for(lambda: bool(self.stopped or self.bad_status() or self.dump_wanted), seconds(2.0))
                bad = self.bad()
            if self.stopped:
                return
            if self.dump_wanted:
                self.dump([])
            elif bad:
                time.sleep(seconds(2.0))  # the fixed debounce
                self.abnormal()

    def bad_status(self) -> list[int]:
        return [rank for rank, member in self.members.items() if member.status != 0 and not member.left]

    def lost(self) -> list[int]:
        """Without heartbeats for 8 s; scaled, that may be a machine with other work, so who could send some is not."""
        limit = time.monotonic() - seconds(8.0)
        silent = [rank for rank, member in self.members.items() if member.seen < limit and not member.left]
        return [rank for rank in silent if not rules.can_run(self.members[rank].pid)]

    def bad(self) -> list[int]:
        return sorted({*self.bad_status(), *self.lost()})

    def abnormal(self) -> None:
        """Collect, prelock, choose."""
        trace("abnormal", bad=self.bad())
        self.collect(self.lost())
        if any(member.left for member in self.members.values()):
            trace("no_dump", why="a rank has left normally")
            return self.exit()
        self.state, self.repair_id = "ABNORMAL", self.repair_id + 1
        bad = self.bad()
        if not bad:
            self.state = "NORMAL"
            return None
        why = self.prelock(bad) or ("" if self.groups() else "no replica info from every rank")
        states = [self.members[rank].status for rank in bad if rank not in self.lost()]
        npu = bool(states) and len(states) == len(bad) and all(state in NPU_STATES for state in states)
        if why:
            trace("no_dump", why=why)
            return self.exit()
        return self.retry(bad) if npu else self.dump(bad)

    def collect(self, lost: list[int]) -> None:
        """The latest status of all linked ranks."""
        self.order([rank for rank in self.members if rank not in lost], seconds(5.0), "collect")

    def prelock(self, bad: list[int]) -> str:
        """Why it failed, or nothing. The target counts dead ranks, too (§16.6); who is past it has it computed anew."""
        healthy = [rank for rank in self.members if rank not in bad]
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
        return member is not None and rank not in bad and not member.updating and member.step == self.target

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
        if not bad:
            self.collect(bad)
            if why := self.prelock(bad):
                trace("no_dump", why=why)
                return self.exit()
        chosen = self.choose(bad)
        if chosen is None:
            trace("no_dump", why="a shard has no usable holder")
            return self.exit()
        savers = sorted({rank for _, ranks in chosen for rank in ranks})
        infos = {r: [{"type": k, "ranks": ranks} for k, ranks in chosen if r in ranks] for r in savers}
        limit = float(rules.number("TTP_NORMAL_ACTION_TIME_LIMIT", 180, 30, 1800))
        trace("dump", step=self.target, savers=savers)
        answers = self.order(savers, seconds(limit), "save", step=self.target, per_rank=infos)
        if any(answers.get(rank, {}).get("result") != "ok" for rank in savers):
            trace("no_rename", why={rank: answers.get(rank, {}).get("result", "late") for rank in savers})
            return self.exit()
        renamer = next((rank for rank in savers if rank != 0), 0)
        done = self.order([renamer], seconds(limit), "rename", step=self.target)
        trace("renamed", by=renamer, ok=done.get(renamer, {}).get("result") == "ok")
        return self.exit()

    def exit(self) -> None:
        """The notice comes last."""
        for rank, member in self.members.items():
            if member.wire.send(kind="exit", serial=0):
                trace("exit_notice", to=rank)
        self.state = "FINAL"

    def retry(self, bad: list[int]) -> None:
        """Stop and clean on all, repair pairs, rollback on all, normal on all (§6, §7.3)."""
        everybody, limit = list(self.members), float(rules.number("TTP_NORMAL_ACTION_TIME_LIMIT", 180, 30, 1800))
        uce = [rank for rank in bad if self.members[rank].status != HCCL]
        steps: list[tuple[str, list[int]]] = [("stop", everybody), ("clean", everybody)]
        steps += [("repair", sorted({*uce, *map(self.neighbour, uce)}))] if uce else []
        steps += [("rollback", everybody), ("normal", everybody)]
        pairs = {"src": [self.neighbour(rank) for rank in uce], "dst": uce}
        for kind, ranks in steps:
            answers = self.order(ranks, seconds(limit), kind, step=self.target, pairs=pairs)
            if any(answers.get(rank, {}).get("result") != "ok" for rank in ranks):
                trace("no_retry", failed=kind)
                return self.exit()
        self.state = "NORMAL"
        return None

    def neighbour(self, rank: int) -> int:
        """The next position of its group that is good."""
        for group, _ in self.groups()[0]:
            if rank in group:
                at = group.index(rank)
                return next(r for r in group[at + 1 :] + group[:at] if self.members[r].status == 0)
        return rank


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
        _controller = Controller(rank, world_size, enable_arf)
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
    with _controller.lock:
        _controller.dump_wanted = True
        _controller.lock.notify_all()
    return 0


def _not_modelled(*given: Any, **more: Any) -> int:
    rules.violation("the MindX protocol is not modelled by this stand-in")
    return 1


tft_notify_controller_stop_train = _not_modelled
tft_notify_controller_on_global_rank = _not_modelled
tft_notify_controller_change_strategy = _not_modelled
tft_notify_controller_prepare_action = _not_modelled
atexit.register(tft_destroy_controller)
