"""Stand-in."""

from typing import Any

from .arguments import parse_args
from .log import calls

parsed: list[Any] = []


def initialize_megatron(
    extra_args_provider: Any = None,
    args_defaults: Any = None,
    ignore_unknown_args: bool = False,
    allow_no_cuda: bool = False,
    skip_mpu_initialization: bool = False,
    get_embedding_ranks: Any = None,
    get_position_embedding_ranks: Any = None,
) -> None:
    """Parses the arguments, then starts the process group."""
    calls.append("initialize_megatron")
    parsed.append(parse_args(extra_args_provider, ignore_unknown_args))
    import torch.distributed

    torch.distributed.init_process_group()
