"""Ranks that call every collective with communication marks on, and train with them on and off; the result is JSON.

python collectives_child.py WORLD FOLDER
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d, irecv, isend
from torch.nn.parallel import DistributedDataParallel

from lastgasp.pytorch.collectives import Collectives, CommunicationMarks, GradientBuckets
from lastgasp.pytorch.processgroups import process_groups
from lastgasp.steps import bits
from lastgasp.steps.marks import Marks
from support.ranges import seen
from support.waiting import until


class Rank:
    """What one rank does, and finds."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.marks = Marks.open(rank=rank, world_size=world, mask=bits.ALL)
        self.names = CommunicationMarks(self.marks)
        self.calls = Collectives(self.names)

    def ranges(self) -> list[list[Any]]:
        """Operation, elements, dtype, group and length in s of what was marked since the last time."""
        found = seen(self.marks)
        self.marks.consumed(len(found))
        texts = [(json.loads(one.name), one) for one in found]
        return [
            [text["opName"], int(text["count"]), text["dataType"], text["groupName"], (one.end - one.begin) / 1e9]
            for text, one in texts
            if one.domain == "communication"
        ]

    def every_call(self) -> list[list[Any]]:
        """Each function once, in an order that all ranks share."""
        world, ones = self.world, torch.ones
        self.calls.look()
        dist.all_reduce(ones(3))
        dist.all_reduce(tensor=ones(3, dtype=torch.bfloat16), group=dist.group.WORLD)
        dist.broadcast(ones(4), 0)
        dist.reduce(ones(5), 0)
        dist.all_gather([ones(6) for _ in range(world)], ones(6))
        dist.all_gather_into_tensor(ones(7 * world), ones(7))
        dist.gather(ones(8), [ones(8) for _ in range(world)] if self.rank == 0 else None)
        dist.scatter(ones(9), [ones(9) for _ in range(world)] if self.rank == 0 else None)
        dist.reduce_scatter_tensor(ones(10), ones(10 * world))
        dist.all_to_all_single(ones(2 * world), ones(2 * world))
        dist.barrier()
        dist.all_gather_object([None] * world, {"an": "object"})
        if self.rank < 2:
            send, receive = (dist.send, dist.recv) if self.rank == 0 else (dist.recv, dist.send)
            send(ones(11), 1 - self.rank)
            receive(ones(12), 1 - self.rank)
        return self.ranges()

    def batched(self) -> int:
        """Sends and receives in one batch, by functions that were imported before they were wrapped; and not."""
        to, of = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        for one, other in ((isend, irecv), (dist.isend, dist.irecv)):
            into = torch.zeros(3)
            operations = [dist.P2POp(one, torch.full((3,), 1.0 + self.rank), to), dist.P2POp(other, into, of)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            assert into.tolist() == [1.0 + of] * 3
        return len(self.ranges())

    def late(self, folder: Path, asynchronous: bool) -> list[int]:
        """Rank 0 comes to a reduction when all others are in it: begin and end here, and when rank 0 came, in ns."""
        self.calls.close()
        inside, original = f"inside-{asynchronous}", dist.all_reduce

        @functools.wraps(original)
        def telling(*args: Any, **options: Any) -> Any:
            """Within the range, and before the reduction."""
            (folder / f"{inside}-{self.rank}").touch()
            return original(*args, **options)

        with patch.object(dist, "all_reduce", telling), patch.object(distributed_c10d, "all_reduce", telling):
            self.calls.look()
            self.ranges()
            if self.rank == 0:
                until(lambda: len(list(folder.glob(f"{inside}-*"))) == self.world - 1, "the others are in it")
            came = time.monotonic_ns()
            work = dist.all_reduce(torch.ones(3), async_op=asynchronous)
            if asynchronous:
                assert isinstance(work, dist.Work)
                work.wait()
            until(lambda: bool(seen(self.marks)), "its end, which another thread may tell")
            [one] = seen(self.marks)
            self.marks.consumed(1)
            self.calls.close()
        self.calls.look()
        return [one.begin, one.end, came]

    def a_failing_call(self) -> list[str]:
        """It raises what it raised before, and the next one is marked."""
        try:
            dist.all_reduce("no tensor")
        except TypeError as error:
            text = str(error)
        dist.all_reduce(torch.ones(3))
        return [text[:20], *(one[0] for one in self.ranges())]

    def put_back(self) -> list[str]:
        """Names that are not what they were, once switched off; one that somebody else has wrapped stays."""
        before = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "barrier", "batch_isend_irecv")}
        self.marks.mask = bits.DEFAULT_ON
        dist.all_reduce(torch.ones(3))
        assert self.ranges() == []  # off at once, though still wrapped
        theirs = dist.broadcast = lambda *args: before["broadcast"](*args)
        self.calls.look()
        assert dist.broadcast is theirs
        dist.broadcast = before["broadcast"].__wrapped__
        assert dist.irecv is irecv and dist.distributed_c10d.irecv is irecv
        return [name for name, wrapped in before.items() if getattr(dist, name) is not wrapped.__wrapped__]

    def train(self, mask: Callable[[int], int]) -> tuple[list[str], list[list[Any]]]:
        """Losses in hexadecimal, last parameters among them, and what was marked; the mask may change each step."""
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        buckets = GradientBuckets(self.names, ddp)
        generator, losses = torch.Generator().manual_seed(self.rank), list[float]()
        for step in range(12):
            self.marks.mask = mask(step)
            self.calls.look()
            if step % 3 == 2:
                with ddp.no_sync():
                    self._loss(ddp, generator).backward()  # type: ignore[no-untyped-call]
            else:
                loss = self._loss(ddp, generator)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
            buckets.look()
        buckets.close()
        losses += [float(p.detach().double().sum()) for p in model.parameters()]
        return [loss.hex() for loss in losses], self.ranges()

    def _loss(self, ddp: nn.Module, generator: torch.Generator) -> Tensor:
        loss: Tensor = ddp(torch.randn(4, 8, generator=generator)).square().mean()
        return loss


def run(number: int, world: int, folder: Path) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=world)
    halves = [dist.new_group([0, 1], group_desc="mesh_tp"), dist.new_group([0], group_desc="undefined")]
    rank = Rank(number, world)
    found: dict[str, Any] = {"groups": process_groups(), "calls": rank.every_call()}
    if number < 2:
        dist.all_reduce(torch.ones(13), group=halves[0])
    found["group"] = rank.ranges()
    found["batched"] = rank.batched()
    found["late"] = [rank.late(folder, asynchronous) for asynchronous in (False, True)]
    found["failing"] = rank.a_failing_call()
    found["left"] = rank.put_back()
    found["off"] = rank.train(lambda step: 0)
    found["on"] = rank.train(lambda step: bits.ALL)
    found["switched"] = rank.train(lambda step: bits.COMM * (step // 2 % 2))
    rank.calls.close()
    rank.marks.close(remove=True)
    (folder / f"{number}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks; each writes down what it found."""
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(n, world, folder)) for n in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
