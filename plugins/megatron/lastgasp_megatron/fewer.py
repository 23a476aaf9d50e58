"""Going on with fewer ranks, and with all of them again: which trainings can, and how their ranks are counted then.

Megatron's own rules do the rest: a step has as many micro-batches as the global batch has, shared by the ranks that are
there, and its sampler goes on behind the samples that were used, whoever has used them (docs/facts/megatron.md §9).
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from typing import Any

from lastgasp.adapter.again import Fewer

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
          "expert_model_parallel_size")  # fmt: skip
"""With more than one of them a rank has a part of the model or of each sample."""
_IN_THE_WAY: dict[str, str] = {
    "use_distributed_optimizer": "each rank has a part of the optimizer's state",
    "step_batch_size_schedule": "the global batch grows",
    "rampup_batch_size": "the global batch grows",
    "decrease_batch_size_if_needed": "the global batch depends on the number of ranks",
    "data_parallel_random_init": "each rank has random numbers of its own",
    "full_validation": "an evaluation depends on the number of ranks",
    "num_experts": "it was not tried with experts",
}
DROPOUT = (
    "dropout: random numbers behind iteration {step} are not those of a job without the fault, since ranks do other "
    "numbers of micro-batches"
)


def fewer_of(args: Any, known_before: bool) -> Fewer:
    """Whether a training with these settings can go on with fewer ranks.

    Args:
        args: Megatron's namespace, validated.
        known_before: options were parsed before `pretrain` was called, as since 0.17: what follows from the number of
            ranks at the start stays as it is then.
    """
    why = _cannot(args, known_before)
    return Fewer(why=why) if why else Fewer(may=True, parts=_micro_batches(args))


def _cannot(args: Any, known_before: bool) -> str:
    for name in _SIZES:
        if (getattr(args, name, None) or 1) > 1:
            return f"--{_option(name)} is {getattr(args, name)}"
    for name, because in _IN_THE_WAY.items():
        if getattr(args, name, None):
            return f"--{_option(name)}: {because}"
    loader = getattr(args, "dataloader_type", None)
    if loader != "single":
        return f"--dataloader-type {loader}: which samples a step has depends on the number of ranks"
    if not known_before:
        return "this version of Megatron parses its options within pretrain()"
    return "" if _micro_batches(args) else "the sizes of its batches are not known"


def _micro_batches(args: Any) -> int:
    """Those of a step, or what they have in common with those of an evaluation; 0 where they are not known."""
    batch, micro = getattr(args, "global_batch_size", None), getattr(args, "micro_batch_size", None)
    if not batch or not micro:
        return 0
    batches = getattr(args, "eval_global_batch_size", None) or batch
    return math.gcd(batch // micro, batches // (getattr(args, "eval_micro_batch_size", None) or micro))


def numbered(args: Namespace) -> None:
    """Count ranks as the environment does, where not all are there; else each has the number that it began with."""
    size = int(os.environ.get("WORLD_SIZE", "0"))
    if not size or size == getattr(args, "world_size", size):
        return
    each = args.world_size // args.data_parallel_size
    args.rank, args.world_size, args.data_parallel_size = int(os.environ["RANK"]), size, size // each


def note_of(args: Any, step: int) -> str:
    """What differs from a training without the fault, where it goes on behind `step` with another number of ranks."""
    dropout = any(getattr(args, name, 0) for name in ("attention_dropout", "hidden_dropout"))
    return DROPOUT.format(step=step) if dropout else ""


def _option(name: str) -> str:
    return name.replace("_", "-")
