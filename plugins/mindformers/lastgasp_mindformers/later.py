"""Where later trainings of a script save: only its first one is protected and resumes, and must not take their files.

These have no manifests, so that nothing in them tells whose they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from lastgasp.adapter.files import write_atomically
from lastgasp_mindformers.monitors import is_monitor

log = logging.getLogger("lastgasp")

NAME = ".lastgasp.later"
_NAMED = msgspec.json.Decoder(set[tuple[str, str]])


def recorded(directory: Path) -> set[tuple[str, str]]:
    """Directory, resolved, and prefix of what later trainings have saved. Logs what cannot be read."""
    try:
        return _NAMED.decode((directory / NAME).read_bytes())
    except FileNotFoundError:
        return set()
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s cannot be read: files of later trainings may be taken for the first one's: %s", NAME, error)
        return set()


def record(directory: Path, callbacks: Iterable[Any]) -> None:
    """A later training begins with these callbacks, whose prefixes are settled. Logs what the disk refuses."""
    known, named = recorded(directory), set()
    for callback in filter(is_monitor, callbacks):
        folder, prefix = getattr(callback, "_directory", None), getattr(callback, "_prefix", None)
        if isinstance(folder, str) and isinstance(prefix, str):
            named.add((os.path.realpath(folder), prefix))
    if named <= known:
        return
    try:
        write_atomically(directory / NAME, msgspec.json.encode(sorted(known | named)))
    except OSError as error:
        log.warning("%s could not be written: files of this training may be taken for the first one's: %s", NAME, error)
