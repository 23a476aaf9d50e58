"""The file `.metadata` of a checkpoint of `torch.distributed.checkpoint`, made from the descriptions of its files."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lastgasp.errors import CheckpointError
from lastgasp.pytorch.sharded.files import DESCRIPTION, Row

NAME = ".metadata"
_Box = tuple[tuple[int, ...], tuple[int, ...]]
_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", "")
"""torch 2.6 and 2.7 have none in their metadata."""
_MANY = 2000
"""Boxes of one tensor that are still compared pair by pair."""


def metadata(descriptions: Sequence[bytes]) -> bytes:
    """The content of `.metadata`. What several files hold is read from the first of them.

    Raises:
        CheckpointError: tensors of which a part is missing, or that are described in two ways; nothing to load from.
    """
    found = Metadata({}, {}, {}, StorageMeta(), **({"version": _VERSION} if _VERSION else {}))
    files = sorted((DESCRIPTION.decode(data) for data in descriptions), key=lambda one: one.rank)
    for one in files:
        for row in one.rows:
            _add(found, row, one.file)
    wanted = {name: None for one in files for name in one.elsewhere}
    problems = [f"{name}: no rank has written it" for name in wanted if name not in found.state_dict_metadata]
    problems += [
        f"{name}: {why}"
        for name, one in found.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata) and (why := _problem(one))
    ]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError("the shards that were saved are not the whole state: " + "; ".join(problems[:5]) + more)
    return pickle.dumps(found)


def _add(found: Metadata, row: Row, file: str) -> None:
    name = ".".join(map(str, row.path))
    known = found.state_dict_metadata.get(name)
    if not row.dtype:
        if known is not None:
            return
        found.state_dict_metadata[name], index = BytesStorageMetadata(), MetadataIndex(name)
    else:
        if known is None:
            properties = TensorProperties(dtype=getattr(torch, row.dtype))
            known = found.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(row.shape), [])
        if not isinstance(known, TensorStorageMetadata) or _differs(known, row):
            raise CheckpointError(f"{name} is another tensor in {file} ({row.dtype} {list(row.shape)}) than before")
        index = MetadataIndex(name, row.offsets, len(known.chunks))
        if index in found.storage_data:
            return
        known.chunks.append(ChunkStorageMetadata(torch.Size(row.offsets), torch.Size(row.sizes)))
    found.planner_data[name] = row.path
    found.storage_data[index] = _StorageInfo(file, row.begin, row.length)


def _differs(known: TensorStorageMetadata, row: Row) -> bool:
    return (known.size, known.properties.dtype) != (torch.Size(row.shape), getattr(torch, row.dtype))


def _problem(one: TensorStorageMetadata) -> str:
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in one.chunks]
    volume = sum(prod(sizes) for _, sizes in boxes)
    if volume < one.size.numel():
        return f"{one.size.numel() - volume} of {one.size.numel()} elements are missing"
    inside = all(o + s <= d for offsets, sizes in boxes for o, s, d in zip(offsets, sizes, one.size, strict=True))
    if volume > one.size.numel() or not inside or _overlap(boxes, tuple(one.size)):
        return "parts of it overlap"
    return ""


def _run(box: _Box, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The elements of a box, in order, if they follow one another in the whole tensor, as FSDP1's do."""
    offsets, sizes = box
    cut = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    if any(size != whole for size, whole in zip(sizes[cut + 1 :], shape[cut + 1 :], strict=True)):
        return None
    first = 0
    for offset, whole in zip(offsets, shape, strict=True):
        first = first * whole + offset
    return first, first + prod(sizes)


def _overlap(boxes: list[_Box], shape: tuple[int, ...]) -> bool:
    """Whether two boxes have an element in common."""
    runs = [_run(box, shape) for box in boxes]
    if (found := [run for run in runs if run is not None]) and len(found) == len(boxes):
        return any(first[1] > second[0] for first, second in pairwise(sorted(found)))
    cut = [dim for dim in range(len(boxes[0][0])) if len({(o[dim], s[dim]) for o, s in boxes}) > 1]
    if not cut:
        return len(boxes) > 1
    if len(cut) == 1:
        dim = cut[0]
        spans = sorted((o[dim], o[dim] + s[dim]) for o, s in boxes)
        return any(first[1] > second[0] for first, second in pairwise(spans))
    spans_by_dim = [sorted({(o[dim], o[dim] + s[dim]) for o, s in boxes}) for dim in cut]
    grid = all(first[1] <= second[0] for spans in spans_by_dim for first, second in pairwise(spans))
    if grid:
        return len(boxes) > len(set(boxes))
    if len(boxes) > _MANY:
        raise CheckpointError(f"a tensor in {len(boxes)} parts that are no grid cannot be checked")
    return any(_meet(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


def _meet(a: _Box, b: _Box) -> bool:
    return all(
        p < q + t and q < p + s for (p, s), (q, t) in zip(zip(*a, strict=True), zip(*b, strict=True), strict=True)
    )
