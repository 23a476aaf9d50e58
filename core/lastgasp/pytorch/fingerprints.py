"""Digests of what a fit trains, so that no other fit resumes from its checkpoints. They read no weights and no data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lastgasp.fits import fingerprint
from lastgasp.pytorch.zero import is_flat

_DEEP = 8
_ROWS = 4


def of_model(module: nn.Module) -> str:
    """Names, shapes and dtypes of the parameters as they stand; in FSDP1 those of all ranks together."""
    if is_flat(module):
        from lastgasp.pytorch.sharded.names import whole_parameters

        return fingerprint((one.name, one.shape, one.dtype) for one in whole_parameters(module))
    return fingerprint(
        (name, None if is_lazy(p) else tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()
    )


def of_optimizers(optimizers: Iterable[object]) -> str:
    """Their types, in order. What their groups hold is checked by torch when they are loaded."""
    return fingerprint(type(optimizer).__qualname__ for optimizer in optimizers)


def of_data(loaders: Iterable[object]) -> str:
    """What is known of the data without reading them: types, lengths, indices of subsets, some rows of tables."""
    return fingerprint(row for loader in loaders for row in _dataset(getattr(loader, "dataset", loader), _DEEP))


def _dataset(data: Any, deep: int) -> Iterator[object]:
    yield type(data).__qualname__
    if isinstance(data, Subset):
        yield tuple(map(int, data.indices))
        yield from _dataset(data.dataset, deep - 1) if deep else ()
    elif isinstance(data, ConcatDataset):
        for part in data.datasets:
            yield from _dataset(part, deep - 1) if deep else ()
    elif isinstance(data, TensorDataset):
        yield from (_rows(tensor) for tensor in data.tensors)
    elif hasattr(data, "column_names") and hasattr(data, "_indices"):  # of `datasets`, whose fingerprint may be random
        yield _length(data), str(data.column_names), _arrow_rows(data)
    elif isinstance(data, torch.utils.data.Dataset) and not isinstance(data, torch.utils.data.IterableDataset):
        yield _length(data)


def _rows(tensor: torch.Tensor) -> object:
    ends = torch.cat([tensor[:_ROWS], tensor[-_ROWS:]]).detach().cpu().contiguous()
    return tuple(tensor.shape), str(tensor.dtype), fingerprint([ends.reshape(-1).view(torch.uint8).tolist()])


def _arrow_rows(data: Any) -> object:
    """As they are stored: `data[i]` runs the user's transforms."""
    try:
        table, chosen, count = data.data, data._indices, len(data)
        ends = sorted({*range(count)[:_ROWS], *range(count)[-_ROWS:]})
        rows = ends if chosen is None else [chosen.column(0)[i].as_py() for i in ends]
        return [table.slice(row, 1).to_pylist() for row in rows]
    except Exception:  # of another version of the library
        return None


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except Exception:  # a user's own, and a length is nothing that training needs
        return None
