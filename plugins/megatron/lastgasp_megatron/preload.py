"""Format torch in one pass: what a rank verifies is what it loads, and what Megatron's `torch.load` is handed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lastgasp.adapter import Preload
from lastgasp.adapter.checkpoint import Candidate, FileEntry
from lastgasp.adapter.torch import load_entry
from lastgasp_megatron.own_buffers import KEY
from lastgasp_megatron.steps import wrap

MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"


class MegatronPreload(Preload):
    """The files of format torch that this rank will load.

    Args:
        own: this rank's file of an iteration, relative to the directory of checkpoints; called when it is needed.
        optimizer: Megatron's own loading reads distrib_optim.pt, on the rank with the first part of each.
        first: this rank has the first part.

    Attributes:
        own: what the file of the model that was loaded last holds of the buffers of each rank (`own_buffers`).
    """

    own: dict[str, Any] | None = None

    def __init__(self, own: Callable[[int], str], *, optimizer: bool, first: bool) -> None:
        super().__init__()
        self._own, self._optimizer, self._first = own, optimizer, first

    def covers(self, candidate: Candidate) -> list[str]:
        """By their names."""
        names = (MODEL, OPTIMIZER) if self._optimizer else (MODEL,)
        return [entry.path for entry in _entries(candidate) if Path(entry.path).name in names]

    def mine(self, candidate: Candidate) -> list[FileEntry]:
        """Of this rank's part of the model, and of the optimizer."""
        model = self._own(candidate.step or 0)
        names = {model}
        if self._optimizer and self._first:
            names.add(f"{model.rpartition('/')[0]}/{OPTIMIZER}")
        return [entry for entry in _entries(candidate) if entry.path in names]

    def parse(self, path: Path, entry: FileEntry) -> Any:
        """weights_only, as torch's default for Megatron: nothing is run, whatever the file holds."""
        return load_entry(path, entry, map_location="cpu", weights_only=True)

    @contextmanager
    def handed_out(self) -> Iterator[None]:
        """Within it, `torch.load` of a file loaded before returns its content, once and to this thread only."""
        thread, self.own = threading.get_ident(), None

        def around(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            mine = threading.get_ident() == thread and len(args) == 1 and isinstance(args[0], str | Path)
            found = self.take(Path(args[0])) if mine and _plain(kwargs) else None
            found = original(*args, **kwargs) if found is None else found
            if mine and isinstance(found, dict) and KEY in found:
                self.own = found.pop(KEY)
            return found

        undo = wrap(torch, "load", around)
        try:
            yield
        finally:
            undo()
            self.forget()


def _entries(candidate: Candidate) -> tuple[FileEntry, ...]:
    return candidate.manifest.files if candidate.manifest is not None else ()


def _plain(options: dict[str, Any]) -> bool:
    """Whether a call asks for what `read` has loaded; Megatron's own files lie on the CPU."""
    more = {name: value for name, value in options.items() if name not in ("map_location", "weights_only")}
    return not more and options.get("map_location") in (None, "cpu", torch.empty(0).device)
