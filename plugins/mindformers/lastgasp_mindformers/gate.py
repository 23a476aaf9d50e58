"""Two counters in the compiled step: the update has begun, the update has ended.

A step of MindSpore is one graph, and no Python runs between its gradients and its updates. So each
optimizer is given a `construct` that waits for all gradients (`ops.Depend`; in data parallel: for all AllReduces)
before it touches anything, counts once before the first and once after the last change, and changes nothing else.
Without it a rank that hangs in an AllReduce has `global_step` and Adam's `beta1_power` of the next step already
(observed with mindspore 2.9.0 on CPU). Another thread reads the counters while the graph runs: where both are equal
the parameters are those of a complete step.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn, ops

log = logging.getLogger("lastgasp")

_KEPT = "_lastgasp_gate"
_NAMES = ("lastgasp_depend", "lastgasp_add", "lastgasp_one", "lastgasp_began", "lastgasp_ended")


def gated(kind: Any) -> Any:
    """A subclass of the optimizer class `kind` whose `construct` is gated and counted.

    What MindSpore compiles takes `super()` for that of the object's class, whichever class it stands in: there must be
    the parents' methods, as without the gate, or an optimizer that calls `super().construct` calls itself.
    """
    own = {name: value for name, value in vars(kind).items() if inspect.isfunction(value) and name[:2] != "__"}
    above = super(kind, kind)
    methods = {name: getattr(above, name) for name in own if hasattr(above, name)}
    parents: Any = type("Parents", (), {"__slots__": (), **methods})

    class Gated(parents, kind):  # type: ignore[misc]
        """MindSpore compiles `construct` from its source; see the module."""

        lastgasp_update = kind.construct

        def construct(self, gradients, **kwargs):  # type: ignore[no-untyped-def]
            """Count, update, count."""
            one = self.lastgasp_depend(self.lastgasp_one, gradients)
            gradients = self.lastgasp_depend(gradients, self.lastgasp_add(self.lastgasp_began, one))
            result = self.lastgasp_update(gradients, **kwargs)
            self.lastgasp_add(self.lastgasp_ended, self.lastgasp_depend(self.lastgasp_one, result))
            return result

    for name in own.keys() - {"construct"}:
        setattr(Gated, name, own[name])
    Gated.__name__, Gated.__qualname__ = kind.__name__, kind.__qualname__
    return Gated


class UpdateGate:
    """The gate and the counters of one optimizer.

    Args:
        optimizer: a MindSpore optimizer that was not compiled yet.

    The counters are not among the parameters of the optimizer, so that no checkpoint holds them.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._kind = optimizer, type(optimizer)
        self.seen = False
        """Whether the counters are known to move, so they are in the running graph."""
        self._began, self._ended = _counter("lastgasp_began"), _counter("lastgasp_ended")
        one = Tensor([1], mindspore.int32)
        values = (ops.Depend(), ops.AssignAdd(), one, self._began, self._ended)
        # Bypasses Cell.__setattr__, which would make the counters parameters of the network.
        optimizer.__dict__.update(zip(_NAMES, values, strict=True))
        optimizer.__dict__[_KEPT] = self
        optimizer.__class__ = gated(self._kind)

    def read(self) -> tuple[int, int]:
        """Updates begun and ended so far. From any thread."""
        ended = int(self._ended.asnumpy()[0])  # before `began`: a complete update in between must not look like none
        began = int(self._began.asnumpy()[0])
        if ended:
            self.seen = True
        return began, ended

    def undo(self) -> None:
        """Give the optimizer its class back. A graph that is compiled keeps its counters. Idempotent."""
        if self._optimizer.__dict__.pop(_KEPT, None) is self:
            self._optimizer.__class__ = self._kind
            for name in _NAMES:
                self._optimizer.__dict__.pop(name, None)


def _counter(name: str) -> Any:
    return Parameter(Tensor([0], mindspore.int32), name=name, requires_grad=False)


def gate_of(train_network: Any) -> UpdateGate | None:
    """The gate of the optimizer in `train_network`; None where there is not exactly one optimizer."""
    found = [cell for _, cell in train_network.cells_and_names() if isinstance(cell, nn.Optimizer)]
    if len(found) != 1:
        log.warning(
            "%d optimizers in the train network: a rank that is killed in the middle of a step costs that step's "
            "checkpoint, because it is unknown whether the others had begun their update; use one nn.Optimizer",
            len(found),
        )
        return None
    kept: UpdateGate | None = found[0].__dict__.get(_KEPT)
    return kept or UpdateGate(found[0])
