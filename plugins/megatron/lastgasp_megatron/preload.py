"""Format torch in one pass: what a rank verifies is what it loads, and what Megatron's `torch.load` is handed.

Read for its digests first and for Megatron afterwards, a checkpoint that is not in the page cache takes twice as long.
Nothing is handed out before all of its file has verified, and all ranks have agreed on the checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lastgasp.adapter import DamagedCheckpoint, cause_of
from lastgasp.adapter.checkpoint import Candidate, ChunkReader, Damage, FileEntry, chunks_of
from lastgasp.adapter.torch import load_entry

log = logging.getLogger("lastgasp")

MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"


class Preload:
    """The files of format torch that this rank will load, of the candidate that was verified last.

    Args:
        own: this rank's file of an iteration, relative to the directory of checkpoints; called when it is needed.
        optimizer: Megatron's own loading reads distrib_optim.pt, on the rank with the first part of each.
        first: this rank has the first part.
    """

    def __init__(self, own: Callable[[int], str], *, optimizer: bool, first: bool) -> None:
        self._own, self._optimizer, self._first = own, optimizer, first
        self._loaded: dict[str, Any] = {}

    def covers(self, candidate: Candidate) -> list[str]:
        """The files that some rank or other loads, and verifies; the same on all ranks."""
        names = (MODEL, OPTIMIZER) if self._optimizer else (MODEL,)
        return [entry.path for entry in _entries(candidate) if Path(entry.path).name in names]

    def read(self, candidate: Candidate) -> list[Damage]:
        """Load this rank's files and verify them; returns what is damaged. What was loaded before is forgotten."""
        self._loaded.clear()
        damages: list[Damage] = []
        for entry in self._mine(candidate):
            path = candidate.path.parent / entry.path
            try:
                # weights_only, as torch's default for Megatron: nothing is run, whatever the file holds.
                self._loaded[str(path.absolute())] = load_entry(path, entry, map_location="cpu", weights_only=True)
            except DamagedCheckpoint as error:
                damages += _damages(candidate, entry, error)
            except Exception as error:  # its bytes have verified: Megatron may load it, or report why not
                log.info("%s will be read again by Megatron: %s", path, cause_of(error))
        return damages

    def forget(self) -> None:
        """Release what was loaded and not asked for."""
        self._loaded.clear()

    @contextmanager
    def handed_out(self) -> Iterator[None]:
        """Within, `torch.load` of a file that was loaded gives what it holds, once and to this thread."""
        original, thread = torch.load, threading.get_ident()

        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and isinstance(f, str | Path) and not args and _plain(kwargs):
                found = self._loaded.pop(str(Path(f).absolute()), None)
                if found is not None:
                    return found
            return original(f, *args, **kwargs)

        torch.load = load
        try:
            yield
        finally:
            if torch.load is load:
                torch.load = original
            self.forget()

    def _mine(self, candidate: Candidate) -> list[FileEntry]:
        model = self._own(candidate.step or 0)
        names = {model}
        if self._optimizer and self._first:
            names.add(f"{model.rpartition('/')[0]}/{OPTIMIZER}")
        return [entry for entry in _entries(candidate) if entry.path in names]


def _entries(candidate: Candidate) -> tuple[FileEntry, ...]:
    return candidate.manifest.files if candidate.manifest is not None else ()


def _plain(options: dict[str, Any]) -> bool:
    """Whether a call asks for what `read` has loaded; Megatron's own files lie on the CPU."""
    more = {name: value for name, value in options.items() if name not in ("map_location", "weights_only")}
    return not more and options.get("map_location") in (None, "cpu", torch.empty(0).device)


def _damages(candidate: Candidate, entry: FileEntry, error: DamagedCheckpoint) -> list[Damage]:
    """With their places, and whether they are proven: what is good at a second look is not."""
    found = ChunkReader(chunks_of(candidate.path, [entry])).run(threads=2)
    return found or [Damage(file=entry.path, kind="unreadable", detail=reason) for reason in error.reasons]
