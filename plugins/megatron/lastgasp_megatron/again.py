"""Entering `pretrain` again in the same process (docs/facts/megatron.md §8)."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
import sys
from argparse import Namespace
from typing import Any

from torch import distributed

from lastgasp.adapter import asked_recovery, cause_of, recovery_here
from lastgasp.adapter.again import Recovery
from lastgasp_megatron.abandon import abandon_saves, cannot_abandon
from lastgasp_megatron.fewer import fewer_of, numbered
from lastgasp_megatron.lead import leads_itself
from lastgasp_megatron.ranks import device
from lastgasp_megatron.script import ScriptValues

log = logging.getLogger("lastgasp")

IN_PLACE = ("auto", "retry", "replace")
"""Values of `recovery` with which it may be called again."""
_OWN = re.compile("_[A-Z][A-Z_]*|_seqlen_stats_[a-z_]+")
_PLAIN = (bool, int, float, str, dict, list, type(None))
_UNTRIED = (
    "fp8", "fp4", "enable_cuda_graph", "external_cuda_graph", "tp_comm_overlap", "nccl_ub", "use_sharp",
    "enable_ft_package", "log_straggler", "run_workload_inspector_server", "fine_grained_activation_offloading",
    "batch_invariant_mode", "hybrid_context_parallel", "profile", "perform_rl_step", "moe_enable_deepep",
    "moe_routing_trace_path", "logits_load_dir",
)  # fmt: skip
"""Settings under which a process keeps more of a training than is known to be dropped (docs/facts/megatron.md §8)."""
_TRIED: dict[str, tuple[Any, ...]] = {
    "cuda_graph_impl": ("none",),
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
    "gtp_weight_remat_size": (1,),  # of --tensor-parallel-num-weight-shards
}
"""The same, but for these values."""


class Pretrain:
    """What one call of `pretrain` was given, before it changes any of it.

    Args:
        args, kwargs: of the call.
        first: this process has not trained before.

    Attributes:
        why: why it cannot be called again; empty if it can.
        values: of the user's script, where a fault may be answered in place.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], first: bool) -> None:
        self.given = args, kwargs
        self._global: Namespace | None = None
        self._module: dict[str, Any] = {}
        self._kept: tuple[tuple[Any, ...], dict[str, Any], dict[str, Any] | None] | None = None
        self.why = _cannot(first)
        self.values: ScriptValues | None = None
        try:
            from megatron.training.training import destroy_global_state  # noqa: F401

            self._global, self._module = _global_args(), _own_globals()
            self._kept = self._copies(args, kwargs, None if self._global is None else vars(self._global))
            if not self.why and _may_be(self._global):
                self.values = ScriptValues([self._global, *args, *kwargs.values()])
        except ImportError:
            self.why = "this version of Megatron cannot drop the state of a training"
        except Exception as error:
            self.why = f"what pretrain() was started with cannot be copied ({cause_of(error)})"

    @staticmethod
    def _copies(*values: Any) -> Any:
        """Configurations are copied, since a training writes into them; functions and all else stay what they are."""
        args, kwargs, settings = values
        return (
            tuple(_copied(one) for one in args),
            {name: _copied(one) for name, one in kwargs.items()},
            None if settings is None else copy.deepcopy(settings),
        )

    @property
    def parsed(self) -> bool:
        """Its options were parsed before it was called."""
        return self._global is not None

    def joins(self) -> bool:
        """Whether a new process could take a lost rank's place in this call, as far as is known before it."""
        args = self._global
        if self.why or args is None or distributed.is_initialized() or getattr(args, "skip_train", False):
            return False
        auto = asked_recovery(getattr(args, "lastgasp_recovery", None)) == "auto"
        return auto and not not_again(args) and not leads_itself(args)

    @property
    def fewer(self) -> bool:
        """Whether it may go on with fewer ranks, as far as is known before it."""
        return self._global is not None and fewer_of(self._global, self.parsed).may

    def reset(self) -> None:
        """Drop what Megatron keeps of the training, and put back what it was started with; `given` is for the next."""
        from megatron.training import training

        assert self._kept is not None
        abandon_saves()
        _close_writers()
        _drop_sums()
        _drop_loggers()
        training.destroy_global_state()
        vars(training).update(copy.deepcopy(self._module))
        args, kwargs, settings = self._copies(*self._kept)
        self.given = args, kwargs
        if self._global is not None and settings is not None:  # set before pretrain() was called, since 0.17
            from megatron.training.global_vars import set_global_variables

            vars(self._global).clear()
            vars(self._global).update(settings)
            numbered(self._global)
            set_global_variables(self._global)


def _cannot(first: bool) -> str:
    """Why no training of this process can be entered again; empty if it can."""
    if not first:
        return "it is not the first training of its script"
    if distributed.is_available() and distributed.is_initialized():  # a new process would make them alone
        return "the script has made process groups before it calls pretrain()"
    return ""


def recovery_for(args: Any) -> Recovery:
    """How faults are answered: what was asked for, or the default for what this rank runs on.

    Args:
        args: Megatron's namespace.

    Raises:
        ConfigError: a value that is not allowed.
    """
    return recovery_here(asked_recovery(getattr(args, "lastgasp_recovery", None)), str(device()), _groups(args))


def _groups(args: Any) -> str:
    return str(distributed.get_backend() if distributed.is_initialized() else getattr(args, "distributed_backend", ""))


def _may_be(args: Namespace | None) -> bool:
    """Whether a fault may be answered in place. Where options have not been parsed yet it may."""
    return args is None or recovery_for(args) in IN_PLACE


def not_again(args: Any) -> str:
    """Why a training with these settings is not entered again; empty if it is."""
    if why := cannot_abandon(args):
        return why
    untried = [name for name in _UNTRIED if getattr(args, name, None)]
    untried += [name for name, tried in _TRIED.items() if getattr(args, name, None) not in (None, *tried)]
    if untried:
        return f"it was not tried with --{untried[0].replace('_', '-')}"
    if "mindspeed" in sys.modules:
        return "it was not tried with MindSpeed"
    return ""


def _copied(one: Any) -> Any:
    return copy.deepcopy(one) if dataclasses.is_dataclass(one) or isinstance(one, Namespace) else one


def _global_args() -> Namespace | None:
    from megatron.training import global_vars

    found = getattr(global_vars, "_GLOBAL_ARGS", None)
    return found if isinstance(found, Namespace) else None


def _own_globals() -> dict[str, Any]:
    """What Megatron's module of trainings keeps, such as times of the start that a second call exchanges otherwise."""
    from megatron.training import training

    found = {name: value for name, value in vars(training).items() if _OWN.fullmatch(name)}
    return copy.deepcopy({name: value for name, value in found.items() if isinstance(value, _PLAIN)})


def _drop_sums() -> None:
    """Those of losses of further tokens and of experts: sums since the last log, which know the old process groups."""
    found = sys.modules.get("megatron.core.transformer.multi_token_prediction")
    tracker = getattr(getattr(found, "MTPLossLoggingHelper", None), "tracker", None)
    if isinstance(tracker, dict):
        tracker.clear()
    drop = getattr(sys.modules.get("megatron.core.transformer.moe.moe_logging"), "destroy_moe_metrics_tracker", None)
    if drop is not None:  # older versions keep them beside the process groups, and drop them together
        drop()


def _drop_loggers() -> None:
    """Those of --save-activations-interval and its like.

    What they hold of a step that was cut short is not of the next one, and while they are hooked into
    one model they refuse another one.
    """
    for name in ("activation_logging", "dgrad_logging"):
        module = sys.modules.get(f"megatron.training.{name}")
        if module is not None and hasattr(module, "_LOGGER"):
            vars(module)["_LOGGER"] = None


def _close_writers() -> None:
    """What they hold reaches the disk; the next training opens its own."""
    from megatron.training import global_vars

    writer = getattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", None)
    if writer is not None:
        try:
            writer.close()
        except Exception as error:
            log.warning("Megatron's TensorBoard writer could not be closed: %s", cause_of(error))
