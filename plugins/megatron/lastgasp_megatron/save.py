"""Megatron's own saves: redirect the tracker while they run, and add manifests when their files are complete."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lastgasp.adapter import LastgaspError, NativeManifests, NativeSave, argument
from lastgasp.adapter.checkpoint import FileEntry, Manifest, read_manifest, remove
from lastgasp.adapter.files import make_directory, unique_temp
from lastgasp_megatron.tracker import LAYOUT, NAME, Tracker, checkpoint_path, read_tracker, write_tracker

log = logging.getLogger("lastgasp")

REMOVES = "lastgasp-removes"
"""The thread that removes what --save-retain-interval does not keep."""


class Manifests(NativeManifests):
    """Gives Megatron's checkpoints their manifests, and then the tracker. All ranks call `commit` together.

    Attributes:
        format: what is saved in, Megatron's name.
    """

    format = "torch"

    def share(self, save: NativeSave, files: Mapping[str, Path]) -> dict[str, Path]:
        """Without those of a gasp that torch_dist was saved over."""
        kept = {name: path for name, path in files.items() if not (self.format == "torch_dist" and _is_torch(name))}
        return super().share(save, kept)

    def has(self, save: NativeSave, format: str = "") -> bool:
        """Whether this job has this very step on disk, whole and with its manifest. All ranks ask together.

        Args:
            format: Megatron's, that it must be of; empty for any.
        """
        if self._status.durable != save.step:
            return False
        mine = self.place.rank != 0 or (
            save.layout.manifest_path(save.path).exists()
            and format in ("", "torch_dist" if (save.path / "metadata.json").exists() else "torch")
        )
        try:
            return all(self._gather(f"has/{next(self._numbers)}", b"1" if mine else b""))
        except LastgaspError as error:
            log.warning("it is not known whether %s is there: it is saved again: %s", save.path, error)
            return False

    def _write(self, save: NativeSave, entries: Sequence[FileEntry]) -> None:
        """That takes the gasp's place: Megatron finds the gasp's file first, and loads neither."""
        folders = list(save.path.glob("mp_rank_*")) if self.format == "torch_dist" else []
        if not folders:
            return super()._write(save, entries)
        temp, manifest = unique_temp(save.path), save.layout.manifest_path(save.path)
        make_directory(temp)
        # The manifest first: without it nobody takes what is left of a gasp for a whole one.
        away = [(path, temp / path.name) for path in (manifest, *folders) if path.exists()]
        try:
            for here, there in away:
                here.rename(there)
            super()._write(save, entries)
        except BaseException:
            for here, there in reversed(away):
                if there.exists():
                    there.rename(here)
            raise
        finally:
            shutil.rmtree(temp, ignore_errors=True)

    def committed(self, save: NativeSave) -> None:
        """A crash before this leaves the older checkpoint as the one that Megatron resumes from."""
        super().committed(save)
        write_tracker(save.path.parent, save.step)


class Saver:
    """Wraps `save_checkpoint`. Called on all ranks together.

    While it runs, Megatron writes its tracker to a temporary file; the real one is written atomically after the
    manifest (`Manifests.commit`). With --async-save that is when the save has been finalized. Only
    then the older one may be removed (--save-retain-interval); Megatron finds no tracker there, and removes nothing.

    Args:
        args: Megatron's namespace.

    Attributes:
        training: Megatron's loop runs.
        loaded: what the training began with, as it still is on disk.
    """

    training = False
    loaded: Path | None = None

    def __init__(self, args: Any, manifests: Manifests) -> None:
        self._args, self._manifests = args, manifests
        manifests.format = getattr(args, "ckpt_format", "torch")
        self._waiting: list[tuple[int, Path | None]] = []
        self._redirect: Path | None = None

    def save(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`save_checkpoint`, then its manifest."""
        iteration = int(argument(call, "iteration", args, kwargs, -1))
        special = any(argument(call, name, args, kwargs) for name in ("release", "non_persistent_ckpt"))
        if special or iteration < 0 or not self._args.save:
            return call(*args, **kwargs)
        if self._saves_again(iteration):
            return None
        temp = self._redirected()
        try:
            result = call(*args, **kwargs)
        except BaseException:
            _remove(temp)
            raise
        finally:
            self._redirect = None
        self._waiting.append((iteration, temp))
        if not getattr(self._args, "async_save", False):
            self._commit(len(self._waiting))
        return result

    def _saves_again(self, iteration: int) -> bool:
        """Whether it saves a second time what is on disk, as where the batch grows (--step-batch-size-schedule).

        Meanwhile the files would be torn, and no survivor would save a step that counts as being on disk. Such a save
        comes before the next iteration has begun; behind that it may hold more (the state of the rerun machine). A
        training that had ended before saves at its end what it has loaded, maybe in another format.
        """
        save = NativeSave(checkpoint_path(self._directory, iteration), LAYOUT, iteration)
        if self.training:
            return int(getattr(self._args, "curr_iteration", iteration)) < iteration and self._manifests.has(save)
        if save.path != self.loaded or not self._manifests.has(save, getattr(self._args, "ckpt_format", "torch")):
            return False
        if self._manifests.place.rank == 0:
            log.info("%s is not saved again: nothing was trained since it was loaded", save.path)
        return True

    def finalized(self) -> None:
        """Async saves may have ended, the oldest first: give those their manifests that have on all ranks."""
        done = len(self._waiting) - _under_way()
        if done > 0:
            self._commit(done)

    def close(self) -> None:
        """What is under way is abandoned. Idempotent."""
        waiting, self._waiting = self._waiting, []
        for _, temp in waiting:
            _remove(temp)

    def tracker(self, path: str) -> str:
        """Where Megatron shall write what it wants to write to the tracker at `path`."""
        mine = self._redirect is not None and Path(path).absolute() == self._directory / NAME
        return str(self._redirect) if mine else path

    @property
    def _directory(self) -> Path:
        return Path(self._args.save).absolute()

    def _redirected(self) -> Path | None:
        """Where Megatron writes its tracker. Only rank 0 does."""
        if self._manifests.place.rank != 0:
            return None
        make_directory(self._directory)
        self._redirect = unique_temp(self._directory / NAME)
        return self._redirect

    def _commit(self, number: int) -> None:
        waiting, self._waiting = self._waiting[:number], self._waiting[number:]
        for iteration, temp in waiting:
            before = read_tracker(self._directory)
            new = checkpoint_path(self._directory, iteration)
            if self._manifests.commit(NativeSave(new, LAYOUT, iteration)) and temp is not None:
                self._let_go(before, iteration)
            _remove(temp)

    def _let_go(self, before: Tracker, iteration: int) -> None:
        """Remove what the tracker named before, as --save-retain-interval says; behind a gasp what that followed, too.

        In a thread, as Megatron does it.
        """
        every = int(getattr(self._args, "save_retain_interval", None) or 0)
        old = [step for step in _followed(self._directory, before) if step != iteration and every and step % every]
        if old:
            threading.Thread(target=_remove_iterations, args=(self._directory, old), name=REMOVES).start()


def _is_torch(name: str) -> bool:
    """Whether a file, by its name in manifests, is of format torch."""
    return Path(name).parts[1].startswith("mp_rank_")


def _under_way() -> int:
    """Async saves that Megatron has not finalized; the same on all ranks."""
    queue: Any = getattr(sys.modules.get("megatron.training.async_utils"), "_async_calls_queue", None)
    return 0 if queue is None else int(queue.get_num_unfinalized_calls())


def _followed(directory: Path, tracker: Tracker) -> Iterator[int]:
    """The iteration that it names, and as long as that is a gasp the one before."""
    step, newer = tracker.iteration, tracker.iteration + 1
    while 0 < step < newer:
        yield step
        found = read_manifest(LAYOUT.manifest_path(checkpoint_path(directory, step)))
        parent = found.parent if isinstance(found, Manifest) and found.kind == "gasp" else None
        step, newer = (LAYOUT.step(directory / parent) or 0) if parent else 0, step


def _remove_iterations(directory: Path, iterations: list[int]) -> None:
    for path in (checkpoint_path(directory, one) for one in iterations):
        if path.is_symlink() or not path.exists():
            continue
        try:
            remove(path, LAYOUT)
            log.info("%s was removed, as --save-retain-interval says", path)
        except (OSError, LastgaspError) as error:
            log.warning("%s could not be removed: %s", path, error)


def _remove(temp: Path | None) -> None:
    if temp is not None:
        temp.unlink(missing_ok=True)
