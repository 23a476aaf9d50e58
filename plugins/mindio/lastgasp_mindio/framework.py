"""`mindio_ttp.framework_ttp`: the functions of a rank, with MindIO's names, arguments and meaning (mindio_tft.md §2.2).

What MindIO answers by ending the process raises here, so that the reason is where people look.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from lastgasp.adapter import ConfigError
from lastgasp_mindio import checks, controller, device, reload
from lastgasp_mindio.controller import tft_destroy_controller, tft_init_controller, tft_start_controller
from lastgasp_mindio.enums import Action, OptimizerType, RepairType, ReportState
from lastgasp_mindio.notices import say
from lastgasp_mindio.processor import PROCESSOR
from lastgasp_mindio.settings import STOP_CLEAN
from lastgasp_mindio.utils import tft_can_do_uce_repair

if os.environ.get("MINDIO_FOR_MINDSPORE", "").lower() in ("true", "1"):
    raise ImportError(
        "lastgasp's mindio_ttp has no MindSpore mode (MINDIO_FOR_MINDSPORE): use lastgasp-mindformers there "
        "(docs/mindformers.md)"
    )

FRAMEWORKS = ("MindSpeed", "MindSpeed-LLM")
_CODE = 16
_MOST_STEPS = 2**63 - 2
Handler = Callable[..., Any]


# -- life --------------------------------------------------------------------------------------------


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """Say who this process is.

    Raises:
        TypeError, ConfigError: what MindIO would not accept.
    """
    checks.strict(
        rank=(rank, int), world_size=(world_size, int), enable_local_copy=(enable_local_copy, bool),
        enable_tls=(enable_tls, bool), tls_info=(tls_info, str), enable_uce=(enable_uce, bool),
        enable_arf=(enable_arf, bool), enable_zit=(enable_zit, bool),
    )  # fmt: skip
    checks.within("world_size", world_size, 1, checks.MOST_RANKS)
    checks.within("rank", rank, 0, world_size - 1)
    PROCESSOR.init(rank, world_size)
    PROCESSOR.retry, PROCESSOR.recover, PROCESSOR.fewer = enable_uce, enable_arf, enable_zit
    controller.say_refused(rank, enable_local_copy)
    if enable_tls:
        controller.say_tls()


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Verify the newest checkpoint, on rank 0, before anybody can load it. The controller is reached with training.

    Raises:
        TypeError, ConfigError: what MindIO would not accept.
        NoGoodCheckpoint: there are checkpoints with manifests, and none is good.
    """
    checks.strict(master_ip=(master_ip, str), port=(port, int), local_ip=(local_ip, str))
    checks.address(master_ip, port)
    PROCESSOR.start()
    if PROCESSOR.rank == 0 and not PROCESSOR.reboot:
        controller.say_address(master_ip, port)
        reload.verify_newest()


def tft_destroy_processor() -> None:
    """Training ended well on this rank. Ignored inside a handler: the dump is worth more than a word about it."""
    if handler := PROCESSOR.handlers.inside:
        say(f"tft_destroy_processor inside the {handler} handler is ignored: call it behind training", 0, logging.ERROR)
    else:
        PROCESSOR.close()


def tft_is_reboot_node() -> bool:
    """Whether this process takes the place of a dead rank in a running job (ARF), or of a missing one, and so must
    enter no collective before the rebuild_group handler, or zit_upgrade_rebuild. Call it once, right after start. In a
    restarted job no process does."""
    PROCESSOR.require_running("tft_is_reboot_node")
    return PROCESSOR.reboot


def tft_get_reboot_type() -> str:
    """Hot switches are not made here, so it is always the other."""
    return "arf"


def set_mindio_export_version(framework_type: str) -> None:
    """Which framework's adapter this is; both have the device stopped before a dump.

    Raises:
        ConfigError: another one.
    """
    if framework_type not in FRAMEWORKS:
        raise ConfigError("framework_type", framework_type, f"one of {', '.join(FRAMEWORKS)}", "Leave it out.")
    PROCESSOR.framework = framework_type
    os.environ[STOP_CLEAN] = "1"


def get_mindio_export_version() -> str:
    """What `set_mindio_export_version` was given; empty where it was not called."""
    return PROCESSOR.framework


def get_device() -> int:
    """The number of this rank's device."""
    device.remember()
    return device.index()


# -- the state ---------------------------------------------------------------------------------------


def tft_set_optimizer_replica(rank: int, replica_info: list[dict[str, Any]]) -> None:
    """Say which ranks hold what, for each type of optimizer. Without it from every rank nothing can be saved.

    Raises:
        TypeError, ConfigError: what MindIO would not accept.
        NotRunning: the processor was not started.
    """
    checks.strict(rank=(rank, int))
    PROCESSOR.require_running("tft_set_optimizer_replica")
    info = checks.replica_info(rank, replica_info)
    if any(entry["replica_shift"] for entry in info):
        say("replica_shift is not used: replicas are those at a distance of len(rank_list) / replica_cnt", rank)
    if PROCESSOR.trains:
        say("tft_set_optimizer_replica came after the first update of this training and counts from the next one on: "
            "call it before", rank, logging.ERROR)  # fmt: skip
    PROCESSOR.info = info


def tft_set_dp_group_info(rank: int, dp_rank_list: list[int]) -> None:
    """This rank's data parallel group, for elastic training. Raises TypeError, ConfigError."""
    checks.strict(rank=(rank, int))
    for each in dp_rank_list:
        checks.strict(dp_rank_list=(each, int))
    if rank not in dp_rank_list:
        raise ConfigError("dp_rank_list", dp_rank_list, f"a list with rank {rank} in it", "Give this rank's group.")
    PROCESSOR.dp = tuple(dp_rank_list)


def tft_set_step_args(args: Any) -> None:
    """What handlers are given from now on, in place of the decorated function's arguments; not with MindSpeed's
    framework types.

    Raises:
        RuntimeError: a dump has begun.
    """
    if args is None or PROCESSOR.framework:
        say(f"tft_set_step_args is ignored with {'None' if args is None else PROCESSOR.framework}, as by MindIO",
            PROCESSOR.rank)  # fmt: skip
        return
    protection = PROCESSOR.protection
    if protection is not None and protection.run.session.status.held:
        raise RuntimeError("tft_set_step_args: a dump has begun")
    PROCESSOR.handlers.args = args


# -- each step ---------------------------------------------------------------------------------------


def tft_start_updating_os(backup_step: int = -1) -> None:
    """The update begins: local work alone until `tft_end_updating_os`. Waits while a dump is made.

    Raises:
        SystemExit: a dump was made, and this process ends (`lastgasp.adapter.Released`).
        TypeError, ConfigError: what MindIO would not accept.
        RuntimeError: this thread runs a handler; also below.
    """
    PROCESSOR.handlers.refuse("tft_start_updating_os")
    if backup_step.__class__ is not int or backup_step < -1:
        checks.strict(backup_step=(backup_step, int))
        checks.within("backup_step", backup_step, -1, _MOST_STEPS)
    PROCESSOR.before_update()


def tft_end_updating_os(step: int) -> None:
    """The update is done: `step` updates are complete. Raises TypeError, ConfigError."""
    if step.__class__ is not int or step < 1:
        checks.strict(step=(step, int))
        checks.within("step", step, 1, _MOST_STEPS)
    PROCESSOR.completed(step)


def tft_start_copy_os() -> None:
    """A local copy is about to be made: nothing that this engine uses."""
    say("tft_start_copy_os has no effect: local copies are not used", PROCESSOR.rank)


def tft_pause_train(cur_step: int) -> None:
    """The end of a step. Nobody pauses a job here (MindX is not driven). Raises TypeError."""
    if cur_step.__class__ is not int:
        checks.strict(cur_step=(cur_step, int))


def tft_reset_limit_step() -> None:
    """No effect: the gate that `tft_start_updating_os` waits at opens with the end of the recovery alone."""
    say("tft_reset_limit_step has no effect: a dump that has begun is completed", PROCESSOR.rank)


# -- faults ------------------------------------------------------------------------------------------


def tft_exception_handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Protect the training function. Raises TypeError."""
    checks.callable_or_raise(func)
    return PROCESSOR.decorate(func)


def tft_report_error(error_type: int, error_code: str = "") -> None:
    """Report a fault of this rank where the training function is not decorated. Returns when the recovery is over.

    Args:
        error_type: the value of a ReportState.

    Raises:
        TypeError, ConfigError: what MindIO would not accept.
        NotRunning: no step was completed, or a state that has no meaning here.
    """
    PROCESSOR.handlers.refuse("tft_report_error")
    checks.strict(error_type=(error_type, int), error_code=(error_code, str))
    checks.within("error_type", error_type, 0, len(ReportState) - 1)
    checks.within("error_code", len(error_code), 0, _CODE - 1)
    PROCESSOR.report(ReportState(error_type), error_code)


def tft_wait_next_action() -> int:
    """Wait for the end of the recovery; the value of Action.EXIT. Raises NotRunning where there is none."""
    PROCESSOR.handlers.refuse("tft_wait_next_action")
    return PROCESSOR.wait()


def tft_wait_repair_action() -> int:
    """As `tft_wait_next_action`: only a decorated training function is entered again in the same process."""
    PROCESSOR.handlers.refuse("tft_wait_repair_action")
    return PROCESSOR.wait()


def tft_get_repair_step() -> int:
    """The step of the newest recovery in place; 0 where there was none."""
    return 0 if PROCESSOR.repaired is None else PROCESSOR.repaired.step


def tft_get_repair_type() -> str:
    """`retry` or `recover` from the stop handler of a recovery in place on, `dump` once any other has begun; else, and
    with other numbers of ranks, `unknow` (sic)."""
    protection, again = PROCESSOR.protection, PROCESSOR.repaired
    if protection is not None and (status := protection.run.session.status).held:
        again = status.outcome.again if status.outcome is not None else None
        if again is None:
            return "dump"
    return {"replace": "recover", "retry": "retry"}.get(again.rung if again is not None else "", "unknow")


def tft_report_load_ckpt_step(step: int) -> None:
    """Checked; no repair handler is asked to load a checkpoint here. Raises TypeError, ConfigError."""
    checks.strict(step=(step, int))
    checks.within("step", step, 1, _MOST_STEPS)


# -- handlers ----------------------------------------------------------------------------------------


def tft_register_save_ckpt_handler(func: Handler, ctx: Any = None) -> None:
    """`func(step, [{"type", "ranks"}], args, ctx)` writes this rank's part, on all chosen ranks at once."""
    _register("save_ckpt", func, ctx)


def tft_register_rename_handler(func: Handler, ctx: Any = None) -> None:
    """`func(step, args)` names the dump, on one rank, when all have saved; it does not get `ctx`, as with MindIO."""
    _register("rename", func, ctx)


def tft_register_stop_handler(func: Handler, ctx: Any = None) -> None:
    """`func(args, ctx)` makes the training thread leave its collective."""
    _register("stop", func, ctx)


def tft_register_clean_handler(func: Handler, ctx: Any = None) -> None:
    """`func(is_uce_error, args, ctx)` clears the device; 0 or 2: it is good."""
    _register("clean", func, ctx)


def tft_register_exit_handler(func: Handler, ctx: Any = None) -> None:
    """Never called, as by MindIO outside of MindSpore: the process ends with lastgasp's exit codes (docs/faults.md)."""
    _register("exit", func, ctx)


def tft_register_repair_handler(func: Handler, ctx: Any = None) -> None:
    """`func(step, need_rebuild, error_ranks, repair_info, args, ctx)` sends or receives the shards of `step`."""
    _register("repair", func, ctx)


def tft_register_rollback_handler(func: Handler, ctx: Any = None) -> None:
    """`func(step, args, ctx)` puts loop, data and scheduler to `step`, on all ranks; then training is entered again."""
    _register("rollback", func, ctx)


def tft_register_rebuild_group_handler(func: Handler, ctx: Any = None) -> None:
    """`func(fault_ranks, args, ctx)` makes the process groups anew, on all ranks, the new processes among them."""
    _register("rebuild_group", func, ctx)


def tft_register_stream_sync_handler(func: Handler, ctx: Any = None) -> None:
    """Kept, and never called: nobody pauses a job."""
    _register("stream_sync", func, ctx)


def tft_register_zit_downgrade_rebuild_handler(func: Handler, ctx: Any = None) -> None:
    """`func(new_dp_ranks, new_world_ranks, args, zit_param)`, on the ranks that are left: groups, shares, data anew."""
    _register("zit_downgrade_rebuild", func, ctx)


def tft_register_zit_upgrade_rebuild_handler(func: Handler, ctx: Any = None) -> None:
    """`func(rank_list, args, zit_param)`, on all ranks: `rank_list` is there again. `ctx` is not handed over."""
    _register("zit_upgrade_rebuild", func, ctx)


def tft_register_zit_upgrade_repair_handler(func: Handler, ctx: Any = None) -> None:
    """`func(step, need_rebuild, error_ranks, repair_info, args, zit_param)`, as the repair handler."""
    _register("zit_upgrade_repair", func, ctx)


def tft_register_zit_upgrade_rollback_handler(func: Handler, ctx: Any = None) -> None:
    """`func(step, args, zit_param)`, as the rollback handler."""
    _register("zit_upgrade_rollback", func, ctx)


def tft_register_decrypt_handler(decryptor: Callable[[str], str] | None) -> None:
    """Checked; MindIO's TLS is not used. Raises TypeError."""
    if decryptor is not None:
        checks.callable_or_raise(decryptor)
        controller.say_tls()


def tft_register_exception_handler(fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]) -> None:
    """Have a RuntimeError with `fault_pattern` in its text counted as `fault_type`, the name of a ReportState, where
    `fault_handle(text)` returns that pattern; another pattern: as that one; "OTHER": as an unknown error."""
    PROCESSOR.faults.register(fault_pattern, fault_type, fault_handle)


def _register(name: str, func: Handler, ctx: Any) -> None:
    checks.callable_or_raise(func)
    PROCESSOR.handlers.register(name, func, ctx)


__all__ = [
    "Action", "OptimizerType", "RepairType", "ReportState", "tft_can_do_uce_repair", "tft_destroy_controller",
    "tft_destroy_processor", "tft_end_updating_os", "tft_exception_handler", "tft_get_reboot_type",
    "tft_get_repair_step", "tft_get_repair_type", "tft_init_controller", "tft_init_processor", "tft_is_reboot_node",
    "tft_pause_train", "tft_register_clean_handler", "tft_register_decrypt_handler", "tft_register_exception_handler",
    "tft_register_exit_handler", "tft_register_rebuild_group_handler", "tft_register_rename_handler",
    "tft_register_repair_handler", "tft_register_rollback_handler", "tft_register_save_ckpt_handler",
    "tft_register_stop_handler", "tft_register_stream_sync_handler", "tft_register_zit_downgrade_rebuild_handler",
    "tft_register_zit_upgrade_rebuild_handler", "tft_register_zit_upgrade_repair_handler",
    "tft_register_zit_upgrade_rollback_handler", "tft_report_error", "tft_report_load_ckpt_step",
    "tft_reset_limit_step", "tft_set_optimizer_replica", "tft_set_step_args", "tft_start_controller",
    "tft_start_copy_os", "tft_start_processor", "tft_start_updating_os", "tft_wait_next_action",
]  # fmt: skip
