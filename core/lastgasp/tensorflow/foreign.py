"""Files of Keras and TensorFlow that hold a trained model in a format that lastgasp cannot verify."""

from __future__ import annotations

import os
from pathlib import Path

_ENDINGS = (".keras", ".h5", ".hdf5")
_NAMES = ("saved_model.pb", "training_metadata.json")
"""Markers of SavedModel and of Keras' BackupAndRestore."""
REASON = "has a format that lastgasp cannot verify; it knows those of tf.train.Checkpoint and its managers"


def is_foreign(path: Path) -> bool:
    """Whether it is a file of Keras, a SavedModel, or a directory of BackupAndRestore."""
    if path.name.endswith(_ENDINGS):
        return True
    return path.is_dir() and any((path / name).exists() for name in _NAMES)


def foreign_in(directory: Path) -> list[Path]:
    """Such files and directories in `directory`, `directory` itself, and directories with a state file of their own."""
    try:
        inside = [Path(directory, name) for name in sorted(os.listdir(directory))]
    except OSError:
        return []
    seen = [path for path in inside if not path.name.startswith(".") and ".corrupt" not in path.name]
    found = [path for path in seen if is_foreign(path) or (path.is_dir() and (path / "checkpoint").is_file())]
    return [directory, *found] if is_foreign(directory) else found
