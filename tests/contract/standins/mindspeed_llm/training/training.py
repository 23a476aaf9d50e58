"""Stand-in for MindSpeed-LLM's own training: it replaces `pretrain` and `train`, and copies other names."""

from typing import Any

from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.initialize import initialize_megatron
from megatron.training.log import calls
from megatron.training.training import setup_model_and_optimizer, train_step

__all__ = ["load_checkpoint"]


def pretrain(
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    process_non_loss_data_func: Any = None,
    extra_args_provider: Any = None,
    args_defaults: Any = None,
) -> None:
    """As Megatron's."""
    calls.append("mindspeed_llm.pretrain")
    initialize_megatron(extra_args_provider=extra_args_provider, args_defaults=args_defaults)
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, model_type)
    train(forward_step_func, model, optimizer, scheduler, None, None, process_non_loss_data_func, None)


def train(
    forward_step_func: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    process_non_loss_data_func: Any,
    config: Any,
) -> tuple[int, int]:
    """As Megatron's, with names of its own module."""
    calls.append("mindspeed_llm.train")
    for _ in range(2):
        train_step(forward_step_func, None, model, optimizer, opt_param_scheduler, config)
    save_checkpoint(2, model, optimizer, opt_param_scheduler, 0)
    return 2, 0
