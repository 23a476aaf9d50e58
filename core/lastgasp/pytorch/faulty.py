"""Faults inside the model, the optimizer and `torch.save`, placed by tests of every adapter of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from lastgasp.adapter.hooks import replace_attribute
from lastgasp.pytorch.zero import is_flat
from lastgasp.testing.archive import FaultyArchive
from lastgasp.testing.faults import FaultKit

Closure = Callable[[], Any]
Step = Callable[..., Any]
Fire = Callable[[str], None]
"""Performs the faults that are due in the phase of that name."""
_COUNTED = "_wrapped_by_lr_sched"
"""What a scheduler of torch sets on the optimizer's `step` that it has wrapped; it warns where that is gone."""


def replace(undo: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Set `owner.name` to `wrap(owner.name)` on this object alone, and push the way back."""
    undo.callback(replace_attribute(owner, name, wrap))


def _nothing(phase: str) -> None:
    """No fault is due."""


class _InForward:
    """A forward hook. Where the module itself is saved (hyperparameters with a network in them), it comes back idle."""

    def __init__(self, fire: Fire, sharded: bool) -> None:
        self._fire, self._sharded = fire, sharded

    def __call__(self, inner: torch.nn.Module, inputs: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        if inner.training:
            self._fire("forward")
        if self._sharded and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda grad: self._fire("backward"))  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _InForward, (_nothing, False)


def hook_model(
    undo: ExitStack, module: torch.nn.Module, fire: Fire, graph: tuple[Any, str] | None = None
) -> None:
    """Fire `forward` in the module, and `backward` at the parameter, in the middle of the model.

    Parameters of `fully_shard`, of FSDP1 and of DeepSpeed's engine get no gradient of their own in the backward pass:
    there it is the module's output. Where that module is compiled with others it is after all of them, since hooks
    inside would be traced into the graph; what is compiled later than this is left alone.

    Args:
        module: the model, with what it is wrapped in.
        graph: the object and its method that run the compiled graph, where the framework compiles another one than a
            module.
    """
    sharded = is_flat(module) or any(hasattr(p, "device_mesh") or hasattr(p, "ds_id") for p in module.parameters())
    in_forward = _InForward(fire, sharded)
    inner = [name for name, m in module.named_modules() if any(True for _ in m.parameters(recurse=False))]
    middle = inner[len(inner) // 2]
    compiled = graph or _compiled_around(module, middle)
    if compiled is None:
        undo.callback(module.get_submodule(middle).register_forward_hook(in_forward).remove)
    else:
        replace(undo, *compiled, partial(_followed, partial(in_forward, module.get_submodule(middle))))
    trained = [p for p in module.parameters() if p.requires_grad]
    handle = trained[len(trained) // 2].register_hook(lambda grad: fire("backward"))  # type: ignore[no-untyped-call]
    undo.callback(handle.remove)


def _compiled_around(module: torch.nn.Module, name: str) -> tuple[Any, str] | None:
    """The outermost compiled module in which the one of that name is, and the attribute that runs its graph."""
    path = name.split(".")
    for one in (module.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)):
        if hasattr(one, "_orig_mod"):
            return one, "forward"
        if one._compiled_call_impl is not None:  # module.compile()
            return one, "_compiled_call_impl"
    return None


def _followed(after: Callable[[object, object], None], run: Step) -> Step:
    def followed(*args: Any, **options: Any) -> Any:
        output = run(*args, **options)
        after(args, output)
        return output

    return followed


def hook_optimizer(undo: ExitStack, optimizer: Optimizer, kit: FaultKit, step_now: Callable[[], int]) -> None:
    """Fire `before_update`, `update` when half of the parameters have changed, `after_update` when the optimizer has
    returned.

    The first one after the backward pass: where a loop clips its gradients or looks for NaN.

    Args:
        step_now: returns the step under way, in completed updates.
    """

    def wrap(step: Step) -> Step:
        def faulty_step(closure: Closure | None = None, **options: Any) -> Any:
            now = step_now()
            fire = partial(kit.fire_at, step=now)
            closure = _firing(closure, fire)
            if kit.due("update", now):
                result = _half_step(optimizer, step, fire, closure, options)
            else:
                result = step(**options) if closure is None else step(closure, **options)  # it may take none
            fire("after_update")
            return result

        def function(self: Optimizer, *args: Any, **options: Any) -> Any:
            return faulty_step(*args, **options)

        if hasattr(step, _COUNTED):
            setattr(function, _COUNTED, True)
        return MethodType(function, optimizer)  # bound: schedulers that are made later take its function from it

    replace(undo, optimizer, "step", wrap)


def _firing(closure: Closure | None, fire: Fire) -> Closure | None:
    """Fire `before_update`, at the end of the closure where there is one."""
    if closure is None:
        fire("before_update")
        return None

    def inner() -> Any:
        result = closure()
        fire("before_update")
        return result

    return inner


def _half_step(
    optimizer: Optimizer, step: Step, fire: Fire, closure: Closure | None, options: Mapping[str, Any]
) -> Any:
    """The step, with the fault after the first half of its parameters.

    The first half is updated by the optimizer's bare function: its hooks report to others that the update is
    complete, and it is not.
    """
    bare = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    with ExitStack() as hidden:
        done: list[bool] = []

        def half(*_: object) -> None:
            if done:  # the bare function may call one that has hooks, too
                return
            done.append(True)
            first, second = _halves(optimizer)
            with _without_gradient(second):
                bare(optimizer)
            fire("update")
            hidden.enter_context(_without_gradient(first))

        def closure_and_half() -> Any:
            loss = closure() if closure is not None else None
            half()
            return loss

        if len(signature(bare).parameters) > 1:
            return step(closure_and_half, **options)
        hidden.callback(optimizer.register_step_pre_hook(half).remove)  # behind those of others
        return step(**options)


def _halves(optimizer: Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    moving = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    middle = (len(moving) + 1) // 2
    return moving[:middle], moving[middle:]


@contextmanager
def _without_gradient(params: list[torch.Tensor]) -> Iterator[None]:
    """Optimizers leave a parameter without a gradient alone."""
    gradients = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient


@contextmanager
def at_first_bytes(fire: Callable[[], None]) -> Iterator[None]:
    """Call `fire` once the pickle and the first tensor of a `torch.save` have been written."""

    def faulty(save: Step) -> Step:
        def save_to(obj: object, archive: object, *more: Any, **options: Any) -> Any:
            return save(obj, FaultyArchive(archive, fire), *more, **options)

        return save_to

    with ExitStack() as undo:
        replace(undo, torch.serialization, "_save", faulty)
        yield
