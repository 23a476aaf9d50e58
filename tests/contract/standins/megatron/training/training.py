"""Stand-in."""

from typing import Any

from .checkpointing import load_checkpoint, save_checkpoint
from .initialize import initialize_megatron
from .log import calls


def pretrain(
    train_valid_test_dataset_provider: Any,
    model_provider: Any,
    model_type: Any,
    forward_step_func: Any,
    process_non_loss_data_func: Any = None,
    extra_args_provider: Any = None,
    args_defaults: Any = None,
) -> None:
    """Two steps and a save."""
    calls.append("pretrain")
    initialize_megatron(extra_args_provider=extra_args_provider, args_defaults=args_defaults)
    model, optimizer, scheduler = setup_model_and_optimizer(model_provider, model_type)
    train(forward_step_func, model, optimizer, scheduler, None, None, process_non_loss_data_func, None)


def setup_model_and_optimizer(
    model_provider_func: Any,
    model_type: Any,
    no_wd_decay_cond: Any = None,
    scale_lr_cond: Any = None,
    lr_mult: float = 1.0,
    checkpointing_context: Any = None,
) -> tuple[Any, Any, Any]:
    """Loads."""
    calls.append("setup_model_and_optimizer")
    load_checkpoint([], None, None)
    return [], None, None


def train_step(
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    config: Any,
) -> tuple[Any, ...]:
    """Seven results in this version."""
    calls.append("train_step")
    return {}, 0, False, False, 0, 0.0, 0


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
    """Two steps and a save."""
    calls.append("train")
    for _ in range(2):
        _, _, _, _, _, _, _ = train_step(forward_step_func, None, model, optimizer, opt_param_scheduler, config)
    save_checkpoint(2, model, optimizer, opt_param_scheduler, 0)
    return 2, 0
