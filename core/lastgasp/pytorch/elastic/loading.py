"""Micro-batches from a dataset, each with random numbers of its own, whichever process loads it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from lastgasp.pytorch.elastic.plan import digest_of, seed_of

LOADING, TRAINING, BEFORE, BEHIND = 1, 2, 3, 4
"""What random numbers are drawn for: to load a micro-batch, to train with it, before and behind those of a step."""


class Micro(NamedTuple):
    """What to load: the samples of one micro-batch of the step that begins at `offset`."""

    epoch: int
    offset: int
    number: int
    samples: tuple[int, ...]


class Loaded(NamedTuple):
    """A micro-batch, and the digest of the samples that it was made of."""

    number: int
    size: int
    batch: Any
    digest: int


class Reader:
    """A dataset of micro-batches, for a DataLoader that makes no batches itself.

    Args:
        dataset: map-style; collate: makes a batch of its samples.
        seed: of random numbers.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate or default_collate, seed

    def __getitem__(self, micro: Micro) -> Loaded:
        with drawn_apart(seed_of(self._seed, LOADING, *micro[:3])):
            batch = self._collate([self._dataset[number] for number in micro.samples])
        return Loaded(micro.number, len(micro.samples), batch, digest_of(*micro))


class Wanted:
    """The sampler of that DataLoader: what one rank needs, step by step.

    Args:
        begin: makes the iterator.
    """

    def __init__(self, begin: Callable[[], Iterator[Micro]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Micro]:
        return self._begin()


def seed_all(seed: int) -> None:
    """Seed the generators of torch, on all devices, of numpy and of Python."""
    torch.manual_seed(seed >> 1)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def drawn_apart(seed: int) -> Iterator[None]:
    """Draw from generators with this seed, and leave those of the process as they were."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    torch.default_generator.manual_seed(seed >> 1)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
