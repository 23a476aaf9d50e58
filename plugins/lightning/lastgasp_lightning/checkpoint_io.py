"""Every `.ckpt` that Lightning itself writes gets an atomic commit and a manifest, and is verified when loaded."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lastgasp.adapter import GaspConfig, Layout, ManifestWriter, Preload, RankStatus
from lastgasp.adapter.checkpoint import DirectoryLayout, Manifest, SingleFile, Staged, has_manifest, read_manifest
from lastgasp.adapter.files import remove_stale_temps
from lastgasp.adapter.torch import load_verified, save_verified, with_added
from lastgasp_lightning.compat import TAKES_WEIGHTS_ONLY, given_on
from lastgasp_lightning.state import KEY

log = logging.getLogger("lastgasp")

LAYOUT, SHARDED = SingleFile(".ckpt"), DirectoryLayout("*.ckpt")
"""Of checkpoints that one rank writes, and of those that each rank writes a part of."""

UNKNOWN = "", -1
_Saver = tuple[str, int]
"""Of a ModelCheckpoint: its key, and 0 for its best ones, 1 for its last one."""


def _here(storage: Any, location: str) -> Any:
    """Load to the CPU."""
    return storage


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Replaces Lightning's TorchCheckpointIO; remote paths go to the original.

    Args:
        original: what it replaces.
        writer: says who writes, for the manifest.
        folders: where a resume looks; a checkpoint saved there makes its step durable.

    Attributes:
        callbacks: among them each ModelCheckpoint that saves.
        failed: what the last save did not write, so that the newest, and the only one that its ModelCheckpoint has
            left, stay although it removes them; None where it did.
        newest: of those that a resume may begin with (True), and of the others; what an earlier attempt left, once it
            is loaded.
        installed: Lightning reads and writes by it, and not by the user's own.
        preload: has loaded what was selected, while it was verified; None while nothing is selected.
    """

    failed: Path | None = None
    installed = False
    preload: Preload | None = None
    _apart = False  # a wrapper saves on a thread of its own: what failed is no longer the newest

    def __init__(
        self,
        original: CheckpointIO,
        config: GaspConfig,
        writer: ManifestWriter,
        status: RankStatus,
        folders: list[Path],
    ) -> None:
        self._original, self._config, self._writer, self._status = original, config, writer, status
        self._folders = [folder.absolute() for folder in folders]
        self._durable: Path | None = None
        self.newest = dict[bool, Path]()
        self.callbacks: Sequence[Any] = ()
        self._later = dict[Path, _Saver | None]()  # to be removed once there is a newer one, and this one has saved
        self._restore: Any = lambda: None

    @classmethod
    def install(
        cls, trainer: Any, config: GaspConfig, writer: ManifestWriter, status: RankStatus
    ) -> VerifiedCheckpointIO:
        """Put it into the trainer's strategy, inside of wrappers such as AsyncCheckpointIO.

        A user's own CheckpointIO is kept, and its checkpoints get no manifest, which is logged.
        """
        owner, name = trainer.strategy, "checkpoint_io"
        while isinstance(getattr(owner, name), _WrappingCheckpointIO):
            owner, name = getattr(owner, name), "checkpoint_io"
        original = getattr(owner, name)
        ours = cls(original, config, writer, status, search_folders(trainer, config))
        if type(original) is not TorchCheckpointIO:
            log.warning(
                "checkpoints written by %s get no manifest, so a resume uses only what LastGasp itself saved",
                type(original).__name__,
            )
            return ours
        ours.installed, ours.callbacks = True, trainer.callbacks
        ours._apart = owner is not trainer.strategy
        setattr(owner, name, ours)
        ours._restore = lambda: setattr(owner, name, original)
        return ours

    def uninstall(self) -> None:
        """Put the original back. Idempotent."""
        self._restore()
        self._restore = lambda: None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """As TorchCheckpointIO, but durable, atomic and with a manifest. A failing disk does not end training.

        An OSError is logged and training continues: the older checkpoints remain, and the next save may succeed.
        """
        if storage_options is not None or is_remote(path):
            self._original.save_checkpoint(checkpoint, path, storage_options)
            return
        self._status.progress("save")
        target = Path(path).absolute()
        try:
            self._write(checkpoint, target)
        except OSError as error:
            log.error("checkpoint %s could not be written (%s): training continues; older ones remain", target, error)
            self.failed = target
            return
        finally:
            self._status.progress("data")
        step = checkpoint.get("global_step", 0)
        self.saved(target, step, KEY in checkpoint and checkpoint[KEY]["step"] == step)

    def saved(self, target: Path, step: int, whole: bool) -> None:
        """A checkpoint of `step` is in place; `whole`: a resume may begin with it."""
        located = _located(target)
        self.failed, self.newest[whole] = None, located
        if whole and target.parent in self._folders:
            self._status.durable, self._durable = max(self._status.durable, step), target
            if self._writer.place.rank == 0:  # of a rank that was replaced in its save: no start comes that would do it
                with contextlib.suppress(OSError):
                    remove_stale_temps(target.parent)
        self._later.pop(located, None)
        saver, _ = self._saver_of(located)
        self._later = {path: None if due == saver else due for path, due in self._later.items()}
        for path in {path for path, due in self._later.items() if due is None}.difference(self.newest.values()):
            del self._later[path]
            self.remove_checkpoint(path)

    def _saver_of(self, located: Path) -> tuple[_Saver | None, set[Path]]:
        """Which ModelCheckpoint saves under this name, as its best ones or its last one, and all names of these."""
        for callback in self.callbacks:
            if isinstance(callback, ModelCheckpoint):
                best = {*callback.best_k_models, callback.best_model_path}
                for number, names in enumerate((best, {callback.last_model_path})):
                    if located in (found := {_located(Path(name)) for name in names if name}):
                        return (callback.state_key, number), found
        return None, set()

    def _write(self, checkpoint: dict[str, Any], target: Path) -> None:
        moved = partial(self._status.progress, "save")
        with Staged(target, LAYOUT, sha256=self._config.sha256, moved=moved) as staged:
            save_verified(checkpoint, staged)
            staged.publish(self._writer.provenance(checkpoint.get("global_step", 0), "periodic", folder=target.parent))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = _here,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Verify while loading if there is a manifest; otherwise load as Lightning does.

        Raises:
            DamagedCheckpoint: it does not match its manifest.
        """
        if is_remote(path) or not has_manifest(target := named(Path(path).absolute()), LAYOUT):
            loaded: dict[str, Any] = self._original.load_checkpoint(path, map_location, *given_on(weights_only))
            return loaded
        weights_only = weights_only if TAKES_WEIGHTS_ONLY else False
        plain = self.preload is not None and map_location is _here and weights_only is False
        found: dict[str, Any] | None = self.preload.take(target) if self.preload is not None and plain else None
        if found is None:
            found = load_verified(target, LAYOUT, map_location=map_location, weights_only=weights_only)
        self.newest.setdefault(KEY in found, target.resolve())
        if isinstance(record := found.get(KEY), dict):
            with_added(record, target, LAYOUT)
        return found

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove data, then manifest; not yet where the save that was to replace it failed, and this is the newest, or
        the only one left of its ModelCheckpoint's.
        """
        target, newest = _located(Path(path)), self.newest.values()
        if self.failed is not None and not self._apart and not is_remote(path) and target.exists():
            saver, known = self._saver_of(_located(self.failed))
            if any(other.exists() for other in known - {target}):
                saver = None
            if saver is not None or not newest or target in newest:
                log.warning("%s stays until another one is written: the one that was to replace it was not", path)
                self._later[target] = saver
                return
        self._original.remove_checkpoint(path)
        if not is_remote(path):
            LAYOUT.manifest_path(Path(path)).unlink(missing_ok=True)
            self.gone(Path(path).absolute())

    def gone(self, target: Path) -> None:
        """What had this name is not there any more."""
        if target == self._durable:
            self._status.durable = 0


def named(path: Path, layout: Layout = LAYOUT) -> Path:
    """What `path` leads to, if it is a link that has no manifest of its own: `ModelCheckpoint(save_last="link")`."""
    if not path.is_symlink() or has_manifest(path, layout):
        return path
    return Path(os.path.normpath(path.parent / os.readlink(path)))


def saved_by(path: str) -> tuple[str, int]:
    """The job that has saved this checkpoint, and of which step; `UNKNOWN` where it has no manifest."""
    if path and not is_remote(path):
        for layout in (LAYOUT, SHARDED):
            found = read_manifest(layout.manifest_path(named(Path(path), layout)))
            if isinstance(found, Manifest):
                return found.job, found.step
    return UNKNOWN


def _located(path: Path) -> Path:
    """The file of this name, whatever it may link to, where its folder is really."""
    return path.parent.resolve() / path.name


def search_folders(trainer: Any, config: GaspConfig) -> list[Path]:
    """Where a resume looks: LastGasp's directory, and those that the user gave to ModelCheckpoint.

    Lightning's default directories change their names with every run.
    """
    named = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    folders = [config.directory, *(Path(name) for name in named if name and not is_remote(name))]
    return list(dict.fromkeys(folder.absolute() for folder in folders))


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether only fsspec knows it."""
    return "://" in os.fspath(path)
