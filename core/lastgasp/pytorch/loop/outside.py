"""What trains in a loop without being in its `TorchState`, or without being the same on all ranks: it is reported.

Scripts make a new optimizer in the middle of training, forget one of two, or unfreeze layers that DDP has not been told
of. Checkpoints would lack it, or hold one rank's, and nobody would know.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lastgasp.errors import ConfigError, ControlError, DeadlineExceeded
from lastgasp.pytorch.loop.optimizer_update import OptimizerUpdate, is_initializing
from lastgasp.pytorch.loop.parts import ddp_of, under_join
from lastgasp.pytorch.loop.state import TorchState
from lastgasp.pytorch.statedigest import digest, state_digest
from lastgasp.pytorch.zero import inside
from lastgasp.replicas import Gather, require_same_names

log = logging.getLogger("lastgasp")

_STEPS = 3
"""Steps in which an optimizer of other parameters is seen, before it counts as a part of the training."""
_QUIET, _APART, _CHANGES = 100, 20, 5
"""Batches without an update before parameters are looked at, batches between two looks, and changes in a row."""
_TENSORS, _VALUES = 8, 64
"""How many parameters are looked at, and about how many values of each."""


@dataclass
class _Seen:
    """An optimizer that is not in the TorchState."""

    ours: bool
    """It trains parameters of the TorchState's models."""
    steps: set[int] = field(default_factory=set)
    reported: bool = False


class OtherOptimizers:
    """Follows optimizers that are not in the `TorchState`; an update by one of them makes a step like any other.

    Args:
        state: the user's.
        update: of the loop; told of updates of the state's parameters.
        step: completed steps.
        note: reports what people must know (`Session.note`).
    """

    def __init__(
        self, state: TorchState, update: OptimizerUpdate, step: Callable[[], int], note: Callable[[str], object]
    ) -> None:
        self._state, self._update, self._step, self._note = state, update, step, note
        known = [(one, inside(getattr(one, "inner", one))) for one in state.optimizers.values()]
        self._known = {id(optimizer) for pair in known for optimizer in pair}  # DeepSpeed's engine has one inside
        self._seen: WeakKeyDictionary[Any, _Seen] = WeakKeyDictionary()
        self._new = list[tuple[Any, _Seen]]()
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        ]  # fmt: skip

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def step_over(self) -> None:
        """A step is complete. What is new is reported now: a `state_dict` of the user's may change or raise anything
        in the middle of an update."""
        while self._new:
            self._report(*self._new.pop(0))

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(optimizer) not in self._known and self._look(optimizer).ours:
            self._update.before_step(optimizer, args, kwargs)

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(optimizer) in self._known or is_initializing():
            return
        seen = self._look(optimizer)
        if seen.ours:
            self._update.after_step(optimizer, args, kwargs)
        if seen.reported:
            return
        seen.steps.add(self._step())
        if seen.ours or len(seen.steps) == _STEPS:
            seen.reported = True
            self._new.append((optimizer, seen))

    def _look(self, optimizer: Any) -> _Seen:
        found = self._seen.get(optimizer)
        if found is None:
            own = {id(p) for p in self._state.container.parameters()}
            found = self._seen[optimizer] = _Seen(any(id(p) in own for p in _parameters(optimizer)))
        return found

    def _report(self, optimizer: Any, seen: _Seen) -> None:
        name = type(optimizer).__name__
        if not seen.ours:
            self._note(f"an optimizer ({name}) trains parameters that are in no model of TorchState: no checkpoint "
                       "holds them, and a resumed run trains them from scratch. Give TorchState all models and "
                       "optimizers")  # fmt: skip
        elif not self._held(optimizer):
            self._note(f"an optimizer ({name}) that is not in TorchState trains its model: no checkpoint holds its "
                       "state, and a resumed run differs. Give TorchState all optimizers, before the session is "
                       "opened")  # fmt: skip

    def _held(self, optimizer: Any) -> bool:
        """Whether it has no state, or what is saved holds it: a known optimizer may be wrapped around it."""
        own = {id(t) for t in _tensors(list(optimizer.state.values()))}
        try:
            return own <= {id(t) for t in _tensors(list(self._saved()))} if own else True
        except Exception:  # of the user's own kind
            return False

    def _saved(self) -> Iterator[Any]:
        """Of a sharded model the states themselves: no `state_dict` of its optimizers is called."""
        sharded = self._state.sharded
        for optimizer in map(inside, self._state.optimizers.values()):
            yield list(optimizer.state.values()) if sharded else optimizer.state_dict()
        yield from (one.state_dict() for one in self._state.schedulers.values())
        yield from (item if isinstance(item, dict) else item.state_dict() for item in self._state.extra.values())


def require_held(state: TorchState) -> None:
    """Refuse optimizers that train what no checkpoint would hold: learned weights of losses, centers, temperatures.

    Raises:
        ConfigError: names how many tensors.
    """
    if state.engine is not None or state.partitioned:  # those have parts of parameters
        return
    own = {id(p) for p in state.container.parameters()}
    outside = [p for one in state.optimizers.values() for p in _parameters(one) if id(p) not in own]
    if outside:
        saved = {id(t) for t in _tensors([one.state_dict() for one in state.optimizers.values()])}  # master weights
        outside = [p for p in outside if id(p) not in saved]
    if outside:
        shapes = ", ".join(str(list(p.shape)) for p in outside[:3])
        raise ConfigError(
            "optimizer",
            f"trains {len(outside)} tensors that are in no model of TorchState (of shapes {shapes})",
            "parameters of the models",
            "No checkpoint would hold them: give TorchState(model={...}) the modules that they belong to; single ones "
            "go into an nn.ParameterList.",
        )


def require_same(state: TorchState, gather: Gather) -> None:
    """Refuse ranks of different models under one name, as stages of a pipeline are. All ranks call it together.

    Where parameters are sharded `TorchState.groups` does.

    Args:
        gather: as `Session.gather`.

    Raises:
        ConfigError: names or shapes differ.
    """
    if state.sharded:
        return
    own = repr([(name, tuple(p.shape)) for name, p in state.container.named_parameters() if not is_lazy(p)])
    try:
        found = gather("loop/names", xxhash.xxh3_128_digest(own.encode()))
    except (ControlError, DeadlineExceeded) as error:  # a rank has just died, mostly
        log.debug("the ranks could not compare the names of their parameters: %s", error)
        return
    require_same_names(found)


_LOOKS = 2
"""Ends of steps at which parameters that are trained later are compared: at the first their update may be to come."""


class ReplicaWatch:
    """Has ranks compare once more what they hold, where training may have made replicas differ.

    Optimizers make their state in the first update, and some keep that of a parameter on one rank only (Muon as it was
    published). Parameters that were frozen when DDP was made are trained later, and DDP does not average their
    gradients.

    Args:
        models: those that are trained; of others than DDP's nothing is known.
        optimizers: followed until one has made an update, in the same step on all ranks; of sharded models none. One
            that makes its first update later may do so on one rank alone, and is not waited for.
        compare: have all ranks compare what they hold, or what the given function says of it, and return whether it is
            the same; all of them call it at the end of the same step.
        note: reports what people must know (`Session.note`).
        uneven: ranks may come to different numbers of steps now, so that they cannot compare.
        kept_equal: models whose gradients the user's own code averages, as it says.
    """

    def __init__(
        self,
        models: Iterable[Any],
        optimizers: Iterable[Any],
        compare: Callable[..., bool],
        note: Callable[[str], object],
        uneven: Callable[[], bool] = lambda: False,
        kept_equal: Iterable[Any] = (),
    ) -> None:
        self._compare, self._note, self._uneven = compare, note, uneven
        self._kept_equal = list(kept_equal)
        self._models = [found for model in models if (found := ddp_of(model)) is not None]
        self._optimizers = list(optimizers)
        self._before, self._missing, self._looks, self._trained = b"", 0, 0, 0
        self._handles = [one.register_step_post_hook(self._first) for one in self._optimizers]
        self._updated = self._made = False

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _first(self, *_: object) -> None:
        self._updated = self._updated or not is_initializing()

    def step_over(self, frozen: bytes) -> None:
        """A step is complete.

        Args:
            frozen: which parameters are trained (`Flags.take`).
        """
        other, more = frozen != self._before, False
        if other:
            more, self._before = self._more(frozen), frozen
            self._missing = sum(map(_unreduced, self._models))
            self._looks = _LOOKS if self._missing else 0
        if self._looks:
            self._looks -= 1
            self._parameters()
        if self._updated or self._made:
            self._states()
        if other:
            self._made = more

    def _parameters(self) -> None:
        if not self._compare():
            self._looks = 0
            self._note(f"{self._missing} parameters are trained that were frozen when DDP was made, which does not "
                       "average their gradients: each rank trains a model of its own. Unfreeze them before DDP is "
                       "made")  # fmt: skip

    def _more(self, frozen: bytes) -> bool:
        """Whether parameters are trained that were not before: optimizers make a state for them."""
        trained, known = int.from_bytes(frozen, "little"), self._trained
        self._trained |= trained
        return bool(known and trained & ~known)

    def _states(self) -> None:
        self.remove()
        self._updated = self._made = False
        if self._uneven():
            return
        if self._compare(self._after_update):
            return
        if self._kept_equal:
            self._note("ranks hold other parameters or optimizer states than others once they are trained, although "
                       "replicated=True says that they are equal: no rank can save for all. Average the gradients "
                       "before optimizer.step(), or use DistributedDataParallel")  # fmt: skip
        else:
            self._note("optimizers hold on one rank what they do not hold on the others (an optimizer that divides its "
                       "work among the ranks?): no rank can save for all. Use fully_shard, or "
                       "ZeroRedundancyOptimizer, with an optimizer that knows nothing of other ranks")  # fmt: skip

    def _after_update(self) -> dict[str, bytes]:
        """Not every optimizer has a state that shows that gradients were not averaged."""
        found = {"optimizer state": state_digest(self._optimizers)}
        parameters = [p for model in self._kept_equal for p in model.parameters()]
        return found | ({"model": digest(parameters)} if parameters else {})


def watch_replicas(state: TorchState, life: Any) -> ReplicaWatch:
    """The `ReplicaWatch` of a `TorchState`, until the run (`AdapterRun`) ends."""
    optimizers, uneven = () if state.sharded else state.optimizers.values(), partial(under_join, state)
    kept_equal = state.modules.values() if state.replicated and not state.sharded else ()
    found = ReplicaWatch(state.models.values(), optimizers, life.compare_again, life.session.note, uneven, kept_equal)
    life.on_close(found.remove)
    return found


class UnseenUpdates:
    """Parameters that change without a call of `optimizer.step` in Python, as by a CUDA graph: no step is ever seen.

    A few values are compared, since a graph does not count in `_version`; more than one change in a row, since an
    evaluation may put other weights into the model once.

    Args:
        state: the user's; note: reports what people must know (`Session.note`).
    """

    def __init__(self, state: TorchState, note: Callable[[str], object]) -> None:
        self._state, self._note = state, note
        self._step, self._batches, self._changes = -1, 0, 0
        self._values: list[Tensor] = []

    def no_update(self, step: int) -> None:
        """A batch was used without an update; `step`: completed ones."""
        if step != self._step:
            self._step, self._batches, self._changes, self._values = step, 0, 0, []
        self._batches += 1
        if self._batches >= _QUIET and not self._batches % _APART and self._changes < _CHANGES:
            with contextlib.suppress(RuntimeError):  # a device was changed; one cannot be read
                self._look()

    def _look(self) -> None:
        before = self._values
        self._values = [] if self._state.sharded else some_values(self._state.optimizers.values())
        if len(before) != len(self._values):
            return
        same = all(map(torch.equal, before, self._values))
        self._changes = 0 if same else self._changes + 1
        if self._changes == _CHANGES:
            self._note("parameters change, and no optimizer of the TorchState makes an update (a CUDA graph of the "
                       "whole step?): no step is counted or saved from here on. Call s.updating() before they change, "
                       "as before g.replay()")  # fmt: skip


def some_values(optimizers: Iterable[Any]) -> list[Tensor]:
    """Bytes of a few values that optimizers train, of this rank's parts where they are sharded."""
    trained = [p for one in optimizers for p in _parameters(one) if p.requires_grad]
    some = [getattr(p, "_local_tensor", p).detach() for p in trained[:: max(1, len(trained) // _TENSORS)]]
    flat = [one.view(-1) for one in some if type(one) is Tensor and one.is_contiguous()]
    return [_bytes_of(one[:: max(1, one.numel() // _VALUES)]) for one in flat]


def _bytes_of(values: Tensor) -> Tensor:
    """A copy; compared as numbers, NaN would differ from itself."""
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _unreduced(model: DistributedDataParallel) -> int:
    """How many parameters are trained that DDP does not know of."""
    known = averaged_by(model)
    return 0 if known is None else max(0, sum(p.requires_grad for p in known_to(model)) - known)


def averaged_by(model: DistributedDataParallel) -> int | None:
    """How many parameters were trained when DDP was made, which averages their gradients; None where it is not said."""
    found = model._get_ddp_logging_data().get("num_parameter_tensors")  # type: ignore[no-untyped-call]
    return found if isinstance(found, int) else None


def known_to(model: DistributedDataParallel) -> list[Tensor]:
    """The parameters that DDP looks at, whether they are trained or not."""
    ignored: Iterable[str] = getattr(model, "parameters_to_ignore", ())
    return [p for name, p in model.module.named_parameters() if name not in ignored]


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
