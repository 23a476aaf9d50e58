"""Stand-ins of a distributed optimizer: three parameters in two buckets, cut into parts as Megatron cuts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

KIND = (torch.bfloat16, torch.float32)
SIZES = (5, 6, 4)
"""Elements of three parameters: the first two in bucket 0 (11, padded to 12), the third in bucket 1 (4)."""


def optimizers(parts: int) -> tuple[list[torch.nn.Parameter], torch.Tensor, list[Any]]:
    """Parameters, their fp32 weights in one row, and a stand-in optimizer for each part."""
    weights = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(3))
    params = [torch.nn.Parameter(part.to(torch.bfloat16)) for part in torch.split(weights, list(SIZES))]
    buckets = [
        SimpleNamespace(grad_data=torch.zeros(12), numel_unpadded=11, offset=0),
        SimpleNamespace(grad_data=torch.zeros(4), numel_unpadded=4, offset=12),
    ]
    index = {params[0]: (0, 5, 0), params[1]: (5, 11, 0), params[2]: (12, 16, 1)}
    buffer = SimpleNamespace(buckets=buckets, numel_unpadded=15, param_index_map=index)
    return params, weights, [_part(part, parts, buffer, weights) for part in range(parts)]


def _part(part: int, parts: int, buffer: Any, weights: torch.Tensor) -> Any:
    ranges: list[Any] = []
    groups: dict[Any, tuple[int, int]] = {}
    mains: list[torch.Tensor] = []
    state: dict[Any, Any] = {}
    for number, bucket in enumerate(buffer.buckets):
        size = bucket.grad_data.numel() // parts
        low, high = part * size, (part + 1) * size
        found = {}
        for param, (start, end, home) in buffer.param_index_map.items():
            begin, stop = max(start - bucket.offset, low), min(end - bucket.offset, high)
            if home != number or begin >= stop:
                continue
            at = begin + (0 if number == 0 else 11)
            main = weights[at : at + stop - begin].clone()
            found[param] = {
                "gbuf_local": SimpleNamespace(start=begin - low, end=stop - low),
                "param": SimpleNamespace(start=begin + bucket.offset - start, end=stop + bucket.offset - start),
            }
            groups[param] = (0, len(mains))
            mains.append(main)
            state[main] = {"exp_avg": main * 2, "exp_avg_sq": main.square() * 3}
        ranges.append({"param_map": found})
    inner = SimpleNamespace(param_groups=[{"params": mains}], state=state)
    return SimpleNamespace(
        gbuf_ranges=[{KIND: ranges}], buffers=[buffer], model_param_group_index_map=groups, optimizer=inner
    )
