"""Three ranks whose sums depend on DDP's buckets: trains on in a new model, with the old one's layout or without.

Prints, on rank 0, whether the weights are those of the model that was never built anew.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastgasp.pytorch.buckets import BucketLayout, layout_of, rebuild


def build() -> DistributedDataParallel:
    """Six layers in several buckets."""
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=0.03)


def train(model: DistributedDataParallel, first: int, last: int) -> None:
    """Steps `first` to `last`, on data of each rank's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(first, last):
        numbers = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        (model(torch.randn(8, 64, generator=numbers)) ** 2).sum().backward()
        optimizer.step()


def compare() -> None:
    """Ten steps at one go; and five and five, with the layout or without, or five, one and four."""
    whole = build()
    train(whole, 0, 10)
    for name in ("rebuilt", "again", "fresh"):
        first, second = build(), build()
        train(first, 0, 5)
        second.load_state_dict(first.state_dict())
        layout = layout_of(first)
        assert layout is not None and len(layout) > 1
        if name != "fresh":
            assert rebuild(second, layout)
        train(second, 5, 6)
        if name == "again":
            second = built_anew(second)
        train(second, 6, 10)
        same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
        if dist.get_rank() == 0:
            print(f"{name}: {same}", flush=True)


def built_anew(model: DistributedDataParallel) -> DistributedDataParallel:
    """After its first step, before DDP has laid out its buckets by itself."""
    found, look = build(), BucketLayout(lambda: model)
    look.look()
    assert look.layout is not None
    found.load_state_dict(model.state_dict())
    assert rebuild(found, look.layout)
    return found


def main() -> None:
    """No model is left when the group ends, and no rank ends it under another one: gloo's threads abort over both."""
    dist.init_process_group("gloo")
    compare()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
