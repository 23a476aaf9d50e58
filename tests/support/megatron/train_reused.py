"""`train_gpt.py` with MindSpeed's --reuse-fp32-param, as its memory is laid out, and under another name.

Between two steps the memory of each fp32 weight of the distributed optimizer holds its upper halves and then its lower
halves; they become fp32 for the update and for Megatron's own saves, as MindSpeed's patches do it. No option tells.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import wrapt


def _mains(optimizer: Any) -> list[torch.Tensor]:
    return [main for group in optimizer.shard_fp32_from_float16_groups for main in group]


def pack(optimizer: Any) -> None:
    """From fp32 to halves."""
    for main in _mains(optimizer):
        bits = main.detach().view(torch.int32).clone()
        halves = torch.cat([(bits >> 16).to(torch.int16), (bits & 0xFFFF).to(torch.int16)])
        main.detach().view(torch.int16).copy_(halves)
    optimizer.packed = True


def unpack(optimizer: Any) -> None:
    """And back, bit for bit; nothing where they are fp32 already."""
    if not getattr(optimizer, "packed", False):
        return
    for main in _mains(optimizer):
        upper, lower = main.detach().view(torch.int16).clone().chunk(2)
        bits = (upper.to(torch.int32) << 16) | (lower.to(torch.int32) & 0xFFFF)
        main.detach().view(torch.int32).copy_(bits)
    optimizer.packed = False


def _with_fp32(kind: Any, name: str) -> None:
    original: Callable[..., Any] = getattr(kind, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        unpack(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            pack(self)

    setattr(kind, name, method)


def _patch(module: Any) -> None:
    for name in ("step_with_ready_grads", "get_parameter_state_dp_zero"):
        _with_fp32(module.DistributedOptimizer, name)


wrapt.register_post_import_hook(_patch, "megatron.core.optimizer.distrib_optimizer")

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("train_gpt.py")), run_name="__main__")
