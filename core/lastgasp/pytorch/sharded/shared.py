"""Which parts of parameters more ranks may hold than this one, and what this one holds of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from lastgasp.pytorch.sharded.table import Entry
from lastgasp.pytorch.statedigest import digest


class Kind(IntEnum):
    """Why several ranks may hold a part: all hold all of the parameter; their mesh replicates it; they have it on
    meshes of their own.
    """

    WHOLE = 0
    REPLICATED = 1
    APART = 2


@dataclass(frozen=True)
class Shared:
    """Parts of one kind.

    Attributes:
        key: the same on ranks that have the same parts; begins with the kind.
        digest: of their values.
        names: of the parameters that are trained, or of all if none is known to be.
    """

    kind: Kind
    key: bytes
    digest: bytes
    names: list[str]


def shared_parts(held: Iterable[tuple[Entry, Tensor]], world_size: int) -> list[Shared]:
    """Those among the parameters of a rank, by their meshes.

    Args:
        held: each parameter as the model has it.
    """
    by: dict[tuple[object, ...], list[tuple[Entry, Tensor]]] = {}
    for entry, tensor in held:
        if (of := _kind(entry, tensor, world_size)) is not None:
            by.setdefault(of, []).append((entry, tensor))
    found = []
    for (kind, *_), pairs in by.items():
        assert isinstance(kind, Kind)
        names = [str(e.path[-1]) for e, tensor in pairs if tensor.requires_grad]
        names = names or [str(e.path[-1]) for e, _ in pairs]  # parts of FSDP1's do not say it
        pairs.sort(key=lambda pair: pair[0].name)
        places = repr([(e.name, e.offsets, e.sizes) for e, _ in pairs] if kind is not Kind.WHOLE else "")
        key = bytes([kind]) + xxhash.xxh3_128_digest(places.encode())
        found.append(Shared(kind, key, digest(tensor for _, tensor in pairs), names))
    return found


def _kind(entry: Entry, tensor: Tensor, world_size: int) -> tuple[object, ...] | None:
    """With what tells apart parts that other ranks may hold of each; None where no other rank holds it."""
    if entry.plain:
        return (Kind.WHOLE,)
    if not isinstance(tensor, DTensor) or 0 in entry.sizes:
        return None
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.size() < world_size:
        return Kind.APART, tuple(mesh.shape), placements
    if any(p.is_replicate() and mesh.size(i) > 1 for i, p in enumerate(placements)):
        return Kind.REPLICATED, tuple(mesh.shape), placements
    return None
