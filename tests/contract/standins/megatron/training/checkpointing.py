"""Stand-in."""

from typing import Any

from .log import calls


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    """As Megatron's."""
    return f"{checkpoints_path}/latest_checkpointed_iteration.txt"


def ensure_directory_exists(filename: str, check_parent: bool = True) -> None:
    """Nothing."""


def save_checkpoint(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: Any,
    checkpointing_context: Any = None,
    pipeline_rank: Any = None,
    expert_rank: Any = None,
    tensor_rank: Any = None,
    pipeline_parallel: Any = None,
    expert_parallel: Any = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    preprocess_common_state_dict_fn: Any = None,
) -> None:
    """Saves nothing."""
    calls.append("save_checkpoint")


def load_checkpoint(
    ddp_model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    checkpointing_context: Any = None,
    skip_load_to_model_and_opt: bool = False,
) -> tuple[int, int]:
    """Loads nothing."""
    calls.append("load_checkpoint")
    return 0, 0
