"""A process that takes the place of a rank runs its script alone until it comes to the training.

The others are behind that part long ago, and wait in the training. A barrier in it (`main_process_first`) would wait
for them, and each of them for the new process; all that a barrier is there for, they have done before. What else is
exchanged with them there cannot be had any more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lastgasp.adapter import ControlError

_BARRIERS = ("barrier", "monitored_barrier")
_EXCHANGES = (
    "all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "all_gather", "all_gather_into_tensor",
    "all_gather_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single", "send", "recv", "broadcast_object_list", "all_gather_object", "gather_object",
    "scatter_object_list", "send_object_list", "recv_object_list",
)  # fmt: skip
_undo = ExitStack()


def run_script_alone(waited_for: Callable[[], bool]) -> None:
    """In a process that takes the place of a rank, before its script begins: what that imports by name is ours, too.

    Args:
        waited_for: whether the others still wait for this process in the training.
    """
    for names, instead in ((_BARRIERS, _passed), (_EXCHANGES, _refused)):
        for name in names:
            original = getattr(distributed_c10d, name, None)
            if original is not None:
                replace_until_training(name, original, _alone(original, instead, waited_for))


def around_exchanges(
    replace: Callable[[Any, str, Callable[..., Any]], object], told: Callable[[str], object]
) -> None:
    """Have `told` be called with the name of whatever is to be exchanged with other ranks, before it is."""

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        told(original.__name__)
        return original(*args, **kwargs)

    for name in (*_BARRIERS, *_EXCHANGES):
        for module in (distributed_c10d, dist):
            if hasattr(module, name):
                replace(module, name, around)


def comes_to_training() -> None:
    """From here on all ranks take part again. Idempotent."""
    _undo.close()


def replace_until_training(name: str, original: Any, instead: Any) -> None:
    """Have a function of torch.distributed be another one until `comes_to_training`."""
    for module in (distributed_c10d, dist):
        if getattr(module, name, None) is original:
            setattr(module, name, instead)
            _undo.callback(_put_back, module, name, instead, original)


def _put_back(module: Any, name: str, instead: Any, original: Any) -> None:
    """Unless somebody has put a function of their own around it meanwhile."""
    if getattr(module, name, None) is instead:
        setattr(module, name, original)


def _alone(
    original: Callable[..., Any], instead: Callable[[str, bool], Any], waited_for: Callable[[], bool]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if waited_for():
            return instead(original.__name__, bool(kwargs.get("async_op")))
        return original(*args, **kwargs)

    return call


def _passed(name: str, async_op: bool) -> Any:
    return _Passed() if async_op else None


def _refused(name: str, async_op: bool) -> Any:
    raise ControlError(
        f"torch.distributed.{name} was called before the training, in a process that takes the place of a rank: "
        "the other ranks have passed that point, and wait in the training. The job restarts. Move the call into "
        "the training, or set recovery='restart'"
    )


class _Passed:
    """Of a barrier that nobody is waited for in."""

    def wait(self, timeout: Any = None) -> bool:
        """It is over."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True
