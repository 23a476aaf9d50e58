"""Random numbers of loading at a resume: of accelerate's dispatcher, and where data are read from their beginning."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("transformers")
import numpy
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lastgasp.adapter.torch import PrefetchedData, rng
from lastgasp_transformers.loading import REREAD, Rereading, reads_of
from lastgasp_transformers.run import Run


def dispatcher(rank: int, split: bool = False) -> Any:
    loader = object.__new__(DataLoaderDispatcher)
    loader.split_batches, loader.state = split, SimpleNamespace(num_processes=2, process_index=rank)
    return loader


@pytest.mark.parametrize(("rank", "split", "reads"), [(0, False, 2), (0, True, 1), (1, False, 0), (1, True, 0)])
def test_rank_0_reads_the_batches_of_all_ranks(rank: int, split: bool, reads: int) -> None:
    assert reads_of(dispatcher(rank, split)) == reads


def test_any_other_loader_reads_its_own() -> None:
    assert reads_of(DataLoaderShard(torch.zeros(4))) == 1


class Noisy(Dataset[torch.Tensor]):
    """Each sample is another one each time that it is loaded, as with augmentation."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1)


def followed(rank: int) -> tuple[DataLoader[torch.Tensor], PrefetchedData]:
    loader, below, data = dispatcher(rank), DataLoader(Noisy(), 2, shuffle=True), PrefetchedData(rng.RngRecorder())
    loader.base_dataloader = below
    Run._follow(cast(Run, SimpleNamespace(_data=data)), loader)
    return below, data


def test_a_rank_that_reads_nothing_draws_what_it_draws_without_lastgasp() -> None:
    """The dispatcher has all ranks begin a pass, and torch draws a seed for it."""
    below, data = followed(1)
    before = torch.get_rng_state()
    below.__iter__()
    assert not data.followed and not torch.equal(torch.get_rng_state(), before)


def trained(stop: int = 99, start: Any = None) -> Any:
    """What rank 0 dispatches, two batches at a time and these one ahead; where it stands behind `stop` of them."""
    torch.manual_seed(3 if start is None else 99)
    below, data = followed(0)
    if start is not None:
        position, random, count = start
        data.resume(position, count, more=True)
        rng.restore(rng.decode(random))
    batches, got = below.__iter__(), []

    def fetch() -> list[torch.Tensor]:
        found = [next(batches, None) for _ in range(2)]
        return [batch for batch in found if batch is not None]

    waiting = fetch()
    while waiting:
        ahead = fetch()
        got += [torch.cat(waiting).flatten().tolist(), torch.rand(1).item()]
        waiting = ahead
        if len(got) == 2 * stop:
            return data.position, rng.RngRecorder().snapshot(), stop
    return got


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_what_rank_0_draws_for_all_ranks_is_repeated(stop: int) -> None:
    """Also where the next batches are the last of the epoch, and fewer than ranks."""
    whole = trained()
    assert trained(start=trained(stop)) == whole[2 * stop :]


class Stream(IterableDataset[int]):
    """Yields numbers, and draws as it is told."""

    def __init__(self, draw: Callable[[], object]) -> None:
        self.draw = draw

    def __iter__(self) -> Any:
        for number in range(6):
            self.draw()
            yield number


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(
    ("draw", "noted"),
    [(lambda: None, []), (random.random, [REREAD]), (numpy.random.rand, [REREAD]), (lambda: torch.rand(1), [REREAD])],
)
def test_reading_a_stream_again_draws_what_was_not_due(
    draw: Callable[[], object], noted: list[str], read: bool
) -> None:
    """The seed that torch draws for each pass is no random number of the data."""
    notes: list[str] = []
    began = rng.RngRecorder().snapshot()
    torch.rand(1)
    due = rng.RngRecorder().snapshot()
    run: Any = SimpleNamespace(_reread=Rereading(began, due, ()), session=SimpleNamespace(note=notes.append))
    assert rng.RngRecorder().snapshot() == began
    if read:
        next(iter(DataLoader(Stream(draw), 2)))
    Run._around_load_rng_state(run, None, "")
    assert notes == (noted if read else [])
    assert rng.RngRecorder().snapshot() == due
