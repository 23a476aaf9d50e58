"""What Trainer itself saves: manifests for it, which of it may become the best model, and its rotation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import rotate_checkpoints

from lastgasp import adapter
from lastgasp.adapter import checkpoint
from lastgasp_transformers.files import INCOMPLETE, LAYOUT, OPTIMIZER, RECORD, Record


class OwnSaves(adapter.NativeManifests):
    """Manifests for what Trainer itself saves; the ranks' auxiliary states are put beside its files.

    Args:
        record: makes what goes into a checkpoint that is written, from the auxiliary states of the ranks.
    """

    def __init__(
        self, writer: adapter.ManifestWriter, run: adapter.AdapterRun,
        record: Callable[[Path, Mapping[int, bytes]], Record],
    ) -> None:  # fmt: skip
        super().__init__(writer, run.gather_saved, run.session.status)
        self._record = record

    def begin(self, path: Path) -> None:
        """On rank 0, before any rank writes: what stands there is about to be overwritten."""
        LAYOUT.manifest_path(path).unlink(missing_ok=True)
        path.mkdir(parents=True, exist_ok=True)
        (path / INCOMPLETE).write_text("Trainer is writing this checkpoint, or was killed while it did.\n")

    def forget(self, path: Path) -> None:
        """On rank 0: Trainer writes alone, and perhaps only weights, which belong to nothing that stands there."""
        for stale in (LAYOUT.manifest_path(path), path / RECORD, path / OPTIMIZER):
            stale.unlink(missing_ok=True)

    def add_aux(self, save: adapter.NativeSave, aux: Mapping[int, bytes]) -> None:
        """On rank 0, when all ranks have written."""
        torch.save(self._record(save.path, aux), save.path / RECORD)
        (save.path / INCOMPLETE).unlink()

    def adopt(self, save: adapter.NativeSave) -> None:
        """On rank 0: a good gasp of this very step is Trainer's own checkpoint from now on, and no gasp any more."""
        found = checkpoint.read_manifest(LAYOUT.manifest_path(save.path))
        if isinstance(found, checkpoint.Manifest) and found.kind == "gasp":
            with contextlib.suppress(adapter.CheckpointError):  # somebody has put more files there: it stays a gasp
                checkpoint.write_manifest(save.path, LAYOUT, self.provenance(save), found.files)


def gasps_in(directory: Path) -> set[int]:
    """The steps of which a fault has saved there what Trainer itself has not (yet)."""
    found = checkpoint.candidates([directory], LAYOUT)
    return {one.manifest.step for one in found if one.manifest is not None and one.manifest.kind == "gasp"}


def call_save(state: Any, gasps: set[int], original: Callable[..., object], *args: Any) -> None:
    """Have Trainer save. It takes whatever `checkpoint-N` there is of the best step N for its best model.

    Where that is a gasp, an undisturbed run has none of that step, and keeps the best model that it has.
    """
    best = state.best_global_step
    if best not in gasps:
        original(*args)
        return

    def with_best(save: Callable[[str], None]) -> Callable[[str], None]:
        def save_to_json(path: str) -> None:
            state.best_global_step = best  # that it is the best step is written all the same
            save(path)

        return save_to_json

    state.best_global_step = None
    undo = adapter.replace_attribute(state, "save_to_json", with_best)
    try:
        original(*args)
    finally:
        undo()
        state.best_global_step = best


@contextlib.contextmanager
def unless_a_gasp_is_written(status: Any, state: Any) -> Iterator[None]:
    """Trainer's save, each file of which waits while a fault is being answered.

    A gasp of the same step moves aside what Trainer has written: a file that it opened behind that would fall into the
    gasp. One that is open then is moved with the others.

    Raises:
        Released: the fault was answered.
    """
    here = threading.get_ident()

    def first(original: Callable[..., object]) -> Callable[..., object]:
        def write(*args: Any, **options: Any) -> object:
            if threading.get_ident() == here:  # a gasp is written by another thread
                status.between_steps()
            return original(*args, **options)

        return write

    status.between_steps()
    undo = [adapter.replace_attribute(owner, name, first) for owner, name in ((torch, "save"), (state, "save_to_json"))]
    try:
        yield
    finally:
        for one in reversed(undo):
            one()


def rotate(args: Any, state: Any) -> None:
    """As Trainer does at the end of a save."""
    if args.should_save:
        rotate_checkpoints(args.output_dir, args.save_total_limit, state.best_model_checkpoint, use_mtime=True)
        remove_orphans_of(args)


def remove_orphans_of(args: Any) -> None:
    """Remove the manifests of what Trainer has removed."""
    if args.should_save:
        with contextlib.suppress(OSError):  # the next save looks again
            checkpoint.remove_orphans(Path(args.output_dir), LAYOUT)
