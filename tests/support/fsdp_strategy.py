"""Lightning's `FSDPStrategy` on CPUs: the very class, with torch's FSDP1 inside, which both want a GPU.

What stands in is the accelerator, which says that it is CUDA's, and what Lightning and torch take for granted of a GPU:
the device that a flat parameter is made for, the kind of a device mesh, and a full state that is brought to the host.
Where it is already, nothing is copied by that: torch 2.13 frees parameters while they are read, and crashes; and it
gathers all kinds of an optimizer's state in one buffer, so that each would have the values of the last one.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.strategies import fsdp as lightnings
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, _optim_utils

SHAPES = ("fsdp", "fsdp-full", "fsdp-grads", "fsdp-half", "fsdp-wrapped", "fsdp-legacy", "fsdp-whole", "fsdp-hybrid")
"""Of the job in `train_lightning_sharded`: all options of the strategy are in one of them."""
FULL = ("fsdp-full", "fsdp-wrapped", "fsdp-whole")
"""Lightning's own checkpoints are files there, as by default."""
_OF_THE_STRATEGY: dict[str, dict[str, Any]] = {
    "fsdp-grads": {"sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": False,
                   "activation_checkpointing_policy": {nn.Linear}},
    "fsdp-whole": {"sharding_strategy": "NO_SHARD"},
    "fsdp-hybrid": {"sharding_strategy": "HYBRID_SHARD"},
}
_OF_THE_TRAINER: dict[str, dict[str, Any]] = {
    "fsdp-half": {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value",
                  "accumulate_grad_batches": 2},
    "fsdp-wrapped": {"val_check_interval": 3},
}  # fmt: skip


class Derived(FSDPStrategy):
    """As a user may derive one."""


class OnCpu(CUDAAccelerator):
    """Is taken for the accelerator of a GPU."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing."""

    def setup(self, trainer: Any) -> None:
        """Nothing."""

    def teardown(self) -> None:
        """Nothing."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """As many as are asked for."""
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """All the same."""
        return [torch.device("cpu")] * int(devices)

    @staticmethod
    def auto_device_count() -> int:
        """One."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Always."""
        return True


def options(shape: str, devices: int) -> dict[str, Any]:
    """For a Trainer."""
    _install()
    own = dict(_OF_THE_STRATEGY.get(shape, {}))
    if shape == "fsdp-hybrid":
        own["device_mesh"] = (2, devices // 2)
    if shape not in ("fsdp-wrapped", "fsdp-legacy"):
        own["auto_wrap_policy"] = {nn.Linear}
    kind = Derived if shape == "fsdp-half" else FSDPStrategy
    strategy = kind(state_dict_type="full" if shape in FULL else "sharded", **own)
    return {"accelerator": OnCpu(), "strategy": strategy, **_OF_THE_TRAINER.get(shape, {})}


def _install() -> None:
    made: Any = FullyShardedDataParallel.__init__
    if hasattr(made, "stands_in"):
        return

    def init(self: Any, *args: Any, device_id: Any = None, **more: Any) -> None:
        made(self, *args, device_id=torch.device("cpu") if device_id is None else device_id, **more)

    def full(module: nn.Module, world_size: int, rank0_only: bool = True) -> Any:
        from torch.distributed.fsdp import FullStateDictConfig, StateDictType
        from torch.distributed.fsdp.api import FullOptimStateDictConfig

        return FullyShardedDataParallel.state_dict_type(
            module, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=rank0_only),
            FullOptimStateDictConfig(rank0_only=rank0_only),
        )  # fmt: skip

    init.stands_in = True  # type: ignore[attr-defined]
    unflatten = vars(_optim_utils)["_unflatten_orig_param_states"]

    def copied(about: Any, states: dict[str, Any], name: str, *more: Any) -> None:
        unflatten(about, states, name, *more)
        for state in states.values():
            if isinstance(state.get(name), torch.Tensor):
                state[name] = state[name].clone()

    vars(_optim_utils)["_unflatten_orig_param_states"] = copied
    original = device_mesh.init_device_mesh
    vars(device_mesh)["init_device_mesh"] = lambda kind, *args, **more: original("cpu", *args, **more)
    vars(lightnings)["_get_full_state_dict_context"] = full
    FullyShardedDataParallel.__init__ = init  # type: ignore[method-assign]
