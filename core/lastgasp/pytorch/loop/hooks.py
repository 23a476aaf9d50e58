"""Follow the forward passes of a model, compiled or not."""

from __future__ import annotations

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

    def first(module: Any, *_: object) -> None:
        if not torch.compiler.is_compiling():
            before(module)

    def last(module: Any, *_: object) -> None:
        if not torch.compiler.is_compiling():
            after(module)

    handles = [module.register_forward_pre_hook(first), module.register_forward_hook(last, always_call=True)]

    def undo() -> None:
        while handles:
            handles.pop().remove()

    return undo


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
