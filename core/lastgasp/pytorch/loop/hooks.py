"""Follow the forward passes of a model, compiled or not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
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
