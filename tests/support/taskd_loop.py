"""A custom loop that lastgasp protects, and that also has the guides' edits: worker and step ranges of TaskD's.

Arguments: directory; the file for the final weights.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from taskd.api import init_taskd_worker, start_taskd_worker
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Three epochs."""
    dist.init_process_group("gloo")
    init_taskd_worker(dist.get_rank(), 5000)
    start_taskd_worker()
    from lastgasp.pytorch import Session, TorchState  # a worker that has begun does not know that it will come

    torch.manual_seed(dist.get_rank())
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(data)  # type: ignore[var-annotated]
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    net = torch.nn.Linear(8, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    npu: Any = torch.npu  # type: ignore[attr-defined]
    with Session.open(sys.argv[1], state=TorchState(model, optimizer)) as session:
        for epoch in session.epochs(3):
            sampler.set_epoch(epoch)
            for inputs, wanted in session.batches(loader):
                number = npu.mstx.range_start(f"step {session.step + 1}", npu.current_stream())
                optimizer.zero_grad()
                ((model(inputs) - wanted) ** 2).mean().backward()
                optimizer.step()
                npu.mstx.range_end(number)
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), sys.argv[2])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
