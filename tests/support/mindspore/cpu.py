"""Lets MindFormers train on a CPU: the one operator of its step that MindSpore has for Ascend and GPU only.

Everything else is a matter of the YAML: float32, no flash attention, no fused norm, `use_rope_slice: True`.
"""

from __future__ import annotations

from typing import Any

from mindspore import dtype, nn, ops

_overflown = ops.MultitypeFuncGraph("overflown")


@_overflown.register("Tensor")  # type: ignore[untyped-decorator]
def _tensor_overflown(gradient: Any) -> Any:
    return 1.0 - ops.reduce_min(ops.cast(ops.isfinite(gradient), dtype.float32))


def _overflow(self: Any, status: Any, compute_output: Any) -> Any:
    """In the graph: whether any rank has a gradient that is not finite."""
    return self._get_distributed_overflow_status_on_infnan_mode(_overflown, compute_output)


def apply() -> None:
    """Change this process for good."""
    nn.TrainOneStepWithLossScaleCell.get_overflow_status = _overflow
