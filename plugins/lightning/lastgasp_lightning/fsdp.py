"""What is different with `FSDPStrategy`, which has torch's FSDP1 hold the parts, and not `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import ShardingStrategy

from lastgasp.adapter import ConfigError

_FORM = (
    "save_checkpoint", "load_checkpoint", "lightning_module_state_dict", "load_model_state_dict", "optimizer_state",
    "load_optimizer_state_dict", "restore_checkpoint_after_setup", "lightning_restore_optimizer",
)  # fmt: skip
"""What a checkpoint's form follows from."""


def is_fsdp(strategy: Any) -> bool:
    """Whether it is one, or derived from it."""
    return isinstance(strategy, FSDPStrategy)


def saves_files(strategy: Any) -> bool:
    """Whether one rank writes Lightning's own checkpoints, and all send it their parts (`state_dict_type="full"`)."""
    return is_fsdp(strategy) and bool(strategy._state_dict_type == "full")


def require_known(strategy: FSDPStrategy) -> None:
    """Refuse what a derived class does in another way, if a gasp or a resume follows from it, and offloading.

    Raises:
        ConfigError: names it.
    """
    kind = type(strategy)
    for name in _FORM:
        if getattr(kind, name) is not getattr(FSDPStrategy, name) or name in vars(strategy):
            raise ConfigError(f"{kind.__name__}.{name}", "one of its own", "FSDPStrategy's", "A step is saved after a "
                              "fault as FSDPStrategy saves it. Leave this method as it is there, or take LastGasp out "
                              "of the callbacks.")  # fmt: skip
    if strategy.cpu_offload is not None and strategy.cpu_offload.offload_params:
        raise ConfigError("cpu_offload", True, "False", "It has not been shown that what is on the host is that of "
                          "one step while a device works on copies. Leave it out, or take LastGasp out of the "
                          "callbacks.")  # fmt: skip


def cannot_again(strategy: Any) -> str:
    """Why a fit of it could not be entered again; empty if it can."""
    if not is_fsdp(strategy):
        return ""
    if strategy.sharding_strategy is not ShardingStrategy.FULL_SHARD:
        what = strategy.sharding_strategy.name
    elif not strategy.kwargs.get("use_orig_params"):
        what = "use_orig_params=False"
    else:
        what = "activation checkpointing" if strategy._activation_checkpointing_kwargs else ""
    return f"FSDPStrategy with {what} keeps parts in memory when a backward pass fails" if what else ""


def parameters_of(trainer: Any) -> Iterator[tuple[str, bool]]:
    """The names of the module's parameters, and whether each is trained."""
    if is_fsdp(trainer.strategy):  # where they are not themselves while they are gathered
        from lastgasp.adapter.sharded import whole_parameters

        yield from ((one.name, one.trained) for one in whole_parameters(trainer.strategy.model))
    else:
        yield from ((name, one.requires_grad) for name, one in trainer.lightning_module.named_parameters())


def named(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """What `FSDPStrategy` calls it in a checkpoint: `model`, `optimizer_0`, ..."""
    return path if path[0] == "model" else (f"optimizer_{path[1]}", *path[2:])


def read(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The other way round."""
    begins, _, number = str(path[0]).partition("_")
    return path if begins == "model" else (begins, number, *path[1:])
