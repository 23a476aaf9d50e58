"""The boxes of a stretch of a tensor's elements, as FSDP1 gives each rank one."""

from __future__ import annotations

from itertools import product

import torch

from lastgasp.pytorch.sharded.flat import boxes
from lastgasp.pytorch.sharded.metadata import _overlap


def test_boxes_have_just_the_elements_of_the_stretch_in_their_order() -> None:
    for shape in ((7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2, 2)):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        for first, end in product(range(whole.numel()), range(1, whole.numel() + 1)):
            if first >= end:
                continue
            found = boxes(shape, first, end)
            assert len(found) <= 2 * len(shape) - 1, (shape, first, end)
            elements: list[int] = []
            for begin, offsets, sizes in found:
                assert begin == len(elements)
                box = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
                elements += box.flatten().tolist()
            assert elements == list(range(first, end)), (shape, first, end)


def test_what_many_ranks_hold_is_checked_without_comparing_all_pairs() -> None:
    shape = (3000, 7)
    odd = [(offsets, sizes) for at in range(0, 21000, 10) for _, offsets, sizes in boxes(shape, at, at + 10)]
    assert len(odd) > 2000 and not _overlap(odd, shape)
    assert _overlap([*odd, ((1500, 2), (1, 3))], shape)
