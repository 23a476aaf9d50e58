"""Automatic step marks of a Megatron training: where the time of a step goes, without a change of the script.

A place that this version of Megatron does not have is one warning: marks never stop a job.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import torch

from lastgasp.adapter import Around, Hook, Undo
from lastgasp.adapter.torch import Open, Sink, StepRanges
from lastgasp_megatron.communication import MegatronCommunication
from lastgasp_megatron.installation import hooks_of
from lastgasp_megatron.steps import wrap

log = logging.getLogger("lastgasp")

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_TRAINING = "megatron.training.training"
_RERUN, _ITERATOR = "megatron.core.rerun_state_machine", "RerunDataIterator"
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class MegatronMarks:
    """The marks of one training; the training thread's alone.

    `step N`: `train_step`, where N is the iteration that it completes, as in Megatron's log. Validation and
    saves are not included. One that completes no iteration is not marked.
    `dataloader`: the wait for a batch of Megatron's own iterator, on ranks that have one (with tensor parallelism the
    first of each group).
    `forward`: `forward_step` of the schedules, from the batch on; once for each micro-batch.
    `backward`: `backward_step` of the schedules, and `finalize_model_grads`, which waits for other ranks.
    `optimizer`: `optimizer.step`, as Megatron's own timer of that name: also the gradient norm, and with the
    distributed optimizer the gathering of the weights, both of which wait for other ranks.

    Args:
        marks: where they go.
        device: what the model is on.
        first: the iteration that is trained first.
    """

    def __init__(self, marks: Sink, device: torch.device, first: int = 1) -> None:
        self._marks, self._undo = marks, list[Undo]()
        self._in_step = self._fetched = False
        self._unseen = {"forward", "backward", "optimizer"}
        self._ranges = ranges = StepRanges(marks, device, first)
        self._step, self._forward, self._backward = ranges.step, ranges.forward, ranges.backward
        self._optimizer, self._dataloader = ranges.optimizer, ranges.dataloader
        backward = self._around("backward", self._backward)
        self._hooks = hooks_of(
            [
                Hook(_SCHEDULES, "forward_step", self._around_forward, required=False),
                Hook(_SCHEDULES, "backward_step", backward, required=False),
                Hook(_TRAINING, "finalize_model_grads", backward, required=False),
                Hook(_RERUN, f"{_ITERATOR}.__next__", self._around_fetch, required=False),
            ]
        )

    # -- life cycle ---------------------------------------------------------------------------------------

    def install(self, optimizer: Any) -> None:
        """Find the places, once the model is set up. Idempotent.

        Args:
            optimizer: what Megatron calls `step` of.
        """
        if self._undo:
            return
        if not hasattr(sys.modules.get(_RERUN), _ITERATOR):
            log.warning("no marks of dataloader: there is no %s.%s in this version of Megatron", _RERUN, _ITERATOR)
        self._undo.append(self._hooks.undo)
        self._undo.append(wrap(optimizer, "step", self._around("optimizer", self._optimizer)))
        self.place()
        self._ranges.follow(MegatronCommunication(self._marks))

    def place(self) -> None:
        """Restore hooks that were replaced since."""
        self._hooks.place()

    def close(self) -> None:
        """Restore everything; open ranges are discarded. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self._ranges.close()

    @property
    def device_rows(self) -> Literal["host", "events"]:
        """The source of the times in the device rows (`StepRecorder.set_device_rows`)."""
        return self._ranges.device_rows

    # -- called by the hooks ------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Before `train_step`."""
        self._in_step = True
        self._step.begin()

    def step_ends(self, step: int | None) -> None:
        """After `train_step`; `step` is the iteration that it completed, None where it completed none."""
        self._in_step = False
        if step is None:
            self._step.cancel()
            return
        self._ranges.end_step(step)
        self._ranges.look()
        if self._unseen:
            self._warn()

    def _warn(self) -> None:
        log.warning(
            "no marks of %s: this job does not call them where Megatron 0.12.1 to 0.19.2 does. Its other marks and "
            "its protection are not affected.", ", ".join(sorted(self._unseen)),
        )  # fmt: skip
        self._unseen.clear()

    # -- the places ---------------------------------------------------------------------------------------

    def _around_forward(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        if not self._in_step:  # validation
            return call(*args, **kwargs)
        self._unseen.discard("forward")
        self._fetched = False
        self._forward.begin()
        result = call(*args, **kwargs)
        self._forward.end()
        return result

    def _around(self, name: str, mark: Open) -> Around:
        def around(call: Any, args: Arguments, kwargs: Keywords) -> Any:
            self._unseen.discard(name)
            mark.begin()
            result = call(*args, **kwargs)
            mark.end()
            return result

        return around

    def _around_fetch(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        """The forward pass is interrupted by each fetch; what comes before the first one is negligible."""
        if not self._in_step:
            return call(*args, **kwargs)
        forward, first = self._forward, not self._fetched
        inside = forward.cancel() if first else True
        if not first:
            forward.end()
        self._fetched = True
        self._dataloader.begin()
        try:
            batch = call(*args, **kwargs)
        except BaseException:
            self._dataloader.cancel()
            raise
        self._dataloader.end()
        if inside:
            forward.begin()
        return batch
