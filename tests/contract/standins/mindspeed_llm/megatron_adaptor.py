"""Stand-in: importing it patches Megatron, as MindSpeed-LLM's does."""

import functools
from typing import Any

from megatron.training.log import calls
from mindspeed.patch_utils import MindSpeedPatchesManager


def train_step_wrapper(function: Any) -> Any:
    """One of MindSpeed's wrappers."""

    @functools.wraps(function)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        calls.append("mindspeed.train_step")
        return function(*args, **kwargs)

    return train_step


def opaque_decorator(function: Any) -> Any:
    """One that does not tell what it wraps."""

    def save(*args: Any, **kwargs: Any) -> Any:
        calls.append("mindspeed.save_checkpoint")
        return function(*args, **kwargs)

    return save


def register() -> None:
    """All of its patches."""
    from mindspeed_llm.training.training import pretrain, train

    add = MindSpeedPatchesManager.register_patch
    add("megatron.training.training.pretrain", pretrain)
    add("megatron.training.training.train", train)
    add("megatron.training.training.train_step", train_step_wrapper)
    add("megatron.training.checkpointing.save_checkpoint", opaque_decorator)


def repatch() -> None:
    """Remove everything and do it again, as MindSpeed's `repatch` does."""
    MindSpeedPatchesManager.remove_patches()
    register()
    MindSpeedPatchesManager.apply_patches()


repatch()
