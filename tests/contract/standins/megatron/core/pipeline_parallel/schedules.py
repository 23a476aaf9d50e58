"""Stand-in: the two functions that a schedule calls for each micro-batch, and a schedule that copied them."""

from typing import Any

from megatron.training.log import calls


def forward_step(forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int) -> Any:
    """As core_v0.12.1, shortened."""
    calls.append("forward_step")
    return forward_step_func(data_iterator, model)


def backward_step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any, config: Any) -> None:
    """As core_v0.12.1."""
    calls.append("backward_step")


def forward_backward_no_pipelining(*, forward_step_func: Any, data_iterator: Any, model: Any) -> None:
    """One micro-batch."""
    output = forward_step(forward_step_func, data_iterator, model, 1)
    backward_step(None, output, None, None, None)
