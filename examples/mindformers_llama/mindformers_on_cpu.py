"""Lets MindFormers train on a CPU: the operators of its step and of its loading that MindSpore has for Ascend only.

Everything else is a matter of the YAML: float32, no flash attention, no fused norm, `use_rope_slice: True`. On Ascend
take the two lines that call it out of train.py.
"""

from __future__ import annotations

import sys
from typing import Any

from mindspore import Tensor, dtype, nn, ops
from mindspore.communication import comm_func

_overflown = ops.MultitypeFuncGraph("overflown")


@_overflown.register("Tensor")  # type: ignore[untyped-decorator]
def _tensor_overflown(gradient: Any) -> Any:
    return 1.0 - ops.reduce_min(ops.cast(ops.isfinite(gradient), dtype.float32))


def _overflow(self: Any, status: Any, compute_output: Any) -> Any:
    """In the graph: whether any rank has a gradient that is not finite."""
    return self._get_distributed_overflow_status_on_infnan_mode(_overflown, compute_output)


def _barrier(*_: Any, **__: Any) -> None:
    """No rank goes on before all are here."""
    ops.AllReduce()(Tensor([1.0], dtype.float32)).asnumpy()


def apply() -> None:
    """Change this process for good; once MindFormers is imported."""
    nn.TrainOneStepWithLossScaleCell.get_overflow_status = _overflow
    theirs, comm_func.barrier = comm_func.barrier, _barrier
    for name, module in list(sys.modules.items()):
        if name.startswith("mindformers.") and getattr(module, "barrier", None) is theirs:
            module.barrier = _barrier  # type: ignore[attr-defined]
