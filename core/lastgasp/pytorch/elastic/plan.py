"""Which samples are used in which step, and by whom: pure, and the same on every rank, however many there are.

The samples of an epoch stand in one order, from the seed and the epoch. A step takes the next ones, cut into
micro-batches: one for each rank that the job has when it is complete. So the samples of a step do not depend on how
many ranks are there, only who does them does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from lastgasp.config import integer
from lastgasp.errors import ConfigError

_WRAP = 1 << 64


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The samples of all steps.

    Args:
        samples: of an epoch.
        batch_size: samples of a micro-batch.
        ranks: micro-batches of a step: how many ranks the job has when it is complete.
        seed: of the order, and of all random numbers that are drawn for a micro-batch.
        shuffle: another order in each epoch; False for the dataset's own.
        drop_last: leave out the last step of an epoch where it would be smaller.

    Raises:
        ConfigError: a number that is too small.
    """

    samples: int
    batch_size: int
    ranks: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        integer("the dataset's length", self.samples, 1, "An ElasticLoader needs a dataset with __len__, not empty.")
        integer("batch_size", self.batch_size, 1, "It is the number of samples of one micro-batch.")
        integer("ranks", self.ranks, 1, "It is the number of ranks of the complete job.")
        if self.drop_last and not self.steps(self.ranks):
            raise ConfigError("drop_last", True, f"False for {self.samples} samples", "An epoch would have no step.")

    def steps(self, micros: int) -> int:
        """Steps of an epoch with so many micro-batches each; the last one may be smaller."""
        return len(self.offsets(0, micros))

    def offsets(self, begin: int, micros: int) -> range:
        """Where the steps begin in the order, from `begin` to the end of the epoch."""
        size = self.batch_size * micros
        return range(begin, self.samples - size + 1 if self.drop_last else self.samples, size)

    def order(self, epoch: int) -> np.ndarray:
        """The numbers of all samples, each once."""
        if not self.shuffle:
            return np.arange(self.samples, dtype="<i8")
        generator = torch.Generator().manual_seed(seed_of(self.seed, epoch) >> 1)
        return np.asarray(torch.randperm(self.samples, generator=generator).numpy(), dtype="<i8")

    def cut(self, offset: int, micros: int) -> list[tuple[int, int]]:
        """Where the micro-batches of the step that begins at `offset` begin and end in the order.

        A last step that is too small for all is divided as evenly as it goes; some may then be empty.
        """
        total = max(0, min(self.batch_size * micros, self.samples - offset))
        return [(offset + total * n // micros, offset + total * (n + 1) // micros) for n in range(micros)]


def owners(micros: int, ranks: int) -> list[range]:
    """The micro-batches that each of the `ranks` does: neighbours, in order; every rank has one at least.

    Raises:
        ValueError: there are fewer micro-batches than ranks.
    """
    if not 1 <= ranks <= micros:
        raise ValueError(f"{micros} micro-batches cannot be shared among {ranks} ranks")
    return [range(micros * rank // ranks, micros * (rank + 1) // ranks) for rank in range(ranks)]


def seed_of(*numbers: int) -> int:
    """64 bits that depend on all of the numbers."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}q", *numbers))


def digest_of(epoch: int, offset: int, micro: int, samples: Sequence[int] | np.ndarray) -> int:
    """64 bits for the samples that were used as one micro-batch of the step that begins at `offset`."""
    ids = np.ascontiguousarray(samples, dtype="<i8")
    return xxhash.xxh3_64_intdigest(ids.tobytes(), seed=seed_of(epoch, offset, micro, len(ids)))


def added(digests: Iterable[int]) -> int:
    """The digest of a step from those of its micro-batches, which may come in any order."""
    return sum(digests) % _WRAP


def signed(value: int) -> int:
    """64 bits as a tensor of int64 holds them, where sums wrap."""
    return value - _WRAP if value >= _WRAP >> 1 else value


def unsigned(value: int) -> int:
    """The inverse of `signed`."""
    return value % _WRAP


def chained(before: str, step: int) -> str:
    """The digest of all steps so far: 128 bits as hexadecimal digits, from that before the step and the step's own."""
    return xxhash.xxh3_128_hexdigest(bytes.fromhex(before) + step.to_bytes(8, "little"))


def due(epoch: int, offset: int, order: np.ndarray, cut: Sequence[tuple[int, int]]) -> int:
    """The digest that the step at `offset` must have: of all its micro-batches that are not empty."""
    parts = ((n, order[begin:end]) for n, (begin, end) in enumerate(cut) if begin < end)
    return added(digest_of(epoch, offset, n, ids) for n, ids in parts)
