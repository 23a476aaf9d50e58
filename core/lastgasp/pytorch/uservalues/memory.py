"""Which tensors and arrays lie in the same memory: what changes one of them changes the others."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Known:
    """What is restored elsewhere, and what lies in its memory: `layer.weight.detach()`, say, is restored with it.

    Args:
        values: modules, parameters and buffers; memory: False if only these themselves count.
    """

    def __init__(self, values: Iterable[object] = (), memory: bool = True) -> None:
        values = list(values)
        self._ids = {id(one) for one in values}
        self._spans: dict[str, list[tuple[int, int]]] = {}
        for device, start, end, _ in _spans(values if memory else ()):
            spans = self._spans.setdefault(device, [])
            if spans and start <= spans[-1][1]:
                start, end = spans[-1][0], max(end, spans.pop()[1])
            spans.append((start, end))

    def __contains__(self, value: object) -> bool:
        if id(value) in self._ids:
            return True
        for device, start, end, _ in _spans([value]):
            spans = self._spans.get(device, [])
            i = bisect(spans, start, key=lambda one: one[0])
            return i > 0 and end <= spans[i - 1][1]
        return False


def overlapping(values: Iterable[object]) -> dict[int, Any]:
    """Those in whose memory another one of them lies, or a part of it; by id."""
    by_id = {id(value): value for value in values}
    found, last = set[int](), ("", 0, 0, 0)
    for one in _spans(by_id.values()):
        if one[0] == last[0] and one[1] < last[2]:
            found |= {one[3], last[3]}
        if one[0] != last[0] or one[2] > last[2]:
            last = one
    return {number: by_id[number] for number in found}


def _spans(values: Iterable[object]) -> list[tuple[str, int, int, int]]:
    """Of those that have memory: device, first byte, the byte behind the last one, id; in that order."""
    return sorted(span for value in values for span in _span(value))


def _span(value: Any) -> Iterator[tuple[str, int, int, int]]:
    try:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            start, size, device = value.data_ptr(), value.element_size(), str(value.device)
            steps = [(count - 1) * step * size for count, step in zip(value.shape, value.stride(), strict=True)]
        elif isinstance(value, np.ndarray):
            start, size, device = value.__array_interface__["data"][0], value.itemsize, "cpu"
            steps = [(count - 1) * step for count, step in zip(value.shape, value.strides, strict=True)]
        else:
            return
    except Exception:  # a tensor of a kind that has no memory of its own
        return
    if start and size and 0 not in value.shape:
        low = start + sum(step for step in steps if step < 0)
        yield device, low, start + sum(step for step in steps if step > 0) + size, id(value)
