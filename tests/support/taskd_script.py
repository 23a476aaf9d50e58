"""A DDP script with the edits of MindCluster's guides in it, as their pages have them, and with nothing of lastgasp's.

Arguments: its own checkpoint; a file to wait for after step 3 (- for none); the step at whose end rank 1 of the first
attempt is killed (0 for none).
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


def await_gate(gate: str, iteration: int) -> None:
    """The test looks at the job meanwhile."""
    while gate != "-" and iteration == 3 and not Path(gate).exists():  # the test's time limit ends this
        time.sleep(0.01)


def pretrain() -> None:
    """The guides' place for the worker: right after the process group is up."""
    dist.init_process_group("gloo")
    if dist.is_initialized():
        rank = dist.get_rank()
        from taskd.api.taskd_worker_api import init_taskd_worker, start_taskd_worker

        init_taskd_worker(rank, 5000, "pt")
        start_taskd_worker()
    from taskd.python.adaptor.pytorch.group_info import dump_group_info

    dump_group_info()
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    dist.destroy_process_group()


def train(path: Path, gate: str, fatal: int) -> None:
    """The guides' place for the marks: around each step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iteration = 0
    if path.exists():
        found = torch.load(path)
        iteration = found["iteration"]
        model.module.load_state_dict(found["model"])
    print(f"rank {dist.get_rank()} begins behind step {iteration}", flush=True)
    npu: Any = torch.npu  # type: ignore[attr-defined]
    while iteration < STEPS:
        iteration += 1
        stream = npu.current_stream()
        range_id = npu.mstx.range_start(f"step {iteration}", stream)
        optimizer.zero_grad()
        model(torch.full((2, 4), float(iteration))).square().mean().backward()
        optimizer.step()
        npu.mstx.range_end(range_id)
        if dist.get_rank() == 0:
            torch.save({"iteration": iteration, "model": model.module.state_dict()}, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
        dist.barrier()
        await_gate(gate, iteration)
        if iteration == fatal and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    pretrain()
