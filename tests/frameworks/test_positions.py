"""Each kind of loader comes back to where it stood: stopped anywhere, a loop gets exactly the samples that are due."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
)

from frameworks.position_rig import Loop, Ran, Stopped
from lastgasp.errors import CheckpointError
from lastgasp.pytorch import rng
from lastgasp.pytorch.loop.data_position import DataPosition
from lastgasp.pytorch.position import (
    CHANGED,
    IN_TURN,
    MAP,
    STATEFUL,
    STREAM,
    UNORDERED,
    WORKERS,
    EpochPosition,
    LoaderPosition,
    position_of,
    register_loader,
)
from lastgasp.pytorch.position import registry as registry_module
from lastgasp.pytorch.position.loaders import StreamPosition
from lastgasp.pytorch.position.records import MAGIC, EpochRecord, decode_epoch
from lastgasp.pytorch.prefetched import PrefetchedData

pytestmark = pytest.mark.usefixtures("childrens_signal")

STOPS = range(1, 11)
SOME = (2, 5, 7, 10)


class Numbers(Dataset[float]):
    """Each sample is its number, and perhaps some noise."""

    loaded = 0

    def __init__(self, noise: bool = False) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> float:
        Numbers.loaded += 1
        return float(index) + (0.1 * float(torch.rand(())) if self.noise else 0.0)


class Stream(IterableDataset[float]):
    """Numbers in random order, shared out among workers."""

    def __iter__(self) -> Iterator[float]:
        info = torch.utils.data.get_worker_info()
        for number in torch.randperm(20).tolist():
            if info is None or number % info.num_workers == info.id:
                yield float(number)


class Clocked(IterableDataset[float]):
    """Another order in each process, as with a seed from the clock."""

    processes = 0

    def __init__(self) -> None:
        Clocked.processes += 1
        self.begin = Clocked.processes

    def __iter__(self) -> Iterator[float]:
        return iter([float(self.begin + i) for i in range(20)])


class Epochs:
    """Knows its position, and counts epochs."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 5:
            self.at += 1
            yield torch.arange(4.0) + 10 * self.at + 100 * self.epoch
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Late(Epochs):
    """Has a state from its first batch on."""

    def __init__(self) -> None:
        super().__init__()
        del self.at

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at = getattr(self, "at", 0)
        yield from super().__iter__()


def shuffled(**options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Numbers(options.get("num_workers", 0) == 0), 4, shuffle=True, **options)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


class Closed:
    """A handle that raises whatever it is asked."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class OwnRandom(Numbers):
    """Noise from generators that it holds, one of them in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = Closed()
        self.random = random.Random(1)
        self.others: list[Any] = [np.random.default_rng(1), np.random.RandomState(1), generator()]

    def __getitem__(self, index: int) -> float:
        one, two, three = self.others
        drawn = float(one.random()) + float(two.random_sample()) + float(torch.rand((), generator=three))
        return float(index) + 0.1 * (self.random.random() + drawn)


class Seeded:
    """A collate function that makes its generator for its first batch, as transformers' masking does."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __call__(self, samples: list[float]) -> torch.Tensor:
        self.generator = self.generator or generator()
        return torch.tensor(samples) + 0.1 * torch.rand(len(samples), generator=self.generator)


class Shuffled(Sampler[int]):
    """An order from a generator that it holds."""

    def __init__(self) -> None:
        self.random = random.Random(4)

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(20), 20))


class OwnStream(IterableDataset[float]):
    """Numbers in an order of its own, with noise."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(5)

    def __iter__(self) -> Iterator[float]:
        for number in self.random.permutation(20):
            yield float(number) + 0.1 * float(self.random.random())


class Batches:
    """No DataLoader at all."""

    def __init__(self) -> None:
        self.random = random.Random(6)

    def __iter__(self) -> Iterator[list[float]]:
        return ([self.random.random() for _ in range(4)] for _ in range(5))


def closed_over() -> DataLoader[Any]:
    """A collate function that draws from what it closes over."""
    held = np.random.default_rng(7)
    return DataLoader(Numbers(), 4, collate_fn=lambda samples: [sample + 0.1 * held.random() for sample in samples])


OWN_RANDOM: dict[str, Callable[[], Any]] = {
    "own-data-set": lambda: DataLoader(OwnRandom(), 4, shuffle=True),
    "own-subset": lambda: DataLoader(Subset(OwnRandom(), range(20)), 4),
    "own-collate": lambda: DataLoader(Numbers(), 4, collate_fn=Seeded()),
    "own-closure": closed_over,
    "own-sampler": lambda: DataLoader(OwnRandom(), 4, sampler=Shuffled()),
    "own-stream": lambda: DataLoader(OwnStream(), 4),
    "own-batches": Batches,
}
"""Random generators that are not those of the process."""

LOADERS: dict[str, Callable[[], Any]] = {
    **OWN_RANDOM,
    "shuffled": shuffled(),
    "own-generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=generator()),
    "batch-sampler": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(SequentialSampler(range(20)), 4, False)),
    "distributed": lambda: DataLoader(Numbers(), 2, sampler=DistributedSampler(Numbers(), 2, 1)),
    "iterable": lambda: DataLoader(Stream(), 4),
    "stateful": Epochs,
    "list": lambda: list(DataLoader(Numbers(), 4)),
}
WITH_WORKERS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled(num_workers=2),
    "persistent": shuffled(num_workers=2, persistent_workers=True),
    "own-sampler": lambda: DataLoader(Numbers(), 4, sampler=Shuffled(), num_workers=2),
    "iterable": lambda: DataLoader(Stream(), 4, num_workers=2),
}


def set_epoch(loader: Any, number: int) -> None:
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(number)


@pytest.mark.parametrize("name", LOADERS)
def test_a_loop_gets_what_was_due(name: str) -> None:
    assert Loop(LOADERS[name], epoch=set_epoch).check(STOPS) == ""


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_a_loop_with_workers_gets_what_was_due(name: str) -> None:
    told = Loop(WITH_WORKERS[name]).check(SOME)
    assert told == ("" if name == "iterable" else WORKERS)


@pytest.mark.parametrize("name", ["shuffled", "persistent"])
def test_a_loader_that_lives_on_comes_back_to_its_place(name: str) -> None:
    """As where a training is entered again in its process; persistent workers keep the iterator of the pass before."""
    whole = Loop(WITH_WORKERS[name]).whole()
    for stop in (2, 7):
        loader = WITH_WORKERS[name]()
        loop = Loop(lambda: loader)  # noqa: B023
        stopped = loop.run(stop)
        assert isinstance(stopped, Stopped)
        resumed = loop.run(start=stopped, number=99)
        assert isinstance(resumed, Ran) and resumed.batches == whole.batches[stop:]


@pytest.mark.parametrize("name", LOADERS)
def test_passes_that_are_broken_off_are_not_gone_on_with(name: str) -> None:
    if name == "stateful":  # such a loader goes on after a break, with or without a fault
        Loop(Epochs, epochs=4, most=3).check((2, 3, 4, 6, 8))
    else:
        Loop(LOADERS[name], epochs=3, most=3, epoch=set_epoch).check((2, 3, 4, 6, 8))


@pytest.mark.parametrize("name", LOADERS)
def test_stopped_twice(name: str) -> None:
    Loop(LOADERS[name], epochs=3, epoch=set_epoch).check_twice(7, 1)


def test_nothing_that_a_sampler_skips_is_loaded() -> None:
    loop = Loop(lambda: DataLoader(Numbers(), 4, shuffle=True))
    stopped = loop.run(9)
    assert isinstance(stopped, Stopped)
    Numbers.loaded = 0
    loop.run(start=stopped)
    assert Numbers.loaded == 4


def test_two_passes_over_loaders_that_count_epochs() -> None:
    """Each loader knows the epochs of the run before, also where its own pass had ended or is still to come."""

    def run(stop: int | None = None, start: bytes = b"") -> tuple[list[float], bytes]:
        loaders, got = (Epochs(), Epochs()), list[float]()
        position = DataPosition(rng.RngRecorder(), None)
        if start:
            position.resume(start, 0)
        for epoch in range(position.epoch, 3):
            position.next_epoch(epoch)
            for loader in loaders:
                one, _ = position.begin(loader)
                while True:
                    position.ask(one)
                    if len(got) == stop:
                        return got, position.record()
                    try:
                        got.append(float(position.fetch(one)[0]))
                    except StopIteration:
                        break
                    finally:
                        one.asking = False
        return got, b""

    whole, _ = run()
    assert len(set(whole)) == 15 and len(whole) == 30
    for stop in range(1, 30):
        _, record = run(stop)
        assert run(start=record)[0] == whole[stop:], stop


def test_an_order_that_is_drawn_anew_is_reported() -> None:
    loop = Loop(lambda: DataLoader(Clocked(), 4))
    stopped = loop.run(7)
    assert isinstance(stopped, Stopped)
    resumed = loop.run(start=stopped)
    assert isinstance(resumed, Ran)
    assert resumed.inexact == CHANGED


def test_a_sampler_that_is_in_another_epoch_is_reported() -> None:
    loop = Loop(LOADERS["distributed"], epoch=set_epoch)
    stopped = loop.run(7)
    assert isinstance(stopped, Stopped)
    resumed = Loop(LOADERS["distributed"]).run(start=stopped)
    assert isinstance(resumed, Ran)
    assert resumed.inexact == CHANGED


class ByTraining(Sampler[int]):
    """What was seldom drawn comes next, and what has gone badly, as training says."""

    bad: ClassVar[list[int]] = []

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        for number in range(20):
            yield self.bad[-1] if number >= 4 and self.bad else number


class Longer(IterableDataset[float]):
    """Another run finds other numbers from the sixth on."""

    later = 0.0

    def __iter__(self) -> Iterator[float]:
        return (float(number) + (number > 5) * self.later for number in range(20))


@pytest.mark.parametrize(
    ("make", "where", "now"),
    [(lambda: DataLoader(Numbers(), 2, sampler=ByTraining()), (ByTraining, "bad"), [17]),
     (lambda: DataLoader(Longer(), 2), (Longer, "later"), 0.5)],
    ids=[MAP, STREAM],
)  # fmt: skip
def test_other_batches_behind_the_first_one_are_reported(
    make: Callable[[], Any], where: tuple[Any, str], now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(make)
    stopped = loop.run(5)
    assert isinstance(stopped, Stopped)
    same = loop.run(start=stopped)
    assert isinstance(same, Ran) and same.inexact == ""
    monkeypatch.setattr(*where, now)
    resumed = loop.run(start=stopped)
    assert isinstance(resumed, Ran) and resumed.inexact == CHANGED


@pytest.mark.parametrize("data", [Numbers, Longer])
def test_batches_in_the_order_of_workers_are_reported(data: type) -> None:
    loop = Loop(lambda: DataLoader(data(), 2, num_workers=2, in_order=False))
    stopped = loop.run(3)
    assert isinstance(stopped, Stopped)
    resumed = loop.run(start=stopped)
    assert isinstance(resumed, Ran) and resumed.inexact == UNORDERED


class Chunks(Sampler[int]):
    """Shuffles five at a time, with the random numbers of the process."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, 20, 5):
            yield from (begin + torch.randperm(5)).tolist()


class InTurn(IterableDataset[float]):
    """The same without a sampler."""

    def __iter__(self) -> Iterator[float]:
        return map(float, Chunks())


@pytest.mark.parametrize(
    "make", [lambda: DataLoader(Numbers(), 2, sampler=Chunks()), lambda: DataLoader(InTurn(), 2)], ids=[MAP, STREAM]
)
def test_an_order_that_is_drawn_in_turn_with_the_training_is_reported(make: Callable[[], Any]) -> None:
    loop = Loop(make)
    whole, stopped = loop.whole(), loop.run(7)
    assert isinstance(stopped, Stopped)
    resumed = loop.run(start=stopped)
    assert isinstance(resumed, Ran)
    assert resumed.batches != whole.batches[7:]
    assert resumed.inexact == IN_TURN


@pytest.mark.parametrize(("data", "reason"), [(InTurn, IN_TURN), (Stream, "")])
def test_a_framework_learns_of_an_order_that_is_drawn_in_turn(data: type, reason: str) -> None:
    loader = DataLoader(data(), 2)
    stopped, resumed = (EpochPosition([loader], rng.RngRecorder()) for _ in range(2))
    stopped.begin()
    inner = iter(loader)
    assert stopped.before_fetch()
    stopped.fetched([next(inner)])
    resumed.resume(decode_epoch(stopped.record(3)), 3)
    assert resumed.inexact == ""
    resumed.replay([partial(next, iter(loader))])
    assert resumed.inexact == reason


# -- the registry ---------------------------------------------------------------------------------------------


class Mine(StreamPosition):
    """An adapter of a user's own."""


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered is forgotten."""
    monkeypatch.setattr(registry_module, "_registered", list(registry_module._registered))


@pytest.mark.usefixtures("registered")
def test_an_adapter_is_found_by_the_type_of_the_loader_or_of_its_dataset() -> None:
    recorder = rng.RngRecorder()
    register_loader(Stream, Mine)
    register_loader(f"{__name__}:Epochs", Mine)
    register_loader("no.such.package:Loader", Mine)
    found = [position_of(loader, recorder) for loader in (DataLoader(Stream()), Epochs(), DataLoader(Clocked()))]
    assert [type(position) for position in found] == [Mine, Mine, StreamPosition]


def test_built_in_kinds() -> None:
    recorder = rng.RngRecorder()
    kinds = {name: position_of(make(), recorder).kind for name, make in LOADERS.items()}
    assert set(kinds.values()) == {MAP, STATEFUL, STREAM}
    assert (kinds["distributed"], kinds["stateful"], kinds["list"]) == (MAP, STATEFUL, STREAM)
    replayed: LoaderPosition = position_of(LOADERS["shuffled"](), recorder, replay=True)
    assert replayed.kind == STREAM


# -- frameworks that iterate their loaders themselves ----------------------------------------------------------


class Framework:
    """Iterates its loader itself, and fetches `ahead` batches before they are trained on."""

    def __init__(self, make: Callable[[], Any], ahead: int) -> None:
        self.make, self.ahead = make, ahead
        self.beside: Callable[[Any], object] = lambda loader: None

    def run(self, stop: int | None = None, start: tuple[bytes, bytes, int] | None = None, number: int = 3) -> Any:
        """Two epochs: what was trained on; or the record, the random state and the count, stopped behind `stop`."""
        torch.manual_seed(number)
        loader, recorder = self.make(), rng.RngRecorder()
        position, got = EpochPosition([loader], recorder), []
        position.ahead = self.ahead > 0
        count = stop or 0
        epoch = start[2] // 5 - (start[2] % 5 == 0) if start is not None else 0
        for turn in range(epoch, 2):
            consumed = start[2] - 5 * epoch if start is not None and turn == epoch else 0
            if start is not None and turn == epoch:
                position.resume(decode_epoch(start[0]), consumed)
                inner = iter(loader)
                position.replay([partial(next, inner)])
            else:
                position.begin()
                inner = iter(loader)
            waiting = self._fetch(position, inner, self.ahead, [])
            if start is not None and turn == epoch:
                position.settle()
                rng.restore(rng.decode(start[1]))
            while consumed < 5:
                waiting = self._fetch(position, inner, self.ahead + 1, waiting)
                got.append(waiting.pop(0).tolist())
                consumed += 1
                torch.rand(1)
                self.beside(loader)
                if stop is not None and len(got) == stop:
                    return position.record(consumed), recorder.snapshot(), count
        position.close()
        return got

    def _fetch(self, position: EpochPosition, inner: Iterator[Any], count: int, waiting: list[Any]) -> list[Any]:
        """So many batches, or fewer at the end."""
        while len(waiting) < count:
            compared = position.before_fetch()
            batch = next(inner, None)
            if batch is None:
                break
            waiting.append(batch)
            if compared:
                position.fetched([batch])
        return waiting


@pytest.mark.parametrize(
    ("name", "ahead"),
    [("shuffled", 0), ("shuffled", 1), ("iterable", 0), ("iterable", 1), ("stateful", 1), ("list", 1),
     *[(name, ahead) for name in ("own-data-set", "own-sampler", "own-stream") for ahead in (0, 1)],
     ("own-collate", 0)],
)
def test_a_framework_gets_what_was_due(name: str, ahead: int) -> None:
    framework = Framework(LOADERS[name], ahead)
    whole = framework.run()
    for stop in STOPS:
        left = framework.run(start=framework.run(stop), number=99)
        assert left == whole[stop:], f"stopped behind batch {stop}"


@pytest.mark.parametrize("beside", [lambda loader: next(iter(loader)), list])
@pytest.mark.parametrize("ahead", [0, 1])
def test_somebody_else_looks_at_the_data_of_a_framework(beside: Callable[[Any], object], ahead: int) -> None:
    """In the middle of an epoch, and at its end."""
    framework = Framework(LOADERS["shuffled"], ahead)
    framework.beside = beside
    whole = framework.run()
    for stop in SOME:
        assert framework.run(start=framework.run(stop), number=99) == whole[stop:], f"stopped behind batch {stop}"


def test_somebody_else_looks_at_data_that_are_fetched_ahead() -> None:
    loader, data = shuffled()(), PrefetchedData(rng.RngRecorder())
    data.follow(loader)
    batches = loader.__iter__()  # as accelerate calls it
    next(batches)
    before = data.position
    assert before is not None
    next(loader.__iter__())
    assert data.position == before
    assert len(list(batches)) == 4


def test_a_pass_that_was_ended_early_is_not_under_way() -> None:
    """Its workers persist, and with them what draws its samples."""
    loader, data = shuffled(num_workers=1, persistent_workers=True)(), PrefetchedData(rng.RngRecorder())
    data.follow(loader)
    positions = []
    for _ in range(2):
        batches = loader.__iter__()
        next(batches)
        positions.append(data.position)
        del batches
    assert None not in positions and positions[0] != positions[1]


def test_a_record_of_other_loaders_is_refused() -> None:
    position = EpochPosition([Epochs()], rng.RngRecorder())
    with pytest.raises(CheckpointError, match="read a loader of a map-style data set, and this run has a loader that "):
        position.resume(EpochRecord(kinds=[MAP]), 3)


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", MAGIC + b"\x05\x00\x00\x00ab"])
def test_a_record_that_cannot_be_read(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="data position"):
        decode_epoch(data)


def test_a_record_is_the_same_object_as_long_as_nothing_has_changed() -> None:
    loader = LOADERS["shuffled"]()
    position = EpochPosition([loader], rng.RngRecorder())
    position.begin()
    inner = iter(loader)
    next(inner)
    next(inner)
    first = position.record(2)
    next(inner)
    assert position.record(3) is first
    position.close()
    assert type(loader.batch_sampler) is BatchSampler


def test_a_loader_may_have_a_state_from_its_first_batch_on(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody else asks for it before, so that the training runs without lastgasp."""
    assert Loop(Late).check(STOPS) == ""
    framework = Framework(Late, 1)
    assert framework.run(start=framework.run(3), number=99) == framework.run()[3:]
    assert "Late.state_dict: AttributeError" in caplog.text
