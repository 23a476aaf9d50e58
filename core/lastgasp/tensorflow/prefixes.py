"""`seal` what TensorFlow has just saved; find the `newest_good` prefix after a crash."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import overload

from lastgasp import checkpoint
from lastgasp._fs import locked, read_bounded, write_atomically
from lastgasp.checkpoint import Candidate, Provenance, candidates
from lastgasp.checkpoint.adopt import read_entries, remove_orphans, write_manifest
from lastgasp.errors import CheckpointError, ConfigError, NoGoodCheckpoint

from . import statefile
from .bundle import all_checksums_problem, structure_problem
from .foreign import REASON, foreign_in, is_foreign, others_in
from .layout import FORMAT, LAYOUT, OfNames, TensorFlowLayout, absent, exists

log = logging.getLogger("lastgasp")
_START_REMEDY = (
    "Not returning None, which would mean an empty directory. Restore one of them, `lastgasp manifest` those that were "
    "written without lastgasp and that you trust, or move them and the file `checkpoint` away to start anew."
)

_OTHER_NAME = "has another name than those in TensorFlow's state file; restore it by its name if it is what you want"
_FOREIGN_REMEDY = (
    "Not returning None, which would mean an empty directory. Load it by Keras itself, if you trust it, give another "
    "directory, or move it away to start anew."
)


@overload
def seal(prefix: str | os.PathLike[str], *, step: int | None = None) -> str: ...
@overload
def seal(prefix: None, *, step: int | None = None) -> None: ...
def seal(prefix: str | os.PathLike[str] | None, *, step: int | None = None) -> str | None:
    """Make a checkpoint that TensorFlow has written durable, and give it a manifest: `seal(manager.save())`.

    Call it on the chief alone if several workers share one directory. Manifests of checkpoints that the manager has
    removed are removed, too.

    Args:
        prefix: what `save` or `write` returned; None (a manager that was not due) does nothing.
        step: what `newest_good` sorts by; by default the number that the prefix ends with, else 0. Among equals, the
            one sealed last is the newest.

    Returns:
        The prefix as it was given.

    Raises:
        CheckpointError: it is incomplete: a file is missing or shorter than its index says.
        ConfigError: the prefix is not a path on this machine, or the step is negative.
        OSError: the disk refused.
    """
    if prefix is None:
        return None
    path = _path(prefix, "prefix")
    if is_foreign(path):
        remedy = (
            f"{path.name} {REASON}. Save with tf.train.CheckpointManager; BackupAndRestore of Keras has no manifest."
        )
        raise ConfigError("prefix", str(prefix), "what save() of a checkpoint or manager returned", remedy)
    if step is not None and (isinstance(step, bool) or step < 0):
        raise ConfigError("step", step, "an integer of at least 0", "Give the number of completed updates.")
    if problem := whole_problem(path):
        raise CheckpointError(
            f"{path} is incomplete: {problem}. Seal what save() returned; where it saves in the background, call "
            "checkpoint.sync() first."
        )
    number = LAYOUT.step(path) or 0 if step is None else int(step)
    made_by = Provenance(format=FORMAT, step=number, kind="periodic", job=os.environ.get("LASTGASP_JOB") or "local")
    write_manifest(path, LAYOUT, made_by, read_entries(path, LAYOUT))
    with contextlib.suppress(OSError), locked(path.parent):
        remove_orphans(path.parent, LAYOUT)
    return os.fspath(prefix)


def newest_good(directory: str | os.PathLike[str], *, quarantine: bool = True) -> str | None:
    """The prefix of the newest checkpoint in `directory` that verifies, for `restore`; None if it is empty.

    The state file `checkpoint` is repaired if it is missing or unreadable, or names another checkpoint than this one.
    Call it before you make a `CheckpointManager`, which reads that file once.

    Args:
        directory: searched without its subdirectories.
        quarantine: whether newer ones with proven damage are moved to a directory `<prefix>.corrupt`, with the reason
            beside it.

    Where the state file names some, those of other names (the best model's) are left alone: a manager removes what it
    finds in that file. Where nothing verifies, the one that it names is taken without a manifest if all of TensorFlow's
    own checksums match: its job was killed between `save` and `seal`.

    Raises:
        NoGoodCheckpoint: there are checkpoints, or the state file names one, and none verifies; or there are models in
            a format that cannot be verified (Keras' files, SavedModel, BackupAndRestore). Nothing was changed.
        ConfigError: the directory cannot be listed.
    """
    folder = _path(directory, "directory")
    layout = _of_manager(folder)
    unsealed = _unsealed(folder)
    sealed = any(one.manifest is not None for one in candidates([folder], layout))
    beside = [] if sealed else _passed_over(folder, layout)
    if unsealed is not None and any(_is_newer(one.path, unsealed) for one in beside):
        layout, unsealed = LAYOUT, None  # the script seals under other names now
    try:
        found = checkpoint.newest_good([folder], layout, quarantine)
    except NoGoodCheckpoint as error:
        if unsealed is None:
            reasons = {str(one.path): _OTHER_NAME for one in _passed_over(folder, layout)} | dict(error.reasons)
            raise NoGoodCheckpoint(error.directory, reasons, _START_REMEDY) from None
        log.warning("%s has no manifest; all of TensorFlow's own checksums match, and it gets one now", unsealed)
        seal(unsealed)
        return newest_good(directory, quarantine=quarantine)
    if found is None:
        _refuse_what_is_named(folder)
        if foreign := foreign_in(folder):
            raise NoGoodCheckpoint(str(folder), {str(path): REASON for path in foreign}, _FOREIGN_REMEDY)
        if others := others_in(folder):
            names = ", ".join(path.name for path in others)
            log.warning("%s holds no checkpoint: training begins anew, and those in %s are left alone", folder, names)
        return None
    for one in _passed_over(folder, layout):
        if (one.step or 0) > (found.step or 0):
            log.warning("%s, of step %d, was not chosen: it %s", one.path, one.step, _OTHER_NAME)
    try:
        _repair(folder, found, layout is LAYOUT)
    except OSError as error:
        log.warning("%s could not be repaired: %s. Restore from %s", folder / statefile.NAME, error, found.path)
    return str(found.path)


def whole_problem(prefix: Path) -> str:
    """Which file is missing or too short; empty if none is. Reads only the index."""
    missing = absent(prefix)
    return f"{missing[0]} is missing" if missing else structure_problem(prefix)


def _of_manager(folder: Path) -> TensorFlowLayout:
    """Only prefixes of the names that the state file lists, if such are there: others are the script's own.

    What `Checkpoint.write` makes, the best model say, is in no state file, and need not hold the optimizer.
    """
    data = _data(folder / statefile.NAME)
    state = None if statefile.is_repaired(data) else statefile.parse(data)
    layout = OfNames([Path(name).name for name in (state.latest, *state.kept)] if state else [])
    return layout if any(True for _ in layout.discover(folder)) else LAYOUT


def _passed_over(folder: Path, layout: TensorFlowLayout) -> list[Candidate]:
    """Sealed checkpoints of other names."""
    own = set(layout.discover(folder))
    return [one for one in candidates([folder], LAYOUT) if one.path not in own and one.manifest is not None]


def _unsealed(folder: Path) -> Path | None:
    """What the state file names, if its job ended before `seal`, and each of its bytes has a checksum that matches."""
    state = _read(folder / statefile.NAME)
    if state is None:
        return None
    path = statefile.local(state.latest, folder)
    if path.parent != folder or os.path.lexists(LAYOUT.manifest_path(path)) or whole_problem(path):
        return None
    return None if all_checksums_problem(path) else path


def _repair(folder: Path, found: Candidate, of_any_name: bool) -> None:
    older = [c.path for c in reversed(candidates([folder], LAYOUT)) if c.age_key <= found.age_key and exists(c.path)]
    standing = {path: Path(f"{path}.index").stat().st_mtime for path in older}
    path = folder / statefile.NAME
    with locked(folder):
        old = _read(path)
        new = statefile.repaired(old, folder, found.path, standing)
        if new is not None:
            said = "nothing that can be read" if old is None else old.latest
            log.warning("%s named %s; it now names %s", path, said, new.latest)
            write_atomically(path, statefile.encode(new, of_any_name))


def _refuse_what_is_named(folder: Path) -> None:
    state = _read(folder / statefile.NAME)
    if state is not None:
        reason = "the state file names it, and it is gone"
        raise NoGoodCheckpoint(str(folder), {str(folder / state.latest): reason}, _START_REMEDY)


def _is_newer(one: Path, other: Path) -> bool:
    """By when TensorFlow had finished each; the numbers of different names need not count the same."""
    with contextlib.suppress(OSError):
        return Path(f"{one}.index").stat().st_mtime_ns > Path(f"{other}.index").stat().st_mtime_ns
    return False


def _read(path: Path) -> statefile.State | None:
    return statefile.parse(_data(path))


def _data(path: Path) -> bytes:
    """Nothing where it cannot be read."""
    try:
        return read_bounded(path, 1 << 20)
    except OSError:
        return b""


def _path(value: object, field: str) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value) or "://" in str(value):
        raise ConfigError(field, value, "a path on this machine", "Remote file systems get no manifests.")
    return Path(os.fspath(value)).expanduser().absolute()
