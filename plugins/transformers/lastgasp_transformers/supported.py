"""Which Trainers are protected: what is refused, and the methods that are relied on."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import transformers
from transformers import trainer as trainer_module

from lastgasp import adapter

NEEDS = {
    "get_train_dataloader": (),
    "_init_training_state": ("max_steps", "num_update_steps_per_epoch"),
    "_run_epoch": ("epoch", "steps_in_epoch", "steps_trained_in_current_epoch", "num_update_steps_per_epoch"),
    "_get_grad_norm": ("model",),
    "_evaluate": (),
    "_maybe_log_save_evaluate": ("tr_loss", "grad_norm", "learning_rate"),
    "_save_checkpoint": ("model", "trial"),
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
    "_load_rng_state": ("checkpoint",),
    "_load_from_checkpoint": ("resume_from_checkpoint",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
}
"""Methods that are replaced in the Trainer that trains, and their parameters (docs/facts/transformers.md §1)."""

_NUMBERED_CPU = re.compile(r"cpu:\d+")
_BEHIND_TORCHS_OWN = 90
_THIS, _OLDEST = tuple(map(int, transformers.__version__.split(".")[:2])), (5, 5)
"""In older ones accelerate counts the batches of a step as well (5.4), or there is one method for all of training."""


def require_known_version() -> None:
    """Before anything else is imported.

    Raises:
        HookNotPlaced: this transformers is too old.
    """
    if _THIS < _OLDEST:
        raise adapter.HookNotPlaced("transformers 5.5 or newer", transformers.__version__, versions_known())


def restore_numbered_cpus() -> None:
    """Releases before 5.19 load the optimizer in a job of several ranks on CPUs to `cpu:0`, which torch refuses."""
    if _THIS >= (5, 19):
        return
    torch.serialization.register_package(
        _BEHIND_TORCHS_OWN,
        lambda storage: None,
        lambda storage, place: storage if _NUMBERED_CPU.fullmatch(place) else None,
    )


def versions_known() -> str:
    """For the error of a hook that does not fit."""
    there = f"this is {transformers.__version__}"
    return f"lastgasp knows transformers 5.5 to 5.24, {there}: install one, or take LastGasp out of the callbacks."


_FSDP = (
    "Sharded models are protected in custom loops (lastgasp.pytorch) and with Lightning's ModelParallelStrategy "
    "(docs/sharded.md), not in Trainer. Leave out `fsdp`, or take LastGasp out of the callbacks."
)


def require_supported(trainer: Any) -> None:
    """Refuse what survivors alone cannot save, and what trains under other rules.

    Raises:
        ConfigError: names the argument, and what is supported.
        HookNotPlaced: this transformers lacks something that is relied on.
    """
    args, kind = trainer.args, str(trainer.accelerator.distributed_type.value)
    plain = kind == "NO" or (kind.startswith("MULTI_") and trainer.accelerator.parallelism_config is None)
    sharded = getattr(trainer, "is_distributed_loading_by_transformers", False)  # since 5.16
    for field, value, bad, allowed in (
        ("distributed_type", kind, not plain or sharded, "DDP or one device"),
        ("n_gpu", args.n_gpu, args.n_gpu > 1, "one device in each process: start it with torchrun or `lastgasp run`"),
        ("auto_find_batch_size", True, args.auto_find_batch_size, "False: a step must stay the same step"),
        ("enable_jit_checkpoint", True, args.enable_jit_checkpoint, "False: lastgasp itself saves on SIGTERM"),
    ):
        if bad:
            remedy = _FSDP if value == "FSDP" else "Change it, or take LastGasp out of the callbacks."
            raise adapter.ConfigError(field, value, allowed, remedy)
    theirs = trainer_module.Trainer  # a subclass's own only has to take what Trainer gives
    for name, needs in NEEDS.items():
        there = inspect.signature(getattr(theirs, name)).parameters if hasattr(theirs, name) else {}
        if not hasattr(theirs, name) or set(needs) - set(there):
            raise adapter.HookNotPlaced(f"Trainer.{name}({', '.join(needs)})", str(tuple(there)), versions_known())
