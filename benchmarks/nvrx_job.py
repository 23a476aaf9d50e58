"""in_place_job.py's training inside of nvidia-resiliency-ext's `inprocess.Wrapper`, for bench_in_place.

Starts its ranks itself: as in the library's examples no launcher watches them, since torchrun ends all of them with the
first one. The wrapped function makes its process group in a store of the iteration, and DDP sends what rank 0 has. The
library's own abort knows NCCL alone, so gloo's groups get one here. What a step is, and its note, are in_place_job's.
"""

import contextlib
import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess  # type: ignore[import-not-found, unused-ignore]
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from benchmarks.in_place_job import BATCH, WIDE, Job, arguments

INTERVAL = timedelta(milliseconds=200)
"""All that a recovery waits for: of 10, 50, 200 and 1,000 ms (its default) the one that recovers soonest here."""


RANKS = 4


class Abort(inprocess.abort.Abort):  # type: ignore[misc, unused-ignore]
    """For gloo: its own abort leaves a thread in a collective with living peers, so what it reads is cut."""

    def __call__(self, state: Any) -> Any:
        """On the thread that watches."""
        if dist.is_initialized():
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    _cut(int(name))
            dist.destroy_process_group()
        return state


def _cut(fd: int) -> None:
    """A connection between ranks; the store's stay."""
    with socket.socket(fileno=os.dup(fd)) as connection:
        ends = connection.getsockname(), connection.getpeername()
        if connection.type == socket.SOCK_STREAM and int(os.environ["MASTER_PORT"]) not in (end[1] for end in ends):
            connection.shutdown(socket.SHUT_RDWR)


def rank() -> None:
    """Train to the last step, with as many ranks as are left."""
    job = Job(arguments())
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(job.net.parameters(), lr=1e-3)
    done = 0

    def training(wrapper: inprocess.CallWrapper) -> None:
        nonlocal done
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        world, own = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        store = TCPStore(host, port, is_master=False)  # the library's own
        prefixed = PrefixStore(str(wrapper.iteration), store)
        dist.init_process_group("gloo", store=prefixed, rank=own, world_size=world)
        model = DistributedDataParallel(job.net, bucket_cap_mb=2)
        agreed = torch.tensor(done)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        for step in range(int(agreed), job.args.steps):
            x = torch.randn(BATCH, WIDE)
            job.step(model, optimizer, (x, x.sum(1, keepdim=True)), step)
            done = step + 1
        dist.destroy_process_group()

    intervals = dict.fromkeys(("monitor_thread_interval", "monitor_process_interval", "last_call_wait"), INTERVAL)
    more = {"heartbeat_interval": INTERVAL, "progress_watchdog_interval": INTERVAL}
    wrap = inprocess.Wrapper(abort=Abort(), **intervals, **more)

    def wrapped(call_wrapper: inprocess.CallWrapper) -> None:
        training(call_wrapper)

    wrap(wrapped)(None)


def main() -> None:
    """Start the ranks, and wait for them; one that is killed is what the benchmark is about.

    Raises:
        SystemExit: fewer than all but one of them have ended well.
    """
    if "RANK" in os.environ:
        rank()
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    command = [sys.executable, "-m", "benchmarks.nvrx_job", *sys.argv[1:]]
    ranks = [subprocess.Popen(command, env=shared | {"RANK": str(number)}) for number in range(RANKS)]
    codes = [one.wait() for one in ranks]
    if codes.count(0) < RANKS - 1:
        sys.exit(f"exit codes {codes}")


if __name__ == "__main__":
    main()
