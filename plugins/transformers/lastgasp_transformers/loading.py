"""What a resume must know of the loader that Trainer reads: accelerate's, one of the script's, or over a stream."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import DataLoader

from lastgasp.adapter.torch import rng
from lastgasp_transformers.files import OPTIMIZER, SCHEDULER

REREAD = ("the data of this epoch were read again from their beginning, which drew random numbers (an order, "
          "augmentations, masks): they may not be those that were due")  # fmt: skip


def reads_of(loader: Any) -> int:
    """How many batches are read below for one of it: by accelerate's dispatcher rank 0 reads those of all ranks."""
    if not isinstance(loader, DataLoaderDispatcher):
        return 1
    if loader.state.process_index:
        return 0
    return 1 if loader.split_batches else int(loader.state.num_processes)


def draws_a_seed(loader: Any) -> bool:
    """Whether each pass over it takes one number of the process's generator, for workers: torch's loaders do."""
    return isinstance(loader, DataLoader) and loader.generator is None


def skip_nothing(original: Any) -> Callable[[Any, int], Any]:
    """In place of Trainer's `skip_first_batches`, where the loader itself begins behind them."""
    return lambda loader, batches: loader


@contextmanager
def classes_allowed(path: Path) -> Iterator[None]:
    """While Trainer loads from a checkpoint that has a record: torch refuses states with objects (GaLore's projectors).

    They come from whoever wrote the record, which may hold pickle, too.
    """
    names, found = set[str](), list[Any]()
    for file in (path / OPTIMIZER, path / SCHEDULER):
        with suppress(OSError, ValueError):  # not there, or of an older format: Trainer's own error says so
            names |= {*torch.serialization.get_unsafe_globals_in_checkpoint(file)}
    for name in names:
        with suppress(ImportError, AttributeError, ValueError):
            found.append((pkgutil.resolve_name(name), name))
    with torch.serialization.safe_globals(found):
        yield


class Rereading:
    """Of data that are read again from their beginning: under the random state of this start, as Trainer does it.

    That is the state in which the order of the first epoch was drawn. What training has drawn until `due` is not
    repeated.

    Args:
        began: the random state of this start; None: there is nothing to skip, and reading begins under `due`.
        due: that of the boundary.
        seeded: as `draws_a_seed`.
    """

    def __init__(self, began: bytes | None, due: bytes, devices: Sequence[torch.device], seeded: bool = True) -> None:
        self._seeded, self._devices = seeded, devices
        self._began, self._due = rng.decode(began or due), rng.decode(due)
        rng.restore(self._began, devices)

    def end(self) -> bool:
        """Go back to the state that is due. Returns whether more was drawn than torch's own seed for each pass."""
        random = rng.RngRecorder(self._devices)
        now = random.snapshot()
        rng.restore(self._began, self._devices)
        usual = [random.snapshot()]
        if self._seeded:
            torch.empty((), dtype=torch.int64).random_()
            usual.append(random.snapshot())
        rng.restore(self._due, self._devices)
        return now not in usual
