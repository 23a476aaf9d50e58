"""The training script of bench_arenas: `fully_shard` over all ranks, with and without copies into arenas by turns.

Rank 0 prints one JSON object: seconds of blocks of steps without and with copies, in pairs: of each step, of every
N-th one as `arena="auto"` has chosen, and of each step beside the next one, which lastgasp does not do (`Beside`). A
step is made to last `--times` as long as a copy, by more micro-batches.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lastgasp.adapter.sharded import Shards
from lastgasp.arena import CHUNK, Arena
from lastgasp.arena_digest import Digest
from lastgasp.arena_filling import MEASURED, WARM_UP
from lastgasp.pytorch import Session, TorchState

LAYERS, BLOCK, ROUNDS = 4, 5, 7


def timed(action: Callable[[], object]) -> float:
    """Seconds that it took."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


class Work:
    """A model whose step takes as long as is wanted."""

    def __init__(self, width: int) -> None:
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.adam = torch.optim.Adam(self.model.parameters())
        self.batch, self.parts = torch.randn(64, width), 1
        self.before_update: Callable[[], None] = lambda: None

    def step(self) -> None:
        """One update."""
        self.adam.zero_grad()
        for _ in range(self.parts):
            loss: Tensor = self.model(self.batch).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
        self.before_update()
        self.adam.step()

    def payload(self) -> list[bytes | memoryview]:
        """What this rank copies."""
        groups = [[{key: value for key, value in group.items() if key != "params"} for group in self.adam.param_groups]]
        shards = Shards({"model": self.model}, {"optimizer": self.adam}, dist.get_rank(), dist.get_world_size())
        return shards.payload(groups)

    def fit(self, times: float) -> None:
        """Make a step last that many copies, by as many micro-batches as that takes on rank 0."""
        self.step()
        pieces, arena = self.payload(), Arena()
        arena.reserve(sum(map(len, pieces)))

        def seconds(action: Callable[[], object]) -> float:
            dist.barrier()  # all ranks copy at the same time, as they do between two steps
            return timed(action)

        copy = median(seconds(lambda: arena.copy(1, pieces)) for _ in range(ROUNDS))
        one = median(seconds(self.step) for _ in range(ROUNDS))
        arena.close()
        wanted = torch.tensor(times * copy / one)
        dist.broadcast(wanted, 0)
        self.parts = max(1, round(float(wanted)))


class Beside:
    """The same copy by a thread beside the next forward and backward pass, finished before the next update.

    It shows what that would gain; what it would cost besides is not there: whose copy is cut short by a kill has lost a
    step that was complete.
    """

    def __init__(self, pieces: list[bytes | memoryview]) -> None:
        self._sources = [torch.frombuffer(bytearray(p) if isinstance(p, bytes) else p, dtype=torch.uint8)
                         for p in pieces if len(p)]  # fmt: skip
        self._memory = [torch.zeros_like(source) for source in self._sources]
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """At the end of a step."""
        self._thread = threading.Thread(target=self._copy)
        self._thread.start()

    def _copy(self) -> None:
        digest = Digest(b"", 0)
        for target, source in zip(self._memory, self._sources, strict=True):
            for begin in range(0, len(source), CHUNK):
                part = source[begin : begin + CHUNK]
                target[begin : begin + CHUNK].copy_(part)  # as digesting, without the interpreter's lock
                digest.update(part.numpy().data)
        digest.end()

    def finish(self) -> None:
        """Before the next update."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def main() -> None:
    """Train `--pairs` times a block without and a block with copies, in either way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--times", type=float, default=10.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    work = Work(args.width)
    work.fit(args.times)
    with Session.open(args.dir, state=TorchState(work.model, work.adam), arena="auto") as s:
        filling = s._run.shards._filling  # type: ignore[union-attr]
        assert filling is not None

        def train(count: int, beside: Beside | None = None) -> None:
            for _ in range(count):
                work.step()
                s.updated()
                if beside is not None:
                    beside.start()

        train(WARM_UP + MEASURED)
        chosen, beside = filling.every, Beside(work.payload())
        work.before_update = beside.finish

        def block(every: int, count: int, how: Beside | None = None) -> float:
            filling.every = every
            try:
                return timed(lambda: train(count, how))
            finally:
                beside.finish()

        def pairs(every: int, count: int, how: Beside | None = None) -> list[tuple[float, float]]:
            found = []
            for number in range(args.pairs):  # a drift hits both
                without = block(0, count) if number % 2 == 0 else 0.0
                with_copies = block(every, count, how)
                found.append((without or block(0, count), with_copies))
            return found

        told = {"each": pairs(1, BLOCK), "auto": pairs(chosen, chosen), "beside": pairs(0, BLOCK, beside),
                "every": chosen}  # fmt: skip
        if dist.get_rank() == 0:
            print(json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
