"""The shim of examples/megatron_gpt, under the name that the tests' own script imports, and what experts need besides:
an event that a stream has recorded, an exchange whose sizes are tensors where they are moved from no GPU, and a norm
for sequence parallelism, without which Megatron trains no experts with tensor parallelism.

On a card (`support.card`) there is no shim: only what the wheel lacks without apex and Transformer Engine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples/megatron_gpt"))

import megatron_on_cpu

from support import card

__all__ = ["apply", "apply_here"]


def apply_here() -> None:
    """For a rank: as `apply`, or on a card what makes its numbers the same each time."""
    card.one_card()
    if card.KIND != "cuda":
        apply()
        return
    torch.use_deterministic_algorithms(True, warn_only=True)  # what has no such way is said by a warning
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    megatron_on_cpu.apply_to_wheel()
    if "--sequence-parallel" in sys.argv:
        _norms()


def apply() -> None:
    """As the shim's, once."""
    megatron_on_cpu.apply()
    setattr(torch.cuda.Stream, "record_event", lambda self, event=None: event or _event())  # noqa: B010
    exchange = torch.distributed.all_to_all_single

    def exchanged(output: Any, given: Any, *sizes: Any, **more: Any) -> Any:
        named = {name: _listed(value) for name, value in more.items()}
        return exchange(output, given, *(_listed(one) for one in sizes), **named)

    setattr(torch.distributed, "all_to_all_single", exchanged)  # noqa: B010
    if "--sequence-parallel" in sys.argv:
        _norms()


def _norms() -> None:
    """As torch's own, whose gradients are summed over the ranks of a sequence."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def made(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> torch.nn.LayerNorm:
        norm = torch.nn.LayerNorm(hidden_size, eps=eps)
        for param in norm.parameters():
            vars(param)["sequence_parallel"] = True
        return norm

    setattr(WrappedTorchNorm, "__new__", made)  # noqa: B010


def _event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
