"""Which versions Lightning's loggers chose automatically, and which fit of which directory logged last in each."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lastgasp.adapter.files import read_bounded, write_atomically

MARKER = ".lastgasp.json"
_WRITERS = 256
_chosen: weakref.WeakSet[Any] = weakref.WeakSet()


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who logs in a version's directory; stored there as `.lastgasp.json`.

    Args:
        directory: where this training's checkpoints are, so that a copy of it does not log in the original's place.
        fit: the last one that logged here.
        writers: host and process of each attempt's TensorBoard writer, the oldest first.
    """

    version: int = 1
    directory: str
    fit: int
    writers: tuple[str, ...] = ()


def watch_versions() -> None:
    """From now on record which loggers choose their version automatically. Idempotent.

    A version is chosen when it is first asked for, which is before any hook of a callback. Nothing else shows later
    whether the user gave it.
    """
    kinds: tuple[Any, ...] = (CSVLogger, TensorBoardLogger)
    for kind in kinds:
        original = kind._get_next_version
        if not hasattr(original, "_lastgasp"):
            kind._get_next_version = _remembering(original)


def _remembering(original: Callable[[Any], int]) -> Callable[[Any], int]:
    @functools.wraps(original)
    def choose(self: Any) -> int:
        _chosen.add(self)
        return original(self)

    choose._lastgasp = True  # type: ignore[attr-defined]
    return choose


def is_automatic(logger: Any) -> bool:
    """Whether `logger` has chosen its version automatically, since `watch_versions`."""
    return logger in _chosen


def leave(loggers: Iterable[Any]) -> None:
    """This process is to have another rank: none of its loggers is open, or has a version that it chose for itself.

    Where it is rank 0 next, a logger that knew its version would begin with empty files in it.
    """
    for one in loggers:
        if is_automatic(one):
            if isinstance(one, TensorBoardLogger) and one._experiment is not None:
                one._experiment.close()
            one._experiment = one._version = None


def read_owner(folder: Path) -> Owner | None:
    """The content of the marker in `folder`; None if there is none.

    Raises:
        OSError: it cannot be read; ValueError: it is damaged or of a later version.
    """
    try:
        owner = msgspec.json.decode(read_bounded(folder / MARKER, 1 << 20), type=Owner)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ValueError(f"its {MARKER} is damaged: {error}") from None
    if owner.version != 1:
        raise ValueError(f"its {MARKER} is of version {owner.version}, and this lastgasp reads version 1")
    return owner


def write_owner(folder: Path, owner: Owner) -> None:
    """Raises OSError: it cannot be written."""
    newest = msgspec.structs.replace(owner, writers=owner.writers[-_WRITERS:])
    write_atomically(folder / MARKER, msgspec.json.encode(newest))
