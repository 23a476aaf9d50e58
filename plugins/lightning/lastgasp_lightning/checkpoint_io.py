"""Every `.ckpt` that Lightning itself writes gets an atomic commit and a manifest, and is verified when loaded."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lastgasp.adapter import GaspConfig, Layout, ManifestWriter, RankStatus
from lastgasp.adapter.checkpoint import DirectoryLayout, SingleFile, Staged, has_manifest
from lastgasp.adapter.torch import load_verified, save_verified, with_added
from lastgasp_lightning.state import KEY

log = logging.getLogger("lastgasp")

LAYOUT, SHARDED = SingleFile(".ckpt"), DirectoryLayout("*.ckpt")
"""Of checkpoints that one rank writes, and of those that each rank writes a part of."""


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Replaces Lightning's TorchCheckpointIO; remote paths go to the original.

    Args:
        original: what it replaces.
        writer: says who writes, for the manifest.
        folders: where a resume looks; a checkpoint saved there makes its step durable.

    Attributes:
        failed: the last save did, so the newest stays that ModelCheckpoint removes for it.
        newest: of those that a resume may begin with (True), and of the others; what an earlier attempt left, once it
            is loaded.
    """

    failed = False
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
        self._later = set[Path]()  # to be removed once there is a newer one
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
            self.failed = True
            return
        finally:
            self._status.progress("data")
        step = checkpoint.get("global_step", 0)
        self.saved(target, step, KEY in checkpoint and checkpoint[KEY]["step"] == step)

    def saved(self, target: Path, step: int, whole: bool) -> None:
        """A checkpoint of `step` is in place; `whole`: a resume may begin with it."""
        self.failed, self.newest[whole] = False, _located(target)
        if whole and target.parent in self._folders:
            self._status.durable, self._durable = max(self._status.durable, step), target
        self._later.discard(_located(target))
        for path in self._later.difference(self.newest.values()):
            self._later.discard(path)
            self.remove_checkpoint(path)

    def _write(self, checkpoint: dict[str, Any], target: Path) -> None:
        moved = partial(self._status.progress, "save")
        with Staged(target, LAYOUT, sha256=self._config.sha256, moved=moved) as staged:
            save_verified(checkpoint, staged)
            staged.publish(self._writer.provenance(checkpoint.get("global_step", 0), "periodic", folder=target.parent))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Verify while loading if there is a manifest; otherwise load as Lightning does.

        Raises:
            DamagedCheckpoint: it does not match its manifest.
        """
        if is_remote(path) or not has_manifest(target := named(Path(path).absolute()), LAYOUT):
            loaded: dict[str, Any] = self._original.load_checkpoint(path, map_location, weights_only)
            return loaded
        found: dict[str, Any] = load_verified(target, LAYOUT, map_location=map_location, weights_only=weights_only)
        self.newest.setdefault(KEY in found, target.resolve())
        if isinstance(record := found.get(KEY), dict):
            with_added(record, target, LAYOUT)
        return found

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove data, then manifest; not yet where this is the newest, as the save that was to replace it failed."""
        target, newest = _located(Path(path)), self.newest.values()
        failed = self.failed and not self._apart and not is_remote(path)
        if failed and target.exists() and (not newest or target in newest):
            log.warning("%s stays until another checkpoint is written: the one that was to replace it was not", path)
            self._later.add(target)
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
