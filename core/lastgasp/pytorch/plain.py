"""`save`, `load` and `newest_good`: `torch.save` and `torch.load` for files that can be trusted after a crash."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

from torch.serialization import DEFAULT_PROTOCOL

from lastgasp import checkpoint
from lastgasp._fs import locked, remove_stale_temps
from lastgasp.checkpoint import Manifest, Provenance, Staged
from lastgasp.checkpoint.adopt import remove_orphans
from lastgasp.checkpoint.layout import next_path
from lastgasp.config import integer
from lastgasp.errors import CheckpointError, ConfigError, DamagedCheckpoint, NoGoodCheckpoint
from lastgasp.pytorch.io import load_mapped, load_verified, save_verified
from lastgasp.pytorch.layout import ENDINGS, FORMAT, PlainFiles

FILES = PlainFiles((*ENDINGS, ".ckpt"))
_REMEDY = "Load another one: lastgasp.pytorch.newest_good(directory) names the newest that verifies."
_START_REMEDY = (
    "Not returning None, which would mean an empty directory. Restore one of them, `lastgasp manifest` those that "
    "were written without lastgasp and that you trust, or move them away to start anew."
)


def save(
    obj: object,
    f: str | os.PathLike[str],
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    *,
    step: int | None = None,
    **options: Any,
) -> Manifest:
    """`torch.save(obj, f)`, atomic and durable, with a manifest beside the file.

    A crash at any point leaves the older file or the new one, and both verify. Several processes may save, to one
    name as well. Manifests of files that somebody has removed go.

    Args:
        obj: as in torch.save; f: a path. Missing directories are made.
        pickle_module: as in torch.save; pickle_protocol: the same; options: other arguments of torch.save.
        step: what `newest_good` sorts by; by default the number in the file's name, else 0. Among equals, the one
            saved last is the newest.

    Returns:
        The manifest, with the digests of the file.

    Raises:
        ConfigError: `f` is an open file or an address, or the step is negative.
        OSError: the disk refused; what stood at `f` still stands.
    """
    path = _path(f)
    given = None if step is None else integer("step", step, 0, "Give the number of completed updates.")
    number = FILES.step(path) or 0 if given is None else given
    with Staged(path, FILES) as staged:
        save_verified(obj, staged, pickle_module=pickle_module, pickle_protocol=pickle_protocol, **options)
        manifest = staged.publish(Provenance(format=FORMAT, step=number, kind="periodic", job=_job()))
    with contextlib.suppress(OSError), locked(path.parent):
        remove_orphans(path.parent, FILES)
    return manifest


def load(
    f: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = True,
    mmap: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """`torch.load(f)` of a file with a manifest: nothing is returned, and no byte unpickled, before it has verified.

    Args:
        f: a path.
        map_location: as in torch.load; pickle_load_args: the same.
        pickle_module: as in torch.load; needs weights_only=False.
        weights_only: False lets the file run any code while it is loaded.
        mmap: True verifies the whole file first and then maps it: tensors are read from disk when they are used.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedCheckpoint: it does not verify; lists every damage.
        CheckpointError: it has no manifest.
        ConfigError: `f` is an open file or an address, or pickle_module without weights_only=False.
        pickle.UnpicklingError: by torch, for what weights_only does not allow.
    """
    path, safe = _path(f), weights_only is not False
    if pickle_module is not None and safe:
        raise ConfigError(
            "pickle_module", pickle_module, "None while weights_only is True",
            "Give weights_only=False where the file's writer is trusted: then loading may run any code.",
        )  # fmt: skip
    _check_there(path)
    read = load_mapped if mmap else load_verified
    try:
        return read(
            path, FILES, map_location=map_location, pickle_module=pickle_module, weights_only=safe, **pickle_load_args
        )
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(error.path, error.reasons, _REMEDY) from None


def newest_good(directory: str | os.PathLike[str], *, quarantine: bool = True) -> str | None:
    """The newest file in `directory` that verifies, by step and time of writing in its manifest; None if it is empty.

    What a session or a framework has saved there is chosen only where there is nothing else, and never renamed. Time
    stamps of files are not looked at. Each process decides alone; what dead processes left half-written goes.

    Args:
        directory: searched without its subdirectories.
        quarantine: whether newer ones that are proven bad are renamed to `<name>.corrupt`, with the reason beside.

    Raises:
        NoGoodCheckpoint: there are files, and none verifies; nothing was renamed.
        ConfigError: the directory cannot be listed.
    """
    folder = _path(directory, "directory")
    with contextlib.suppress(OSError):
        remove_stale_temps(folder)
    try:
        found = checkpoint.newest_good([folder], FILES, quarantine, format=FORMAT)
    except NoGoodCheckpoint as error:
        raise NoGoodCheckpoint(error.directory, error.reasons, _START_REMEDY) from None
    return None if found is None else str(found.path)


def _path(f: object, field: str = "f") -> Path:
    """Where the file really is, so that a link to it shares its manifest."""
    if not isinstance(f, str | os.PathLike) or "://" in str(f) or not str(f):
        remedy = "Open files, buffers and addresses cannot be replaced atomically: use torch.save and torch.load."
        raise ConfigError(field, f, "a path", remedy)
    path = Path(os.fspath(f)).expanduser().absolute()
    return path.resolve() if path.is_symlink() else path


def _check_there(path: Path) -> None:
    if not os.path.lexists(path):
        raise FileNotFoundError(2, "No such checkpoint", str(path))
    if not os.path.lexists(FILES.manifest_path(path)) and not _pending(path):
        raise CheckpointError(
            f"{path} has no manifest, so it is unknown whether it is complete. If you trust it as it is, run "
            f"`lastgasp manifest {path.parent}` once, or load it with torch.load."
        )


def _pending(path: Path) -> bool:
    """A commit was killed between the data and the manifest; `load_verified` reads the one that waits."""
    return os.path.lexists(next_path(FILES.manifest_path(path)))


def _job() -> str:
    return os.environ.get("LASTGASP_JOB") or os.environ.get("TORCHELASTIC_RUN_ID") or "local"
