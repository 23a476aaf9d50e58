"""An optimizer of which each rank holds a part, on a CPU: `optimizer: {type: OwnMoments}` in MindFormers' YAML.

MindSpore's own parallel optimizer, and the modes in which MindSpore splits parameters itself, refuse CPUs. In the mode
that is left, hybrid_parallel, nothing need be compiled before a load; MindFormers would, and needs `sink_mode` for it.
"""

from __future__ import annotations

import sys
from typing import Any

from mindformers.core.optim.adamw import AdamW
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Parameter, ParameterTuple, Tensor, ops
from mindspore.communication import get_group_size, get_rank


class OwnMoments(AdamW):  # type: ignore[misc]
    """Each rank has the moments of every N-th parameter, updates these, and all get them by an AllReduce."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mine = [float(n % get_group_size() == get_rank()) for n in range(len(self._parameters))]
        parts = [Parameter(Tensor([one]), name=f"part.{n}", requires_grad=False) for n, one in enumerate(mine)]
        self.parts, self.count = ParameterTuple(parts), len(parts)  # no constants: all ranks must have the same graph,
        self.reduced = ops.AllReduce()  # or their collectives would come in other orders

    def construct(self, gradients):  # type: ignore[no-untyped-def]
        """Compiled from its source."""
        mine = ()
        for i in range(self.count):
            mine += (gradients[i] * self.parts[i],)  # type: ignore[assignment]
        result = super().construct(mine)
        for i in range(self.count):
            updated = ops.depend(self._parameters[i], result) * self.parts[i]
            result = ops.depend(result, ops.assign(self._parameters[i], self.reduced(updated)))
        return result


for module in list(sys.modules.values()):
    for name in ("compile_model", "build_model"):  # of 1.9.0 and of 1.6.0, which has other functions of the latter name
        found = vars(module).get(name)
        if module.__name__.startswith("mindformers.") and getattr(found, "__module__", "") in (
            "mindformers.checkpoint.utils",
            "mindformers.utils.load_checkpoint_utils",
        ):
            vars(module)[name] = lambda *args, **kwargs: None
MindFormerRegister.register_cls(OwnMoments, MindFormerModuleType.OPTIMIZER)
