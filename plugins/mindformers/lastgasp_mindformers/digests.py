"""Digests of what all replicas have in common: parameters and the optimizer's state, read without a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

from lastgasp_mindformers.aux_state import RESET


def digests_of(train_network: Any, own: Iterable[str]) -> dict[str, bytes]:
    """Name of a part -> digest of all bits, shapes, types and names in it.

    Args:
        train_network: MindSpore's, or what looks like it (`parameters_and_names`).
        own: names of parameters that may differ from rank to rank, such as statistics of batch norm.
    """
    left_out = frozenset(own)
    named = {param.name: param for _, param in train_network.parameters_and_names()}
    hashers = {name: xxhash.xxh3_128() for name in ("parameters", "optimizer")}
    for name, param in sorted(named.items()):
        if name not in left_out and not name.startswith(RESET):
            hasher = hashers["parameters" if param.requires_grad else "optimizer"]
            hasher.update(f"{name} {param.dtype} {tuple(param.shape)}".encode())
            hasher.update(bytes_of(param))
    return {name: hasher.digest() for name, hasher in hashers.items()}


def unknown_yet() -> dict[str, bytes]:
    """A constant: the first step makes all ranks equal."""
    return {"state of before the first step": b""}


def bytes_of(param: Any) -> Any:
    """The values, without a copy if numpy knows their type."""
    try:
        array = param.asnumpy()
    except (TypeError, ValueError, RuntimeError):
        return param.get_bytes()
    contiguous = array if array.flags.c_contiguous else array.copy()
    return contiguous.reshape(-1).view("uint8")
