"""Kinds of data loaders, by how the position in them is restored.

* `map`: a DataLoader over a map-style dataset. Its sampler is repeated under the random state under which it
  began, and the consumed part is dropped without loading data.
* `stateful`: the loader has `state_dict` and `load_state_dict`; it knows its own position.
* `stream`: anything else (IterableDataset, list, generator). It is iterated again from the start, under the random
  state of then, and the consumed batches are thrown away. A dataset whose *order* depends on random numbers drawn
  in the main process between batches, in turn with the model's own, cannot be repeated.

Random augmentation inside worker processes of a map-style loader cannot be restored bit for bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

MAP, STATEFUL, STREAM = "map", "stateful", "stream"
_QUIET_S = 2.0


@runtime_checkable
class _Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> None: ...


def kind_of(loader: Any) -> str:
    """How the position in `loader` is restored: MAP, STATEFUL or STREAM."""
    if isinstance(loader, _Stateful):
        return STATEFUL
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return MAP if plain and loader._dataset_kind == _DatasetKind.Map else STREAM


class SkipProgress:
    """`range(total)`, with a progress bar when it lasts and somebody watches."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._stack = ExitStack()

    def __enter__(self) -> Iterator[int]:
        return self._steps()

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _steps(self) -> Iterator[int]:
        begun = time.monotonic()
        bar: Any = None
        for done in range(self._total):
            if bar is None and time.monotonic() - begun > _QUIET_S and sys.stderr.isatty():
                bar = self._bar(done)
            yield done
            if bar is not None:
                bar()

    def _bar(self, done: int) -> Callable[[], None]:
        from rich.console import Console
        from rich.progress import Progress

        shown = self._stack.enter_context(Progress(console=Console(stderr=True)))
        task = shown.add_task("lastgasp: skipping consumed batches", total=self._total, completed=done)
        return lambda: shown.advance(task)
