"""What objects keep beside what checkpoints hold: numbers, tensors that are no buffers, buffers that do not persist.

A new process has those of the script. Where training has changed them a resumed run differs, and that is said.
"""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lastgasp.pytorch.extrastate import has_extra_state
from lastgasp.pytorch.uservalues import Root, is_users

_NAMED = 4
"""Values that are named."""
_BYTES = 16 << 20
"""Larger tensors are not looked at."""
_CONTAINERS = (list, dict, set, collections.deque)


class Unsaved:
    """Those of one module and all below it, and of other objects, and how they were when this was made.

    Of containers the length counts. Plain values count in objects of the user's own classes alone, and in modules
    where `get_extra_state` saves none.

    Args:
        module: its buffers count.
        roots: whose plain values count; those of the modules in `module` if it is None.
        saved: what checkpoints hold besides weights, for people.
    """

    def __init__(self, module: nn.Module, roots: Iterable[Root] | None = None, saved: str = "get_extra_state") -> None:
        self._module, self._roots, self._saved = module, None if roots is None else list(roots), saved
        self._before = dict(self._values())

    def note(self) -> str:
        """What to note on a checkpoint; empty where nothing has changed. Any thread may ask; never raises."""
        try:
            changed = [name for name, value in self._values() if self._before.get(name) not in (None, value)]
        except Exception:  # the user's objects, which training may be changing at this moment
            return ""
        if not changed:
            return ""
        what = "modules" if self._roots is None else "objects"
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        return (f"training has changed what {what} keep beside their state: {', '.join(changed[:_NAMED])}{more}. No "
                "checkpoint holds it, so a process that begins anew has the script's. Persistent buffers are saved, "
                f"and so is what {self._saved} returns")  # fmt: skip

    def _values(self) -> Iterator[tuple[str, bytes]]:
        for place, one in self._module.named_modules():
            yield from _known(place, {name: one._buffers.get(name) for name in one._non_persistent_buffers_set})
        for root in users_parts(self._module) if self._roots is None else self._roots:
            if is_users(type(root.value)):
                held = getattr(root.value, "__dict__", {})
                yield from _known(root.name, {name: value for name, value in held.items() if name not in root.skip})


def users_parts(module: nn.Module) -> list[Root]:
    """Modules of the user's classes in it that save none of their plain values."""
    found = [(name, one) for name, one in module.named_modules() if is_users(type(one))]
    return [Root(name, one, _of_torch()) for name, one in found if not has_extra_state(one)]


def _known(place: str, held: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    for name, value in held.items():
        try:
            found = _digest(value)
        except Exception:  # of a tensor of the user's own kind
            continue
        if found is not None:
            yield f"{place}.{name}" if place else name, found


@functools.cache
def _of_torch() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


def _digest(value: Any) -> bytes | None:
    """None where it is not looked at."""
    if isinstance(value, bool | int | float):
        return repr(value).encode()
    if isinstance(value, _CONTAINERS):
        return b"%d" % len(value)
    if isinstance(value, Tensor):
        plain = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized
        if not plain or value.numel() * value.element_size() > _BYTES:
            return None
        value = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray) and value.nbytes <= _BYTES and not value.dtype.hasobject:
        return hashlib.blake2b(value.tobytes(), digest_size=16).digest()
    return None
