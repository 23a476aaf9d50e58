"""What torch's NCCL process group does when a peer is gone, on a GPU.

`python -m benchmarks.nccl_abort [SCENARIO [MODE]]`

Scenarios: kill, hung (the peer is stopped), item (the thread waits in `item()`), queue (thousands of kernels behind the
collective), two (two groups), serial (aborted by torch's own function), wait (nobody aborts). MODE is the value of
TORCH_NCCL_ASYNC_ERROR_HANDLING. docs/facts/nccl.md holds what was seen.
"""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

SCENARIOS = ("kill", "hung", "item", "queue", "two", "serial", "wait")
LIMIT = 120.0
_BEGAN = time.monotonic()


def say(*words: object) -> None:
    """With seconds since the process began."""
    print(f"[rank {os.environ.get('RANK', '-')} {time.monotonic() - _BEGAN:7.3f} s]", *words, flush=True)


def main() -> None:
    """Start two ranks, and a third process in the place of the second one once the first asks for it."""
    from torch._C._distributed_c10d import TCPStore

    scenario, mode = [*sys.argv[1:], *("kill", "0")[len(sys.argv) - 1 :]][:2]
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    folder = tempfile.mkdtemp()
    variables = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": mode, "TORCHELASTIC_USE_AGENT_STORE": "True", "NCCL_ABORT_FOLDER": folder,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.nccl_abort", scenario, mode]

    def start(rank: int, **more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env=os.environ | variables | {"RANK": str(rank), "NCCL_HOSTID": str(rank)} | more
        )

    running, codes = [start(0), start(1)], dict[int, int]()
    try:
        while len(codes) < len(running) and time.monotonic() - _BEGAN < LIMIT:
            for number, process in enumerate(running):
                if number not in codes and (code := process.poll()) is not None:
                    codes[number] = code
                    say("process", number, "ended with", code)
            if os.path.exists(os.path.join(folder, "again")) and len(running) == 2:
                running.append(start(1, NCCL_ABORT_AGAIN="1"))
            time.sleep(0.02)
    finally:
        for process in running:
            process.kill()


def group(prefix: str = "") -> Any:
    """torch.distributed, with a group that works."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    torch.cuda.set_device(0)
    if prefix:
        limit = datetime.timedelta(seconds=60)
        store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False, timeout=limit)
        rank = int(os.environ["RANK"])
        dist.init_process_group("nccl", store=PrefixStore(prefix, store), rank=rank, world_size=2)
    else:
        dist.init_process_group("nccl")
    value = torch.ones(4, device="cuda")
    dist.all_reduce(value)
    say("the group works:", value.tolist())
    return dist


def rank(scenario: str) -> None:
    """Rank 1 is gone in a collective; rank 0 says what it sees, aborts, and meets a new process."""
    import torch

    if "NCCL_ABORT_AGAIN" in os.environ:
        group("again").barrier()
        return
    dist = group()
    groups = [dist.group.WORLD, *([dist.new_group([0, 1])] if scenario in ("two", "serial") else [])]
    for one in groups:
        dist.all_reduce(torch.ones(4, device="cuda"), group=one)
    weights, gradients = (torch.full((1 << 20,), value, device="cuda") for value in (3.0, 5.0))
    torch.cuda.synchronize()
    if os.environ["RANK"] == "1":
        time.sleep(1.0)
        say("is gone")
        os.kill(os.getpid(), signal.SIGSTOP if scenario == "hung" else signal.SIGKILL)
    works = [dist.all_reduce(gradients if not n else weights.clone(), group=one, async_op=True)
             for n, one in enumerate(groups)]  # fmt: skip
    for work in works:
        work.wait()
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    threading.Thread(target=follow, args=(groups[0]._get_backend(torch.device("cuda")), done), daemon=True).start()
    time.sleep(2.0)
    read(weights)
    if scenario == "wait":
        time.sleep(LIMIT)
    if scenario == "queue":
        threading.Thread(target=flood, daemon=True).start()
        time.sleep(3.0)
        reader = threading.Thread(target=read, args=(weights,), daemon=True)
        reader.start()
        reader.join(4.0)
        say("a copy still waits:", reader.is_alive())
    if scenario == "item":
        threading.Thread(target=lambda: say("item() is", gradients[0].item()), daemon=True).start()
        time.sleep(1.0)
    again(dist, scenario, done, gradients)


def follow(backend: Any, done: Any) -> None:
    """Say what torch knows, whenever that changes."""
    last = ""
    while True:
        found = f"{backend.get_error()}, event done: {done.query()}"
        if found != last:
            say(found)
        last = found
        time.sleep(0.005)


def read(weights: Any) -> None:
    """A copy on a stream of its own."""
    import torch

    began = time.monotonic()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        value = weights[:2].cpu().tolist()
    say("a copy on a stream of its own:", value, f"{(time.monotonic() - began) * 1e3:.1f} ms")


def flood() -> None:
    """Kernels behind what waits."""
    import torch

    value = torch.ones(64, device="cuda")
    for _ in range(8000):
        value.add_(1.0)
    say("all kernels are queued")


def again(dist: Any, scenario: str, done: Any, gradients: Any) -> None:
    """Abort, and go on with another process."""
    began = time.monotonic()
    if scenario == "serial":
        dist.distributed_c10d._abort_process_group()
    else:
        listed = list(dist.distributed_c10d._world.pg_map)
        threads = [threading.Thread(target=one.abort, daemon=True) for one in listed]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
    took, found = time.monotonic() - began, gradients[:2].tolist()
    say(f"aborted after {took:.2f} s; event done: {done.query()}, gradients {found}")
    if scenario != "serial":
        try:
            dist.all_reduce(gradients)
        except dist.DistBackendError as error:
            say("a further collective raises", str(error).partition("\n")[0])
        dist.destroy_process_group()
    with open(os.path.join(os.environ["NCCL_ABORT_FOLDER"], "again"), "w"):
        pass
    dist = group("again")
    dist.barrier()
    began = time.monotonic()
    dist.destroy_process_group()
    say(f"destroyed in {time.monotonic() - began:.2f} s")


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(sys.argv[1])
    else:
        main()
