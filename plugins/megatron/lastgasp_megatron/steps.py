"""What a step is: one iteration of Megatron's, complete as soon as the inner optimizers' steps are done.

The truth is Adam's step (docs/facts/megatron.md §3): between it and the end of the iteration there are collectives, the
scheduler and the counters, all of which follow from it. With expert parallelism there are two optimizers, and Megatron
gathers the weights of the first before the second one's step. All gradients are ready before the first, so that of the
second is made right behind it: no collective lies between the two, where a dead peer would leave a step half made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from lastgasp.adapter import Undo, replace_attribute
from lastgasp_megatron.beside import Beside, Kept


@dataclass(frozen=True)
class Boundary:
    """What belongs to a completed step besides tensors and random state.

    Args:
        step: completed iterations.
        consumed, skipped: training samples.
        scheduler: state of the parameter scheduler, None without one.
        scalers: state of each optimizer's loss scaler, None without one.
        adam: updates that each inner optimizer has counted; None when unknown.
        trained: samples of the iterations of this start that were not skipped.
        validated: validation samples, with those of the evaluation that follows the step.
        kept: what of the model no update makes, copied: such as the bias of a router, which is changed before it.
    """

    step: int
    consumed: int
    skipped: int
    scheduler: dict[str, Any] | None
    scalers: tuple[dict[str, Any] | None, ...]
    adam: tuple[int | None, ...]
    validated: int = 0
    trained: int = 0
    kept: Kept = field(default=Kept(), compare=False)


class Built(NamedTuple):
    """What Megatron's `setup_model_and_optimizer` has made, and its namespace; `model` is the list of its chunks."""

    args: Any
    model: list[Any]
    optimizer: Any
    scheduler: Any


class Steps:
    """Counts completed steps. The training thread calls everything; others read `boundary` and `inside`.

    Args:
        built: Megatron's.
        capture: records the random state for a step; `settled` is False just before its update.
        before_update: called before parameters change; may raise, and then they do not.
        step_completed: called when a step is complete.
        keep: called before that: the optimizer's state is that of the step.
        note: reports what people must know (`Session.note`).

    Attributes:
        settled: the model's weights have been copied from the optimizer's since its last update.
        updated: an update was made.
        on_settled: called when the weights have been copied (on a device: when that is issued).
        logged: the newest step that Megatron has written its line of, or begun another one behind.
    """

    def __init__(
        self,
        built: Built,
        *,
        capture: Callable[[int, bool], None],
        before_update: Callable[[], None],
        step_completed: Callable[[int], None],
        keep: Callable[[Boundary], None] = lambda boundary: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._args, model, self._optimizer, self._scheduler = built
        self._parts = parts_of(built.optimizer)
        self._inners = [one.optimizer for one in self._parts]
        self._ahead: dict[int, Any] = {}  # what the steps that were made with the first one's have returned
        self._beside = Beside(model, self._parts, note)
        self._capture, self._before_update, self._step_completed = capture, before_update, step_completed
        self._keep = keep
        self.step = self.logged = int(getattr(built.args, "iteration", 0) or 0)
        self.inside = False
        self.settled, self.updated = True, False
        self.on_settled: Undo = _nothing
        self._counted = self._tried = False
        self._undo: list[Undo] = []
        self.boundary = self._now(self.step, self._beside.take(self.step))

    def install(self) -> None:
        """Watch Megatron's optimizer and the inner ones. Idempotent."""
        if self._undo:
            return
        self._undo.append(wrap(self._optimizer, "step", self._outer_step))
        for number, inner in enumerate(self._inners):
            self._undo.append(wrap(inner, "step", partial(self._inner_step, number)))

    def uninstall(self) -> None:
        """Put everything back. Idempotent."""
        while self._undo:
            self._undo.pop()()

    # -- the hot path -----------------------------------------------------------------------------

    def iteration_begin(self) -> None:
        """The next iteration starts: what belongs to the completed step is settled now."""
        self._counted = self._tried = False
        self._ahead.clear()
        begun = getattr(self._args, "curr_iteration", None)
        if begun is not None and begun > self.step:  # --iterations-to-skip: counted without an update
            self._settle(int(begun))
            self._keep(self.boundary)
            self._step_completed(self.step)
        else:
            self._settle(self.step)
        self.logged = self.step

    def iteration_end(self) -> None:
        """`train_step` has returned. One that left the weights alone (loss scale) counts, too."""
        if self._tried and not self._counted:
            self._before_update()  # it ends a step all the same, whose scale is that of all ranks
            self._capture(self.step + 1, True)
            self.inside = True  # what was copied of the step before is about to be replaced
            self._complete(updated=False)

    def _settle(self, step: int) -> None:
        self._capture(step, True)
        self.boundary = self._now(step, self.boundary.kept, self.boundary.trained)
        self.step = step

    def _outer_step(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._tried = True
        self.on_settled()
        self.settled = True
        return result

    def _inner_step(self, number: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if number in self._ahead:
            return self._ahead.pop(number)
        if self.inside:  # made by the first one's
            return original(*args, **kwargs)
        self._capture(self.step + 1, False)
        self._before_update()
        self.inside, self.settled = True, False
        result = original(*args, **kwargs)
        for other, inner in enumerate(self._inners):
            if other != number:
                self._ahead[other] = inner.step(*args, **kwargs)
        self.updated = True
        self._complete(updated=True)
        return result

    def _complete(self, updated: bool) -> None:
        boundary = self._following(updated)
        self._keep(boundary)
        self.boundary = boundary
        self.step = self.boundary.step
        self._counted = True
        self.inside = False
        self._step_completed(self.step)

    def counted(self) -> tuple[int | None, ...]:
        """What each inner optimizer counts now."""
        return tuple(adam_step(inner) for inner in self._inners)

    # -- what belongs to it -----------------------------------------------------------------------

    def _now(self, step: int, kept: Kept, trained: int = 0) -> Boundary:
        """Between two iterations all counters agree."""
        args, scheduler = self._args, self._scheduler
        return Boundary(
            step=step,
            consumed=int(getattr(args, "consumed_train_samples", 0) or 0),
            skipped=int(getattr(args, "skipped_train_samples", 0) or 0),
            scheduler=scheduler.state_dict() if scheduler is not None else None,
            scalers=self._scalers(),
            adam=self.counted(),
            validated=self._validated(),
            trained=trained,
            kept=kept,
        )

    def _following(self, updated: bool) -> Boundary:
        """The step under way, as it will be when the iteration has ended: the counters follow later."""
        before, samples = self.boundary, self._samples()
        scheduler = before.scheduler
        if scheduler is not None and updated:
            scheduler = scheduler | {"num_steps": scheduler["num_steps"] + samples}
        step = before.step + 1
        return Boundary(
            step=step,
            consumed=before.consumed + samples,
            skipped=before.skipped + _left_out(),
            scheduler=scheduler,
            scalers=self._scalers(),
            adam=self.counted(),
            validated=self._validated() + _evaluated_after(step, self._args),
            trained=before.trained + samples,
            kept=self._beside.take(step),
        )

    def moved_on(self) -> str:
        """Tensors that have changed since the completed step and were not copied; empty if none has."""
        return self._beside.changed()

    def extra_moved_on(self) -> str:
        """Extra state of modules of which the same is so."""
        return self._beside.extra_changed()

    def logged_late(self) -> str:
        """What the next line of Megatron's log will lack of the steps up to the completed one; empty if nothing."""
        every, step = int(getattr(self._args, "log_interval", None) or 1), self.boundary.step
        if not step % every:
            return ""
        return (f"--log-interval {every}: the losses in the next line of the log are means of the iterations behind "
                f"{step} alone")  # fmt: skip

    def cut_short(self) -> bool:
        """Megatron has not finished the evaluation that follows the completed step."""
        return self._validated() < self.boundary.validated

    def _validated(self) -> int:
        return int(getattr(self._args, "consumed_valid_samples", 0) or 0)

    def _samples(self) -> int:
        """Samples of one iteration, as `train_step` counts them for the scheduler."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        args = self._args
        ranks = int(args.data_parallel_size) * int(getattr(args, "gtp_weight_remat_size", 1) or 1)
        return int(get_num_microbatches()) * int(args.micro_batch_size) * ranks

    def _scalers(self) -> tuple[dict[str, Any] | None, ...]:
        scalers = [getattr(one, "grad_scaler", None) for one in self._parts]
        return tuple(dict(scaler.state_dict()) if scaler is not None else None for scaler in scalers)


def _nothing() -> None:
    """The default of `on_settled`."""


def _evaluated_after(step: int, args: Any) -> int:
    """Validation samples that Megatron's loop takes between that step and the next."""
    every, first = (getattr(args, name, None) for name in ("eval_interval", "start_eval_at_iter"))
    if not every or not getattr(args, "do_valid", False) or step % int(every) or step < int(first or 0):
        return 0
    batches = getattr(args, "eval_iters", 0) or 0
    number = sum(batches) if isinstance(batches, list) else int(batches)
    return number * int(getattr(args, "eval_global_batch_size", None) or args.global_batch_size)


def _left_out() -> int:
    """Samples of a batch that no rank gets (--decrease-batch-size-if-needed)."""
    batches = sys.modules.get("megatron.core.num_microbatches_calculator")
    running = getattr(batches, "get_current_running_global_batch_size", None)
    return int(vars(batches)["get_current_global_batch_size"]() - running()) if running is not None else 0


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers in Megatron's chain that have parameters on this rank, or the one that is not a chain."""
    return [one for one in chain_of(optimizer) if not is_stub(one)]


def chain_of(optimizer: Any) -> list[Any]:
    """The same with those without parameters."""
    return [one for one in getattr(optimizer, "chained_optimizers", [optimizer]) if one is not None]


def is_stub(optimizer: Any) -> bool:
    """Whether it is Megatron's placeholder on a rank without parameters."""
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def adam_step(inner: Any) -> int | None:
    """How many updates an inner optimizer has made; None when that cannot be read without waiting for a device."""
    counted = next((group["step"] for group in inner.param_groups if "step" in group), None)
    if counted is None:
        counted = next((state["step"] for state in inner.state.values() if "step" in state), None)
    if counted is None or getattr(getattr(counted, "device", None), "type", "cpu") != "cpu":
        return None
    return int(counted)


def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any], Any, Any], Any]) -> Undo:
    """Put `around(original, args, kwargs)` in front of an attribute of this one object; returns the undo."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: around(original, args, kwargs)

    return replace_attribute(owner, name, make)
