"""Synthetic jobs in synchronous data parallel training, with noise as a shared machine makes it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lastgasp.steps.report.fold import Kinds, RankFold
from lastgasp.steps.report.job import Job, RankData
from lastgasp.steps.report.records import ObjectId, Owner, Row
from lastgasp.steps.report.sources import Place
from lastgasp.steps.report.spans import Range
from lastgasp.steps.report.table import StepTable

EPOCH = 1_795_247_866_000_000_000
COLLECTIVE = json.dumps(
    {"streamId": "0", "count": "1000", "dataType": "fp32", "groupName": "default_group", "opName": "HcclAllReduce"}
)


@dataclass(frozen=True)
class Shape:
    """What a job does. Times in seconds.

    Attributes:
        noise: standard deviation of the logarithm of each duration.
        spikes: share of the durations that take some two to ten times as long.
        drift: standard deviation of a slow random walk per rank, which makes one rank or the other slower for a while.
        buckets: DDP's all-reduces within backward; 0: an explicit one after it.
        buffers: DDP's forward begins with a broadcast from rank 0: it waits for all, and all wait for it.
        gather: an all-gather at the end of the forward pass, as with sharded parameters; 0: none.
        communication: whether collectives are marked; or the ranks on which they are.
        saver: who saves; None: all.
        slow: rank -> kind (`data`, `forward`, `backward`, `optimizer`, `outside`, `save`) -> seconds more.
        slow_from, slow_to: the first slow step, and the first that is not any more.
        renewed: rank -> the first step of its second process.
    """

    ranks: int = 4
    steps: int = 200
    data: float = 0.001
    forward: float = 0.008
    backward: float = 0.012
    optimizer: float = 0.002
    outside: float = 0.001
    reduce: float = 0.002
    save: float = 0.030
    save_every: int = 50
    noise: float = 0.15
    spikes: float = 0.02
    drift: float = 0.05
    buckets: int = 2
    buffers: bool = False
    gather: float = 0.0
    communication: bool | frozenset[int] = False
    saver: int | None = 0
    slow: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    slow_from: int = 0
    slow_to: int = 1 << 62
    renewed: Mapping[int, int] = field(default_factory=dict)


class Rank:
    """One rank's clock and its ranges."""

    def __init__(self, rank: int, shape: Shape, chance: random.Random) -> None:
        self.rank, self.shape, self._chance = rank, shape, chance
        self.now = EPOCH + chance.randrange(1_000_000)
        self.walk, self.pid = 0.0, 100 + rank
        self.ranges: list[Range] = []

    def pass_by(self, kind: str, step: int) -> int:
        """Let the time of one phase pass; when it began."""
        shape, chance = self.shape, self._chance
        seconds = getattr(shape, kind) * chance.lognormvariate(self.walk, shape.noise)
        if chance.random() < shape.spikes:
            seconds *= 1 + min(9.0, chance.paretovariate(1.2))
        if shape.slow_from <= step < shape.slow_to:
            seconds += shape.slow.get(self.rank, {}).get(kind, 0.0) * chance.lognormvariate(0, shape.noise)
        begin, self.now = self.now, self.now + int(seconds * 1e9)
        return begin

    def collective(self, begin: int, end: int) -> None:
        """Mark it where that is on."""
        marked = self.shape.communication
        if marked if isinstance(marked, bool) else self.rank in marked:
            self.mark(COLLECTIVE, begin, end, "communication")

    def drift(self) -> None:
        """The machine's mood changes slowly."""
        self.walk = 0.97 * self.walk + self._chance.gauss(0, self.shape.drift * 0.243)

    def mark(self, name: str, begin: int, end: int, domain: str = "default") -> None:
        stream = name not in ("dataloader", "save_checkpoint")
        device = (begin, end) if stream else (0, 0)
        self.ranges.append(Range(name, domain, self.pid, self.pid, stream, begin, end, *device))


def simulate(shape: Shape, seed: int) -> list[list[Range]]:
    """The ranges of each rank, in the order in which they end."""
    chance = random.Random(seed)
    ranks = [Rank(rank, shape, chance) for rank in range(shape.ranks)]
    for step in range(1, shape.steps + 1):
        for rank in ranks:
            rank.pid += 1000 if shape.renewed.get(rank.rank) == step else 0
        begins = [_until_forward(rank, step) for rank in ranks]
        _forward(ranks, step, shape)
        _backward(ranks, step, shape)
        for rank, begin in zip(ranks, begins, strict=True):
            rank.mark("optimizer", rank.pass_by("optimizer", step), rank.now)
            rank.mark(f"step {step}", begin, rank.now)
            if step % shape.save_every == 0 and shape.saver in (None, rank.rank):
                rank.mark("save_checkpoint", rank.pass_by("save", step), rank.now)
            rank.drift()
    return [rank.ranges for rank in ranks]


def _until_forward(rank: Rank, step: int) -> int:
    begin = rank.pass_by("data", step)
    rank.mark("dataloader", begin, rank.now)
    return begin


def _forward(ranks: list[Rank], step: int, shape: Shape) -> None:
    begins = [rank.now for rank in ranks]
    for rank, begin in zip(ranks, begins, strict=True):
        if shape.buffers:
            rank.now = max(begins) if rank.rank == 0 else max(begin, begins[0])
        rank.pass_by("forward", step)
        if not shape.gather:
            rank.mark("forward", begin, rank.now)
            rank.pass_by("outside", step)
    if shape.gather:
        done = max(rank.now for rank in ranks) + int(shape.gather * 1e9)
        for rank, begin in zip(ranks, begins, strict=True):
            rank.collective(rank.now, done)
            rank.mark("forward", begin, done)
            rank.now = done
            rank.pass_by("outside", step)


def _backward(ranks: list[Rank], step: int, shape: Shape) -> None:
    begins = [rank.pass_by("backward", step) for rank in ranks]
    locally = [rank.now for rank in ranks]
    done = max(locally) + int(shape.reduce * 1e9)
    for rank, begin, local in zip(ranks, begins, locally, strict=True):
        for bucket in range(shape.buckets):
            ready = begin + (local - begin) * (bucket + 1) // shape.buckets
            others = max(b + (e - b) * (bucket + 1) // shape.buckets for b, e in zip(begins, locally, strict=True))
            rank.collective(ready, others + int(shape.reduce * 1e9))
        rank.mark("backward", begin, done if shape.buckets else local)
        rank.now = done
        if not shape.buckets:
            rank.collective(local, done)


def job_of(shape: Shape, seed: int) -> Job:
    """The job as the report has it after reading, without files."""
    kinds = Kinds()
    ranks = {}
    for rank, ranges in enumerate(simulate(shape, seed)):
        fold = RankFold(kinds, StepTable())
        fold.feed(row for number, found in enumerate(ranges, start=1) for row in rows_of(found, number, rank))
        fold.end()
        ranks[rank] = RankData(rank, fold.table, fold.counts)
    return Job(Place("synthetic", {rank: Path() for rank in ranks}), ranks, tuple(kinds.known))


def rows_of(found: Range, number: int, device: int) -> Iterator[Row]:
    """The two or four rows of a range."""
    host, other = ObjectId(Owner(found.pid, found.tid)), ObjectId(Owner(device, 2))
    begin, end = (16, 32) if found.stream else (2, 4)
    yield Row(1, begin, 0, found.host_begin, number, host, found.name, found.domain)
    if found.stream:
        yield Row(1, begin, 1, found.device_begin, number, other)
    yield Row(1, end, 0, found.host_end, number, host)
    if found.stream:
        yield Row(1, end, 1, found.device_end, number, other)


def line_of(row: Row) -> str:
    """A row as TaskD writes it (docs/facts/taskd.md §6)."""
    owner = row.MsptiObjectId.Pt if row.MsptiObjectId is not None else Owner()
    return (
        f'{{"Kind":{row.Kind},"Flag":{row.Flag},"SourceKind":{row.SourceKind},"Timestamp":{row.Timestamp},"Id":{row.Id},'
        f'"MsptiObjectId":{{"Pt":{{"ProcessId":{owner.ProcessId},"ThreadId":{owner.ThreadId}}},'
        f'"Ds":{{"DeviceId":{owner.ProcessId},"StreamId":{owner.ThreadId}}}}},'
        f'"Name":{json.dumps(row.Name, ensure_ascii=False)},"Domain":"{row.Domain}"}}\n'
    )


def lines_of(ranges: list[Range], rank: int, first_id: int = 1) -> str:
    """All lines of a rank."""
    numbered = enumerate(ranges, start=first_id)
    return "".join(line_of(row) for number, found in numbered for row in rows_of(found, number, rank))


def write(shape: Shape, seed: int, task: Path) -> None:
    """The files of a job: `task`/RANK/1795247866."""
    for rank, ranges in enumerate(simulate(shape, seed)):
        (task / str(rank)).mkdir(parents=True, exist_ok=True)
        (task / str(rank) / "1795247866").write_text(lines_of(ranges, rank))
