"""What a step is: one iteration of Megatron's, complete as soon as the inner optimizer's step is done.

The truth is Adam's step (docs/facts/megatron.md §3): between it and the end of the iteration there are collectives, the
scheduler and the counters, all of which follow from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lastgasp.adapter import Undo, replace_attribute


@dataclass(frozen=True)
class Boundary:
    """What belongs to a completed step besides tensors and random state.

    Args:
        step: completed iterations.
        consumed, skipped: training samples.
        scheduler: state of the parameter scheduler, None without one.
        scaler: state of the loss scaler, None without one.
        adam: updates that the inner optimizer has counted; None when unknown.
    """

    step: int
    consumed: int
    skipped: int
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    adam: int | None


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
    ) -> None:
        self._args, _, self._optimizer, self._scheduler = built
        self.inner = inner_of(built.optimizer)
        self._capture, self._before_update, self._step_completed = capture, before_update, step_completed
        self._keep = keep
        self.step = self.logged = int(getattr(built.args, "iteration", 0) or 0)
        self.inside = False
        self.settled, self.updated = True, False
        self.on_settled: Undo = _nothing
        self._counted = self._tried = False
        self._undo: list[Undo] = []
        self.boundary = self._now(self.step)

    def install(self) -> None:
        """Watch the two optimizers. Idempotent."""
        if self._undo:
            return
        self._undo.append(wrap(self._optimizer, "step", self._outer_step))
        if self.inner is not None:
            self._undo.append(wrap(self.inner, "step", self._inner_step))

    def uninstall(self) -> None:
        """Put everything back. Idempotent."""
        while self._undo:
            self._undo.pop()()

    # -- the hot path -----------------------------------------------------------------------------

    def iteration_begin(self) -> None:
        """The next iteration starts: what belongs to the completed step is settled now."""
        self._counted = self._tried = False
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
            self._capture(self.step + 1, True)
            self._complete(updated=False)

    def _settle(self, step: int) -> None:
        self._capture(step, True)
        self.boundary = self._now(step)
        self.step = step

    def _outer_step(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._tried = True
        self.on_settled()
        self.settled = True
        return result

    def _inner_step(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._capture(self.step + 1, False)
        self._before_update()
        self.inside, self.settled = True, False
        result = original(*args, **kwargs)
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

    def counted(self) -> int | None:
        """What the inner optimizer counts now."""
        return adam_step(self.inner)

    # -- what belongs to it -----------------------------------------------------------------------

    def _now(self, step: int) -> Boundary:
        """Between two iterations all counters agree."""
        args, scheduler = self._args, self._scheduler
        return Boundary(
            step=step,
            consumed=int(getattr(args, "consumed_train_samples", 0) or 0),
            skipped=int(getattr(args, "skipped_train_samples", 0) or 0),
            scheduler=scheduler.state_dict() if scheduler is not None else None,
            scaler=self._scaler(),
            adam=self.counted(),
        )

    def _following(self, updated: bool) -> Boundary:
        """The step under way, as it will be when the iteration has ended: the counters follow later."""
        before, samples = self.boundary, self._samples()
        scheduler = before.scheduler
        if scheduler is not None and updated:
            scheduler = scheduler | {"num_steps": scheduler["num_steps"] + samples}
        return Boundary(
            before.step + 1, before.consumed + samples, before.skipped, scheduler, self._scaler(), self.counted()
        )

    def _samples(self) -> int:
        """Samples of one iteration, as `train_step` counts them for the scheduler."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        args = self._args
        ranks = int(args.data_parallel_size) * int(getattr(args, "gtp_weight_remat_size", 1) or 1)
        return int(get_num_microbatches()) * int(args.micro_batch_size) * ranks

    def _scaler(self) -> dict[str, Any] | None:
        scaler = getattr(only(self._optimizer), "grad_scaler", None)
        return dict(scaler.state_dict()) if scaler is not None else None


def _nothing() -> None:
    """The default of `on_settled`."""


def only(optimizer: Any) -> Any:
    """The one real optimizer in Megatron's chain, or the one that is not a chain."""
    chain = [one for one in getattr(optimizer, "chained_optimizers", [optimizer]) if not is_stub(one)]
    return chain[0] if chain else optimizer


def is_stub(optimizer: Any) -> bool:
    """Whether it is Megatron's placeholder on a rank without parameters."""
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def inner_of(optimizer: Any) -> Any:
    """torch's optimizer inside, or None where this rank trains nothing."""
    one = only(optimizer)
    return None if is_stub(one) else one.optimizer


def adam_step(inner: Any) -> int | None:
    """How many updates the inner optimizer has made; None when that cannot be read without waiting for a device."""
    if inner is None:
        return None
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
