"""Modules that a user's objects hold outside of the module tree (averaged weights, teachers, metrics): do they change?

Nothing waits for a device, and of large tensors little is read: this is asked at saves.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lastgasp.pytorch.uservalues import kinds

_DEEP = 3
"""Containers and objects of the user's in one another."""
_ENTRIES = 64
"""Of each that are looked at."""
_WHOLE = 64 << 10
"""Bytes up to which a tensor is read; of a larger one so many numbers:"""
_SAMPLED = 1024
_BYTES = 16 << 20
"""That are read in one look, and what a tensor counts for at least."""
_LEAST = 8 << 10


class HeldModules:
    """One look at them.

    Args:
        tree: what it has is saved, whoever else holds it (a wrapper, a reference).
    """

    def __init__(self, tree: nn.Module) -> None:
        self._known = {id(one) for one in (*tree.modules(), *tree.parameters(), *tree.buffers())}
        self._left = _BYTES

    def digest(self, value: Any) -> bytes | None:
        """Of the modules in a value; None where there are none, or none that has numbers."""
        found = [one for module in self._modules(value, _DEEP) for part in module.modules() for one in self._of(part)]
        return hashlib.blake2b(b";".join(found), digest_size=16).digest() if found else None

    def _modules(self, value: Any, deep: int) -> Iterator[nn.Module]:
        if isinstance(value, nn.Module):
            yield value
            return
        if not deep:
            return
        if isinstance(value, dict):
            inner: Any = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        elif kinds.kind_of(type(value)) is kinds.OBJECT and not hasattr(value, "state_dict"):  # it may be saved by that
            inner = getattr(value, "__dict__", {}).values()
        else:
            return
        for one in itertools.islice(inner, _ENTRIES):
            yield from self._modules(one, deep - 1)

    def _of(self, module: nn.Module) -> Iterator[bytes]:
        own = vars(module)
        if id(module) in self._known:
            return
        if "_update_count" in own and isinstance(states := own.get("_defaults"), dict):  # of torchmetrics
            yield b"%d" % own["_update_count"]
            held = [own.get(name) for name in states] if own["_update_count"] else []
            yield from (b"%d" % len(one) for one in held if isinstance(one, list))
            tensors = [one for one in held if isinstance(one, Tensor)]
        else:
            tensors = [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]
        yield from (self._numbers(one) for one in tensors if id(one) not in self._known)

    def _numbers(self, value: Tensor) -> bytes:
        """Of what is not read as a whole, torch's count of changes as well; it lacks those of `.data`."""
        version = b"" if value.is_inference() else b"%d" % value._version
        plain = value.device.type == "cpu" and value.layout is torch.strided and value.is_contiguous()
        if not plain or self._left <= 0 or type(value) not in (Tensor, nn.Parameter, nn.Buffer) or value.is_quantized:
            return version
        flat, whole = value.detach().reshape(-1), value.nbytes <= _WHOLE
        read = flat if whole else flat[:: value.numel() // _SAMPLED].contiguous()
        self._left -= max(read.nbytes, _LEAST)
        found = hashlib.blake2b(read.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
        return found if whole else found + version
