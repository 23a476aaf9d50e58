"""A high-availability adapter for MindIO, of the shape that MindSpeed-LLM's has; written from notes on its calls.

Nothing here knows lastgasp, but for `cut_connections`, which stands in for a device that can be stopped, and
`drop_groups`, which is destroy_process_group() where gloo is stuck.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mindio_ttp.framework_ttp import (  # type: ignore[import-not-found, unused-ignore]
    tft_end_updating_os,
    tft_exception_handler,
    tft_init_controller,
    tft_init_processor,
    tft_is_reboot_node,
    tft_pause_train,
    tft_register_clean_handler,
    tft_register_exception_handler,
    tft_register_rebuild_group_handler,
    tft_register_rename_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
    tft_register_stream_sync_handler,
    tft_register_zit_downgrade_rebuild_handler,
    tft_register_zit_upgrade_rebuild_handler,
    tft_register_zit_upgrade_repair_handler,
    tft_register_zit_upgrade_rollback_handler,
    tft_set_optimizer_replica,
    tft_start_controller,
    tft_start_processor,
    tft_start_updating_os,
)
from mindio_ttp.framework_ttp.ttp_decorator import (  # type: ignore[import-not-found, unused-ignore]
    set_mindio_export_version,
    tft_set_dp_group_info,
)

from lastgasp.pytorch.cut import cut_connections
from lastgasp.pytorch.drop_groups import drop_groups
from support.mindio.replicated import STOPPED, ReplicatedOptimizer

__all__ = ["start", "tft_end_updating_os", "tft_pause_train", "tft_start_updating_os"]
MODEL, OPTIMIZER, SCHEDULER, DATA = 1, 2, 3, 4
"""Positions in the arguments of `train`."""
_pids: list[int] = []
_there: list[int] = []
"""The ranks that are there; empty: all."""
_rebuilt = False
"""The process groups are those of this recovery."""


def start(rank: int, world: int) -> bool:
    """Before the process group. Whether this process takes the place of a dead rank: no collective before `rebuild`."""
    retry, recover, zit = (name in os.environ.get("JOB_RECOVER", "") for name in ("retry", "recover", "zit"))
    host, port = os.environ.get("TTP_ADDR", "127.0.0.1"), 8000
    if rank == 0 and "MINDX_TASK_ID" not in os.environ:
        tft_init_controller(rank, world, False, recover, zit)
        tft_start_controller(host, port, False, "")
    tft_init_processor(rank, world, False, False, "", retry, recover, zit)
    tft_start_processor(host, port)
    return bool(tft_is_reboot_node())


def register(rank: int, world: int, optimizer: ReplicatedOptimizer, reboot: bool) -> None:
    """After the process group, before `train`."""
    replicas = world // optimizer.parts
    everybody = list(range(world))
    tft_set_optimizer_replica(rank, [{"rank_list": everybody, "replica_cnt": replicas, "replica_shift": 0}])
    tft_set_dp_group_info(rank, everybody)
    tft_register_save_ckpt_handler(save)
    tft_register_rename_handler(rename)
    tft_register_stop_handler(stop)
    tft_register_clean_handler(clean)
    tft_register_repair_handler(repair)
    tft_register_rollback_handler(rollback)
    tft_register_rebuild_group_handler(rebuild)
    tft_register_stream_sync_handler(lambda: None)
    tft_register_zit_downgrade_rebuild_handler(leave_out)
    tft_register_zit_upgrade_rebuild_handler(take_in)
    tft_register_zit_upgrade_repair_handler(repair)
    tft_register_zit_upgrade_rollback_handler(complete_again)
    tft_register_exception_handler("PRECISION ERROR", "RS_RETRY", lambda text: "PRECISION ERROR")
    if world > 1 and not reboot:
        _gather_pids()


def _gather_pids(group: Any = None) -> None:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, os.getpid(), group=group)
    _pids[:] = found


def protected(train: Callable[..., Any]) -> Callable[..., Any]:
    """As MindSpeed-LLM: the version is set inside, so that the arguments are a list that can be changed."""

    def train_with_version(*args: Any) -> Any:
        set_mindio_export_version("MindSpeed-LLM")
        return train(*args)

    decorated: Callable[..., Any] = tft_exception_handler(train_with_version)
    return decorated


# -- handlers ----------------------------------------------------------------------------------------


def save(step: int, save_info: list[dict[str, Any]], train_args: Any, ctx: Any) -> None:
    """On all chosen ranks at once, off the main thread: the first of a list writes, the others send it their part."""
    assert threading.current_thread() is not threading.main_thread()
    note("save", step, save_info)
    optimizer, scheduler = train_args[OPTIMIZER], train_args[SCHEDULER]
    for info in save_info:
        ranks = info["ranks"]
        parts = _gathered(ranks, optimizer.state())
        if parts is not None:
            folder = temporary(step)
            folder.mkdir(parents=True, exist_ok=True)
            write(folder, step, parts, scheduler)


def _gathered(ranks: list[int], own: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]] | None:
    """On `ranks[0]` the parts of all; in a group of its own, as the old ones may be broken."""
    if len(ranks) == 1:
        return [own]
    group = dist.new_group(ranks, use_local_synchronization=True)
    me = dist.get_rank()
    names = sorted(own)
    packed = torch.stack([own[name] for name in names])
    if me != ranks[0]:
        dist.send(packed, ranks[0], group=group)
        return None
    parts = [own]
    for other in ranks[1:]:
        received = torch.empty_like(packed)
        dist.recv(received, other, group=group)
        parts.append(dict(zip(names, received, strict=True)))
    return parts


def rename(step: int, train_args: Any) -> None:
    """On one rank, when all have saved."""
    note("rename", step)
    temporary(step).rename(final(step))
    track(step)


def stop(train_args: Any, ctx: Any) -> None:
    """`stop_device`, on a CPU: collectives that hang raise."""
    note("stop")
    STOPPED.set()
    cut_connections(_pids)


def clean(is_uce_error: bool, train_args: Any, ctx: Any) -> int:
    """Nothing is left over on a CPU."""
    note("clean", is_uce_error)
    return 0


def rebuild(fault_ranks: list[int], train_args: Any, ctx: Any) -> None:
    """With the new processes: all groups anew."""
    assert threading.current_thread() is not threading.main_thread()
    note("rebuild", fault_ranks)
    _reinit(train_args)


def _reinit(train_args: Any) -> None:
    """torch_npu's reinit_process_group, which MindSpeed-LLM calls in its clean handler, as it needs no other rank."""
    global _rebuilt
    drop_groups([])
    dist.init_process_group("gloo")
    train_args[OPTIMIZER].make_groups(dist.get_world_size())
    _gather_pids()
    _rebuilt = True


def repair(step: int, need_rebuild: bool, error_ranks: list[int], info: Any, train_args: Any, ctx: Any) -> None:
    """On who sends and who takes, at the same time, in a group of theirs."""
    assert threading.current_thread() is not threading.main_thread()
    note("repair", step, need_rebuild, error_ranks, info)
    group = dist.new_group(info["rank_list"], use_local_synchronization=True)
    optimizer, me = train_args[OPTIMIZER], dist.get_rank()
    own = optimizer.state()
    names = sorted(own)
    for source, target in zip(info["src"], info["dst"], strict=True):
        packed = torch.stack([own[name] for name in names])
        if me == source:
            dist.send(packed, target, group=group)
        elif me == target:
            dist.recv(packed, source, group=group)
            optimizer.take(dict(zip(names, packed, strict=True)), step)


def rollback(step: int, train_args: Any, ctx: Any) -> None:
    """On all ranks: data, scheduler, weights."""
    global _rebuilt
    note("rollback", step)
    if not _rebuilt:
        _reinit(train_args)
    _rebuilt = False
    optimizer = train_args[OPTIMIZER]
    assert optimizer.step_count == step, (optimizer.step_count, step)
    train_args[SCHEDULER].step_to(step)
    train_args[DATA] = train_args[DATA].at(step)
    optimizer.gather_weights()


def leave_out(new_dp_ranks: list[int], new_world_ranks: list[int], train_args: Any, zit_param: str) -> None:
    """On the ranks that are left: no rollback follows, so the handler does what that would.

    The group of all stays as it is, so that each rank keeps its number; those of the ranks that are left are new.
    """
    assert threading.current_thread() is not threading.main_thread()
    assert json.loads(zit_param) == {"scale-in-strategy": "DP"}
    note("leave_out", new_dp_ranks, new_world_ranks)
    optimizer = train_args[OPTIMIZER]
    optimizer.leave_out(new_world_ranks)
    _gather_pids(optimizer.all)
    _there[:] = new_dp_ranks
    train_args[SCHEDULER].step_to(optimizer.step_count)
    train_args[DATA] = train_args[DATA].at(optimizer.step_count).shared(new_dp_ranks, optimizer.micros)
    optimizer.gather_weights()


def take_in(rank_list: list[int], train_args: Any, zit_param: str) -> None:
    """On all ranks, with the new processes of `rank_list`: all groups anew."""
    assert json.loads(zit_param) == {"scale-out-strategy": "DP"}
    note("take_in", rank_list)
    _there.clear()
    _reinit(train_args)


def complete_again(step: int, train_args: Any, zit_param: str) -> None:
    """As `rollback`, where each rank has its own share of the batch again."""
    train_args[DATA] = train_args[DATA].shared(range(train_args[OPTIMIZER].micros), train_args[OPTIMIZER].micros)
    rollback(step, train_args, None)


# -- files -------------------------------------------------------------------------------------------


def directory() -> Path:
    """Where checkpoints lie (Megatron's --save)."""
    return Path(os.environ["JOB_SAVE"])


def final(step: int) -> Path:
    """The checkpoint of a step."""
    return directory() / f"iter_{step:07d}"


def temporary(step: int) -> Path:
    """The same before it is renamed."""
    return directory() / f"iter_{step:07d}.tmp"


def write(folder: Path, step: int, parts: list[dict[str, torch.Tensor]], scheduler: Any) -> None:
    """Plain torch.save, as ever."""
    torch.save({"parts": parts, "step": step, "rate": scheduler.rate_after(step)}, folder / "model_optim_rng.pt")


def track(step: int) -> None:
    """The tracker names it."""
    (directory() / "latest_checkpointed_iteration.txt").write_text(str(step))


def load(optimizer: ReplicatedOptimizer, scheduler: Any) -> int:
    """What the tracker names; 0 where there is nothing."""
    tracker = directory() / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return 0
    step = int(tracker.read_text())
    found = torch.load(final(step) / "model_optim_rng.pt", weights_only=True)
    optimizer.load(found["parts"], found["step"])
    scheduler.step_to(step)
    assert scheduler.rate == found["rate"]
    return step


def reached(place: float) -> None:
    """This rank has the gradients of all in a step, and can complete it without anybody else; a half more: it has."""
    env = os.environ
    (directory().parent / f"reached-{env.get('LASTGASP_ATTEMPT', 0)}-{env['RANK']}").write_text(f"{place:.1f}")


def wait_until_all_have_reached(place: float) -> None:
    """For a rank that is about to be killed: gloo may fail on the others, though the victim has sent its part.

    They would be a step behind, and with halves of the state nobody could complete it.
    """
    env = os.environ
    there = _there or range(int(env["WORLD_SIZE"]))
    names = [f"reached-{env.get('LASTGASP_ATTEMPT', 0)}-{rank}" for rank in there]
    deadline = time.monotonic() + 60
    while min(_number(directory().parent / name) for name in names) < place and time.monotonic() < deadline:
        time.sleep(0.001)


def wait_for_go(step: int) -> None:
    """Where a fault may come only then, the job waits for a file: behind each step of `JOB_WAITS` for another one."""
    for gate in os.environ.get("JOB_WAITS", "").split():
        while step >= int(gate) and not (directory().parent / f"go-{gate}").exists():
            if STOPPED.wait(0.01):
                raise RuntimeError("FORCE STOP")


def _number(path: Path) -> float:
    text = path.read_text() if path.exists() else ""
    return float(text) if text.endswith((".0", ".5")) else -1.0


def begin() -> None:
    """The training function is entered."""
    STOPPED.clear()


def note(what: str, *more: Any) -> None:
    """For the test, and for the benchmark: what was called when, one line each."""
    path, env = os.environ.get("JOB_NOTES"), os.environ
    dies = env.get("JOB_DIES") == f"{env.get('RANK', 0)} {what}" and env.get("LASTGASP_ATTEMPT", "0") == "0"
    line = " ".join(map(str, (time.time_ns(), env.get("LASTGASP_ATTEMPT", 0), env.get("RANK", 0), what, *more)))
    if path:
        number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(number, (line + "\n").encode())
        os.close(number)
    if dies:  # in a handler
        os.kill(os.getpid(), signal.SIGKILL)
