"""Follow the forward passes of a model, compiled or not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lastgasp.adapter.hooks import replace_attribute

_Event = Callable[[Any], None]


def follow_forward(module: Any, before: _Event, after: _Event) -> Callable[[], None]:
    """Call `before(module)` and `after(module)` around each forward pass, even one that raises.

    Not from inside a compiled graph: hooks of a compiled model are traced into it, and these would break the graph.
    The outermost call of a model returned by `torch.compile` is followed nevertheless.

    Returns:
        A function that removes the hooks; idempotent.
    """
    if hasattr(module, "_orig_mod"):
        return _around_compiled(module, before, after)

    first, last = _Hook(before), _Hook(after)
    handles = [module.register_forward_pre_hook(first), module.register_forward_hook(last, always_call=True)]

    def undo() -> None:
        first.event = last.event = None  # also for copies
        while handles:
            handles.pop().remove()

    return undo


@contextlib.contextmanager
def hidden(models: Iterable[Any]) -> Iterator[None]:
    """While a model is saved as a whole: without lastgasp's hooks, for `torch.load(weights_only=True)` refuses them.

    For the thread that runs the models. Users' hooks stay, in their order.
    """
    put_back = list[tuple[dict[str, Any], str, Any]]()
    try:
        for module in (one for model in models for one in model.modules()):
            ours = {key for name in _HOOKS for key, hook in vars(module).get(name, {}).items() if _is_ours(hook)}
            for name in (*_HOOKS, *_OF_HOOKS) if ours else ():
                hooks = vars(module).get(name)
                if hooks:
                    put_back.append((vars(module), name, hooks))
                    vars(module)[name] = type(hooks)((key, hooks[key]) for key in hooks if key not in ours)
        yield
    finally:
        for attributes, name, hooks in put_back:
            attributes[name] = hooks


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OF_HOOKS = ("_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # of a partial
    return str(getattr(hook, "__module__", "")).startswith("lastgasp.")


class _Hook:
    """Copies of the module have the same one: their passes are progress as well. Pickled ones do nothing."""

    def __init__(self, event: _Event) -> None:
        self.event: _Event | None = event

    def __call__(self, module: Any, *_: object) -> None:
        if self.event is not None and not torch.compiler.is_compiling():
            self.event(module)

    def __deepcopy__(self, memo: object) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Something of Python's own that takes anything and returns None: who loads it may not have lastgasp.
        return getattr, (contextlib.nullcontext(), "__exit__")


def _around_compiled(module: Any, before: _Event, after: _Event) -> Callable[[], None]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            before(module)
            try:
                return original(*args, **kwargs)
            finally:
                after(module)

        return forward

    return replace_attribute(module, "forward", make)
