"""Files of Keras and TensorFlow that hold a trained model in a format that lastgasp cannot verify."""

from __future__ import annotations

import os
from pathlib import Path

_ENDINGS = (".keras", ".h5", ".hdf5")
_NAMES = ("saved_model.pb", "training_metadata.json")
"""Markers of SavedModel and of Keras' BackupAndRestore."""
_CHIEF = "chief"
"""Where its BackupAndRestore keeps a checkpoint that knows epochs and batches."""
REASON = "has a format that lastgasp cannot verify; it knows those of tf.train.Checkpoint and its managers"


def is_foreign(path: Path) -> bool:
    """Whether it is a file of Keras, a SavedModel, or a directory of BackupAndRestore."""
    if path.name.endswith(_ENDINGS):
        return True
    return path.is_dir() and any((path / name).exists() for name in _NAMES)


def others_in(directory: Path) -> list[Path]:
    """Directories in it with a state file of their own: what another manager of the script keeps, or of other runs."""
    return sorted(path.parent for path in directory.glob("*/checkpoint") if ".corrupt" not in path.parent.name)


def foreign_in(directory: Path) -> list[Path]:
    """Such files and directories in `directory`, itself, and what BackupAndRestore of Keras 2 keeps in it."""
    try:
        inside = [Path(directory, name) for name in sorted(os.listdir(directory))]
    except OSError:
        return []
    seen = [path for path in inside if not path.name.startswith(".") and ".corrupt" not in path.name]
    found = [path for path in seen if is_foreign(path) or (path.name == _CHIEF and (path / "checkpoint").is_file())]
    return [directory, *found] if is_foreign(directory) else found
