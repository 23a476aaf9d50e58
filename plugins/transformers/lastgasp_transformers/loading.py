"""What a resume must know of the loader that Trainer reads: accelerate's, one of the script's, or over a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher

from lastgasp.adapter.torch import rng

REREAD = ("the data of this epoch were read again from their beginning, which drew random numbers (an order, "
          "augmentations, masks): they may not be those that were due")  # fmt: skip


def reads_of(loader: Any) -> int:
    """How many batches are read below for one of it: by accelerate's dispatcher rank 0 reads those of all ranks."""
    if not isinstance(loader, DataLoaderDispatcher):
        return 1
    if loader.state.process_index:
        return 0
    return 1 if loader.split_batches else int(loader.state.num_processes)


def skip_nothing(original: Any) -> Callable[[Any, int], Any]:
    """In place of Trainer's `skip_first_batches`, where the loader itself begins behind them."""
    return lambda loader, batches: loader


def back_to(due: bytes, devices: Sequence[torch.device]) -> bool:
    """Go back to the random state that was there when the reading began.

    Returns:
        Whether the reading has drawn more than the seed that torch draws for each pass.
    """
    random, state = rng.RngRecorder(devices), rng.decode(due)
    now = random.snapshot()
    rng.restore(state, devices)
    usual = [random.snapshot()]
    torch.empty((), dtype=torch.int64).random_()
    usual.append(random.snapshot())
    rng.restore(state, devices)
    return now not in usual
