"""Settings of Megatron's that are refused or overruled."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

import torch

from lastgasp.adapter import ConfigError

log = logging.getLogger("lastgasp")

# Option -> its values that are refused, and what to do. Left out in a version of Megatron that has no such option.
_REFUSED: dict[str, tuple[str, str]] = {
    "use_megatron_fsdp": ("the default", "Use --use-distributed-optimizer."),
    "use_custom_fsdp": ("the default", "Use --use-distributed-optimizer."),
    "use_torch_fsdp2": ("the default", "Use --use-distributed-optimizer."),
    "use_layer_wise_distributed_optimizer": ("the default", "Use --optimizer adam, which does not bring it about."),
    "optimizer_cpu_offload": ("the default", "Leave it out."),
    "use_precision_aware_optimizer": ("the default", "Leave it out."),
    "fp8_param_gather": ("the default", "Leave it out."),
    "fp4_param": ("the default", "Leave it out."),
    "fp4_param_gather": ("the default", "Leave it out."),
    "qk_clip": ("the default", "Leave it out: it changes weights behind the update, where survivors do not see it."),
    "optimizer_cuda_graph": ("the default", "Leave it out: its state cannot be read between two steps."),
    "overlap_param_gather_with_optimizer_step": ("the default", "Leave it out."),
    "reuse_grad_buf_for_mxfp8_param_ag": ("the default", "Leave it out."),
    # Of experts. What changes a step's computation alone (dispatchers, grouped and fused kernels, overlap) is not here.
    "moe_use_upcycling": ("the default", "Convert the checkpoint in a run without lastgasp, then leave it out."),
    "moe_single_grouped_weight": ("the default", "Leave it out: its weights are of a form that is untested."),
    "moe_single_grouped_bias": ("the default", "Leave it out: its weights are of a form that is untested."),
    "moe_enable_routing_replay": ("the default", "Leave it out: what it replays is in no checkpoint."),
    "moe_paged_stash": ("the default", "Leave it out: it may do a step again by itself, which is untested."),
    "moe_tp_extend_ep": ("the default", "Leave it out: experts are on other ranks than Megatron has them on."),
    # MindSpeed's. Between two steps the optimizer's tensors are of another form, or not where they seem to be.
    "reuse_fp32_param": ("the default", "Leave it out: between two steps it keeps no fp32 weights to save."),
    "swap_optimizer": ("the default", "Leave it out: between two steps the optimizer's state is not on the device."),
    "virtual_optimizer": ("the default", "Leave it out: it is untested whether survivors can save its state."),
    "quant_states": ("the default", "Leave it out: it is untested whether survivors can save its state."),
    "lora_target_modules": ("the default", "Leave it out: a model with adapters is not saved completely."),
    # Others that answer a fault in place of lastgasp.
    "ttp_enabled": ("lastgasp or MindSpeed's own engine, not both", "Leave one out."),
    "inprocess_restart": ("lastgasp or restarts in the process, not both", "Leave one out."),
    "non_persistent_ckpt_type": ("none: Megatron loads these without a check", "Leave it out."),
    "dataloader_save": (
        "none: survivors cannot save where an external data loader is",
        "Leave it out, and have your loader begin at args.consumed_train_samples.",
    ),
    "logits_save_dir": (
        "none: the logits of the steps since the last periodic save are in this process alone",
        "Save logits in a job without lastgasp (LASTGASP=0), which does these steps again behind a fault.",
    ),
    "no_save_optim": ("the default", "Leave it out: what is saved without the optimizer cannot be resumed."),
}
# The same for sizes: those above 1 are refused. They follow from options of other names.
_ONE = {
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",
    "expert_gtp_weight_remat_size": "--expert-tensor-parallel-num-weight-shards",
}


def users_handler(args: Any) -> Callable[..., Any] | None:
    """The user's SIGTERM handler; not that of --exit-signal-handler, which waits for all ranks in a collective."""
    found = signal.getsignal(signal.SIGTERM)
    own = getattr(args, "exit_signal", signal.SIGTERM) == signal.SIGTERM
    if own and getattr(args, "exit_signal_handler", False):
        log.warning("--exit-signal-handler is not needed: lastgasp answers SIGTERM, also when a rank is dead")
        return None
    return found if callable(found) else None


def refuse(args: Any) -> None:
    """Refuse settings under which a step could be lost silently, or that survivors alone cannot save.

    Raises:
        ConfigError: names the option that is in the way, what is allowed, and what to do.
    """
    for name, (allowed, remedy) in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError("--" + name.replace("_", "-"), getattr(args, name), allowed, remedy)
    for name, option in _ONE.items():
        if (getattr(args, name, None) or 1) > 1:
            raise ConfigError(option, getattr(args, name), "1", "Leave it out, or train without lastgasp.")
    _refuse_of_experts(args)
    if getattr(args, "vision_pretraining", False) and getattr(args, "vision_pretraining_type", "") == "dino":
        remedy = "Use another one: it changes weights behind the update, where survivors do not see it."
        raise ConfigError("--vision-pretraining-type", "dino", "another one", remedy)
    format = getattr(args, "ckpt_format", "torch")
    if format not in ("torch", "torch_dist"):
        raise ConfigError("--ckpt-format", format, "torch or torch_dist", "Use one of them.")
    if getattr(args, "async_save", False) and format == "torch":
        remedy = "Use --ckpt-format torch_dist, or leave --async-save out: Megatron would stop at its first save."
        raise ConfigError("--async-save", True, "only with --ckpt-format torch_dist", remedy)
    if not torch.distributed.is_initialized():
        raise ConfigError("torch.distributed", "not initialized", "initialize_megatron before the model", "Call it.")


def not_known(args: Any) -> list[str]:
    """What lastgasp cannot know about the data of a training with these settings."""
    found = []
    if getattr(args, "dataloader_type", None) == "external":
        found.append(
            "--dataloader-type external: where your data loader is, is in no checkpoint. A resumed training has the "
            "right data only if the loader begins at args.consumed_train_samples"
        )
    if getattr(args, "fim_data", False):
        found.append(
            "--fim-data: Megatron's data sets draw which samples they rearrange, and how, from random numbers that are "
            "in no checkpoint and begin anew at each start: samples behind it are rearranged otherwise"
        )
    return found


def _refuse_of_experts(args: Any) -> None:
    """Refuse what was not run with experts, or where their groups are no part of the dense ones.

    Raises:
        ConfigError: as `refuse`.
    """
    experts, tensor = (_size(args, name) for name in ("expert_model_parallel_size", "tensor_model_parallel_size"))
    if not getattr(args, "num_experts", None):
        return
    own = int(getattr(args, "expert_tensor_parallel_size", None) or tensor)
    if own != tensor:
        allowed = f"{tensor}, as --tensor-model-parallel-size"
        remedy = "Leave it out: what a rank holds of the experts would be cut otherwise than all else."
        raise ConfigError("--expert-tensor-parallel-size", own, allowed, remedy)
    if experts == 1:
        return
    gloo = getattr(args, "use_gloo_process_groups", getattr(args, "enable_gloo_process_groups", True))
    if getattr(args, "use_distributed_optimizer", False) and not gloo:
        remedy = "Leave it out: without Gloo groups Megatron cannot load what survivors save of two optimizers."
        raise ConfigError("--disable-gloo-process-groups", True, "not with --expert-model-parallel-size", remedy)


def _size(args: Any, name: str) -> int:
    return int(getattr(args, name, None) or 1)
