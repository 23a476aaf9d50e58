"""Digests of parameters and optimizer states, to find out whether two ranks hold the same.

Host memory is hashed where it lies (xxh3, about 10 GB/s). On an accelerator each tensor is folded to eight bytes by
arithmetic on the device, so that no parameter is copied to the host; ranks on devices of two kinds never agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOSS = "prev_loss"
_CHUNK = 1 << 21
"""Elements that are folded at once: 16 MB of temporary device memory for each of a few operations."""
# SplitMix64, as signed numbers.
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def digests_of(models: Mapping[str, nn.Module], optimizers: Mapping[str, Any]) -> dict[str, bytes]:
    """Name -> digest: of the parameters of each model, and of what each optimizer holds besides those.

    Module buffers are left out: replicas may have their own. All device work is done when this returns.
    """
    known = {id(p) for model in models.values() for p in model.parameters()}
    found = {name: digest(model.parameters()) for name, model in models.items()}
    return found | {name: digest(held(optimizer, known)) for name, optimizer in optimizers.items()}


def state_digest(optimizers: Iterable[Any]) -> bytes:
    """Digest of the tensors that optimizers hold besides parameters, and for which of them.

    Numbers may be a rank's own where its tensors are not: LBFGS keeps the loss of its last batch.
    """
    return digest(_states(optimizers))


def _states(optimizers: Iterable[Any]) -> Iterator[Any]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if state := optimizer.state.get(parameter):
                    yield index
                    yield from (leaf for leaf in leaves(state) if isinstance(leaf, Tensor | str))


def held(optimizer: Any, known: set[int]) -> Iterator[Any]:
    """The parameters of a torch optimizer, but those whose `id` is in `known`, and the state of each, in order.

    But LBFGS's loss of its last batch, which is a rank's own where it has returned to its own step, and which the next
    step does not use.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                yield parameter
            state = optimizer.state.get(parameter, {})
            yield from leaves({**state, _LOSS: None} if _LOSS in state else state)


def leaves(value: Any) -> Iterator[Any]:
    """Tensors, plain values and keys of nested mappings and lists, in order; of other objects their type's name."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key)
            yield from leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, Tensor | int | float | str | None):
        yield value
    else:
        yield type(value).__name__


def digest(values: Iterable[Any]) -> bytes:
    """16 bytes that depend on every bit, shape, type and the order of `values`: tensors and plain values."""
    hasher = xxhash.xxh3_128()
    for value in values:
        if not isinstance(value, Tensor):
            hasher.update(repr(value).encode())
        elif isinstance(value, nn.UninitializedParameter):
            hasher.update(b"uninitialized")
        else:
            _add(hasher, value.detach())
    return hasher.digest()


def _add(hasher: xxhash.xxh3_128, tensor: Tensor) -> None:
    tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    hasher.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}".encode())
    if tensor.device.type == "meta" or not tensor.numel():
        return
    if hasattr(tensor, "__tensor_flatten__"):  # its memory is that of other tensors, as of torchao's quantized ones
        for name in tensor.__tensor_flatten__()[0]:
            _add(hasher, getattr(tensor, name))
        return
    if tensor.layout is not torch.strided or tensor.is_quantized:
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor.int_repr()
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # a single element may have any stride
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    if flat.device.type == "cpu":
        data: Any = flat.view(torch.uint8).numpy()
        hasher.update(data)
    else:
        hasher.update(folded(flat).to_bytes(8, "little", signed=True))


def folded(flat: Tensor) -> int:
    """Eight bytes that depend on each bit and its place; for one-dimensional tensors on any device."""
    bits = flat.view(_INTEGER[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        part += torch.arange(start + 1, start + 1 + part.numel(), device=flat.device) * _GOLDEN
        total += _mixed(part).sum()
    return int(total.item())


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64 of each element, in place. Torch shifts with the sign, so what it brings in is masked away."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= factor
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x
