"""Hooks that a training function registers on a model or an optimizer that is made outside: each call adds its own.

The second call registers once more what the first one has left there, so that noise is added twice, or a gradient
scaled twice. What the first call has registered goes then. A hook of a model that is made once, in the first call, is
not registered again (`spectral_norm`), and stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lastgasp.errors import UsageError

_HOOKS = (
    *(name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict)),
    "_backward_hooks", "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
)  # fmt: skip
"""Attributes of modules, parameters and optimizers."""


def next_hook() -> int:
    """The number that the next hook of this process gets; they are counted through."""
    return RemovableHandle.next_id


class KeptHooks:
    """Which hooks these objects have when a training function opens its session; does not keep them alive.

    Args:
        since: the number of the first hook that the function could have registered.
    """

    def __init__(self, owners: Iterable[Any], since: int) -> None:
        self._since, self._called = since, next_hook()
        self._owners = [weakref.ref(one) for one in owners]
        self._opened = next_hook()

    def call(self) -> None:
        """The function is about to be called again."""
        self._called = next_hook()

    def enter(self) -> bool:
        """It has opened its session. Returns whether hooks were registered in between, and are there besides others.

        Raises:
            UsageError: not those that were registered in the call before, or not all of them.
        """
        late = False
        for reference in self._owners:
            owner = reference()
            for hooks in (getattr(owner, name, None) for name in _HOOKS):
                if isinstance(hooks, dict):
                    late = self._look_at(type(owner).__name__, hooks) or late
        self._opened = next_hook()
        return late

    def _look_at(self, owner: str, hooks: dict[Any, Any]) -> bool:
        numbers = [number for number in hooks if isinstance(number, int) and number >= self._since]
        before = [number for number in numbers if number < self._opened]
        now = [number for number in numbers if number >= self._called]
        if before and now:
            if len(before) != len(now):
                raise UsageError(f"a {owner} that is made outside of the function has {len(before)} hooks of the call "
                                 f"before and {len(now)} of this one: which count twice is not known")  # fmt: skip
            for number in before:
                del hooks[number]
        return any(self._opened <= number < self._called for number in numbers)
