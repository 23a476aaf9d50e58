"""What lastgasp asks of a `deepspeed.DeepSpeedEngine`: whether it can be protected, its files, where its steps end.

The methods with an underscore are those that `engine.save_checkpoint` of DeepSpeed 0.19.8 puts together; an engine
without them is refused. They enter no collective. `save_checkpoint` itself does: barriers, and in stage 3 the gathering
of small parameters.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lastgasp.adapter.hooks import replace_attribute
from lastgasp.errors import CheckpointMismatch, ConfigError
from lastgasp.pytorch.buffers import persistent_buffers

TESTED = "0.19.8"
"""The version of DeepSpeed that was read and run."""
_NEEDED = ("_common_checkpoint_state", "_get_ckpt_name", "_get_zero_ckpt_name", "zero_optimization_stage",
           "is_gradient_accumulation_boundary", "save_non_zero_checkpoint", "save_zero_checkpoint", "load_checkpoint",
           "micro_steps")  # fmt: skip
_UNTESTED = "It was not run with lastgasp: drop it, or keep to engine.save_checkpoint without a session."

COUNTERS = "deepspeed"
"""In the session's own file: what DeepSpeed's files lack."""


def engine_of(models: Iterable[Any]) -> Any:
    """The engine among a session's models; None if there is none.

    Raises:
        ConfigError: there is another model beside it.
    """
    models = list(models)
    found = [model for model in models if any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)]
    if found and len(models) > 1:
        raise ConfigError("model", f"{len(models)} models", "a DeepSpeed engine alone",
                          "Neither a second engine nor an averaged model can be saved beside one.")  # fmt: skip
    return found[0] if found else None


def of_engine(engine: Any, optimizer: Any, scheduler: Any) -> tuple[EngineOptimizer, Any]:
    """What a `TorchState` has instead of the optimizer and the schedules that it was given beside an engine.

    The engine saves its own schedule; another one stays with the session.

    Raises:
        ConfigError: there is an optimizer besides that of the engine, or the engine has none.
    """
    own: Any = getattr(engine, "optimizer", None)
    if not hasattr(getattr(own, "optimizer", None), "step"):
        raise ConfigError("model", "a DeepSpeed engine without a ZeRO optimizer", "one of ZeRO stage 1, 2 or 3",
                          "Give deepspeed.initialize an optimizer, and zero_optimization.stage.")  # fmt: skip
    if optimizer is not None and optimizer is not own and optimizer is not own.optimizer:
        raise ConfigError("optimizer", type(optimizer).__name__, "none beside a DeepSpeed engine, or its own",
                          "Leave it out: the engine saves the one that it has.")  # fmt: skip
    return EngineOptimizer(engine), None if scheduler is getattr(engine, "lr_scheduler", None) else scheduler


def unsupported(engine: Any, world_size: int) -> tuple[str, str, str] | None:
    """What cannot be saved by the survivors, as (what it is, what is allowed, what to do); None if everything can."""
    if kind := next((k.__name__ for k in type(engine).__mro__ if k.__name__ == "PipelineEngine"), ""):
        return kind, "a DeepSpeedEngine of ZeRO stage 1, 2 or 3", "Pipelines keep one file a layer: not supported."
    lacking = [name for name in _NEEDED if not hasattr(engine, name)]
    if lacking:
        return (f"a DeepSpeed engine without {', '.join(lacking)}", f"that of DeepSpeed {TESTED}",
                f"Install deepspeed=={TESTED}, or tell us: lastgasp's issues.")  # fmt: skip
    stage = int(engine.zero_optimization_stage())
    if stage not in (1, 2, 3):
        return (f"a DeepSpeed engine of ZeRO stage {stage}", "stage 1, 2 or 3",
                "Set zero_optimization.stage, or use DistributedDataParallel without DeepSpeed.")  # fmt: skip
    for what, found in _others(engine, world_size):
        if found:
            return f"a DeepSpeed engine with {what}", "ZeRO alone, its state in memory", _UNTESTED
    return None


def _others(engine: Any, world_size: int) -> Iterable[tuple[str, bool]]:
    """Further ways to spread a state, or to keep it elsewhere."""
    zero = engine._config.zero_config
    yield "mixture of experts (MoE)", bool(engine.has_moe_layers)
    yield "model parallelism", engine.mp_world_size != 1
    yield "sequence parallelism, or another data parallel group", engine.seq_dp_world_size != world_size
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(getattr(zero, name, None), "device", "none")
        yield f"{name} ({getattr(device, 'value', device)})", str(getattr(device, "value", device)) != "none"
    yield "zero_hpz_partition_size > 1", int(getattr(zero, "zero_hpz_partition_size", 1) or 1) > 1
    yield "mics_shard_size", int(getattr(zero, "mics_shard_size", -1) or -1) > 0
    yield "elastic_checkpoint", bool(getattr(zero, "elastic_checkpoint", False))
    yield "ZenFlow", bool(getattr(engine, "zenflow", False))
    yield "a decoupled checkpoint engine", bool(engine.checkpoint_engine.is_decoupled())


def files_of(engine: Any) -> dict[str, Any]:
    """What this rank writes in `save_checkpoint`, with the live tensors: file in the checkpoint -> content.

    Between two steps, on the training thread. Buffers are copied, because the next forward pass may change them.
    """
    tag, found = f"global_step{engine.global_steps}", dict[str, Any]()
    if engine.save_non_zero_checkpoint:
        found[_name(engine._get_ckpt_name("", tag))] = _model_states(engine)
    if engine.save_zero_checkpoint:
        found[_name(engine._get_zero_ckpt_name("", tag))] = {
            "optimizer_state_dict": engine.optimizer.state_dict(),
            "ds_config": engine.config,
            "ds_version": _version(),
        }
    return found


def _model_states(engine: Any) -> dict[str, Any]:
    module = engine.module_state_dict()
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "ds_id") and name in module:  # stage 3 keeps small ones whole; a checkpoint has none
            module[name] = torch.empty(0, dtype=parameter.dtype)
    for name, (holder, key) in persistent_buffers(engine.module):
        if (buffer := holder[key]) is not None and isinstance(module.get(name), Tensor):
            module[name] = buffer.detach().clone()
    frozen = bool(engine.zero_optimization_partition_gradients())
    found: dict[str, Any] = engine._common_checkpoint_state(module, engine.zero_optimization(), frozen)
    return found


def _name(path: str) -> str:
    return Path(path).as_posix().lstrip("/")


def _version() -> str:
    """DeepSpeed's own, which is imported where there is an engine."""
    return str(getattr(sys.modules.get("deepspeed"), "__version__", ""))


def counters(engine: Any) -> dict[str, int]:
    """What `load_checkpoint` does not restore."""
    return {"micro_steps": int(engine.micro_steps)}


def load_engine(engine: Any, path: Path, beside: Mapping[str, Any]) -> None:
    """`engine.load_checkpoint`, by all ranks together.

    Args:
        path: the checkpoint; beside: the session's own file in it.

    Raises:
        CheckpointMismatch: of another number of ranks, or DeepSpeed finds nothing.
    """
    saved, here = beside["lastgasp"]["world_size"], dist.get_world_size() if dist.is_initialized() else 1
    if saved != here:
        raise CheckpointMismatch(str(path), [f"{saved} ranks have saved it and there are {here}: its partitions fit "
                                             "the same number alone (convert it by deepspeed.checkpoint."
                                             "ds_to_universal --inject_missing_state to change that)"])  # fmt: skip
    config = engine._config
    universal = getattr(config, "load_universal_checkpoint", False)
    config.load_universal_checkpoint = False  # it says of which kind the one is that the script has begun with
    try:
        found, _ = engine.load_checkpoint(str(path))
    finally:
        config.load_universal_checkpoint = universal
    if found is None:
        raise CheckpointMismatch(str(path), ["DeepSpeed finds no checkpoint in it"])
    for name, value in beside.get(COUNTERS, {}).items():
        setattr(engine, name, value)


def recovery_scripts() -> dict[str, bytes]:
    """The programs that DeepSpeed puts into its checkpoints, which make one file of them."""
    package, found = str(getattr(sys.modules.get("deepspeed"), "__file__", "")), dict[str, bytes]()
    for name in ("zero_to_fp32.py", "zero_to_torch.py"):
        with contextlib.suppress(OSError):
            found[name] = (Path(package).parent / "utils" / name).read_bytes()
    return found


class EngineOptimizer:
    """The engine's update as a `torch.optim.Optimizer` would show it: one begins and ends with `engine.step()`.

    At the boundaries of gradient accumulation alone, unless the loop sees to those (`managed_gradient_accumulation`
    false). The engine's optimizer is called several times in one update, and gathers parameters behind it. Where
    `engine.step()` raises the update never ends.

    Args:
        engine: whose `step` is wrapped; for good.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._before, self._after = dict[int, Any](), dict[int, Any]()
        self._optimizer_step_pre_hooks = self._before
        replace_attribute(engine, "step", self._around)

    @property
    def inner(self) -> Any:
        """torch's optimizer, which updates this rank's partition."""
        return self._engine.optimizer.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the optimizer inside."""
        found: list[dict[str, Any]] = self._engine.optimizer.param_groups
        return found

    @property
    def state(self) -> dict[Any, Any]:
        """No tensors are followed here."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The engine's own files have it."""
        return {"state": {}, "param_groups": []}

    def register_step_pre_hook(self, hook: Any) -> _Handle:
        """As of torch."""
        return _Handle(self._before, hook)

    def register_step_post_hook(self, hook: Any) -> _Handle:
        """As of torch."""
        return _Handle(self._after, hook)

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            managed = getattr(self._engine, "managed_gradient_accumulation", lambda: True)()
            if managed and not self._engine.is_gradient_accumulation_boundary():
                return step(*args, **kwargs)
            for hook in list(self._before.values()):
                hook(self, (self,), {})
            done = step(*args, **kwargs)
            for hook in list(self._after.values()):
                hook(self, (self,), {})
            return done

        return around


class _Handle:
    def __init__(self, hooks: dict[int, Any], hook: Any) -> None:
        self._hooks = hooks
        hooks[id(self)] = hook

    def remove(self) -> None:
        """Idempotent."""
        self._hooks.pop(id(self), None)
