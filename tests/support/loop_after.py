"""A DDP training script as people write it."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lastgasp.pytorch import Session, TorchState

dist.init_process_group("gloo")
torch.manual_seed(int(os.environ["RANK"]))
x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data)  # type: ignore[var-annotated]
loader = DataLoader(data, batch_size=4, sampler=sampler)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
with Session.open("ckpts", state=TorchState(model, optimizer, scheduler)) as s:
    for epoch in s.epochs(3):
        sampler.set_epoch(epoch)
        for inputs, wanted in s.batches(loader):
            optimizer.zero_grad()
            loss = ((model(inputs) - wanted) ** 2).mean()
            loss.backward()
            optimizer.step()
        scheduler.step()
if dist.get_rank() == 0:
    torch.save(net.state_dict(), sys.argv[1])
dist.destroy_process_group()
