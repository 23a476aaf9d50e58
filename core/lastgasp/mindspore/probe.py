"""Check a checkpoint without a manifest: whether its files are complete, as far as their formats show.

A flipped bit is not detected, unless the file was saved with `crc_check`. A `.ckpt` truncated between two parameters
is a valid file, which MindSpore loads (mindformers.md §5): it is detected by comparison with similar files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from lastgasp.checkpoint import Damage, Verdict
from lastgasp.checkpoint.adopt import data_files
from lastgasp.mindspore.content import BATCH, EPOCH, STEP, Content, Unreadable, read_content
from lastgasp.mindspore.layout import ITERATIONS, LEGACY, LegacyName, rank_of
from lastgasp.ports import Layout

_DATA = (".ckpt", ".safetensors")
_NUMBER = re.compile(r"\d+")


def probe(checkpoint: Path, layout: Layout, step: int | None, share: tuple[int, int] = (0, 1)) -> Verdict:
    """The verdict on the files of rank i of n, for `share` (i, n). Every problem is a damage, not an exception.

    Args:
        checkpoint: without a manifest; layout: its own.
        step: completed steps according to its name.
    """
    damages = tuple(_damages(checkpoint, layout, step, share))
    return Verdict(path=checkpoint, step=step, ok=not damages, damages=damages)


def told_step(checkpoint: Path, layout: Layout) -> int | None:
    """The number of steps according to its content: to the first file that says so; None if none does."""
    for _, path in sorted(data_files(checkpoint, layout).items()):
        content = content_of(path) if path.suffix in _DATA else None
        if isinstance(content, Content) and content.step is not None:
            return content.step
    return None


def told_batch(checkpoint: Path, layout: Layout) -> int | None:
    """The samples of a step according to its content, as `told_step`."""
    if layout is ITERATIONS:
        try:
            told = json.loads((checkpoint / "common.json").read_bytes())
        except (OSError, ValueError):
            return None
        batch = told.get(BATCH) if isinstance(told, dict) else None
        return batch if isinstance(batch, int) and batch > 0 else None
    name = LegacyName.parse(checkpoint.name) if layout is LEGACY else None
    if name is not None and isinstance(first := content_of(checkpoint.parent / name.file(0)), Content):
        return first.numbers.get(BATCH) or None  # a listing of all ranks' folders for each checkpoint takes long
    try:
        files = sorted(data_files(checkpoint, layout).items())
    except OSError:
        return None
    for _, path in files:
        content = content_of(path) if path.suffix in _DATA else None
        if isinstance(content, Content):  # one that can be read: the ranks are alike in this
            return content.numbers.get(BATCH) or None
    return None


def content_of(path: Path, *, checksums: bool = False) -> Content | str:
    """What a file holds, or why it cannot be read. Each version of a file is read once."""
    try:
        status = path.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return _read(path, status.st_size, status.st_mtime_ns, status.st_ino, checksums)


@cache
def _read(path: Path, size: int, changed: int, inode: int, checksums: bool) -> Content | str:
    try:
        return read_content(path, checksums=checksums)
    except Unreadable as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _damages(checkpoint: Path, layout: Layout, step: int | None, share: tuple[int, int]) -> Iterator[Damage]:
    files = data_files(checkpoint, layout)
    if not any(path.suffix in _DATA for path in files.values()):
        yield Damage(file=checkpoint.name, kind="missing", detail="holds no file with parameters")
    for number, (name, path) in enumerate(sorted(files.items())):
        told = rank_of(checkpoint, name)
        owner = number if told is None else told
        if owner % share[1] == share[0] and path.suffix in _DATA:
            problem = _problem(path, layout, step)
            if problem:
                yield Damage(file=name, kind="unreadable", detail=problem)


def _problem(path: Path, layout: Layout, step: int | None) -> str:
    content = content_of(path, checksums=True)
    if isinstance(content, str):
        return content
    if layout is LEGACY:
        lacking = [name for name in (EPOCH, STEP) if name not in content.numbers]
        if lacking:
            return f"holds no {' and no '.join(lacking)}, which MindFormers writes last: it was cut off"
    if layout is not ITERATIONS and step is not None and content.step not in (None, step):
        return f"is of step {content.step}, but others of the same name of step {step}"
    return _cut(path, content) if path.suffix == ".ckpt" else ""


def _cut(path: Path, content: Content) -> str:
    """Whether similar files hold everything that it holds, and more."""
    for other in _kin(path):
        found = content_of(other)
        if isinstance(found, Content) and found.sizes.keys() > content.sizes.keys():
            few = ", ".join(sorted(found.sizes.keys() - content.sizes.keys())[:3])
            lacking = len(found.sizes) - len(content.sizes)
            return f"lacks {lacking} parameters that {other.name} holds ({few}): was it cut off?"
    return ""


def _kin(path: Path) -> Iterable[Path]:
    """Files in the same folder whose names differ in numbers only."""
    like = _NUMBER.sub("#", path.name)
    try:
        beside = sorted(path.parent.iterdir())
    except OSError:
        return []
    return [other for other in beside if other != path and _NUMBER.sub("#", other.name) == like]
