"""An interpreter for Lightning jobs that sees what `pip install 'lastgasp[lightning]'` brings, and nothing else.

So these jobs show that the extra is complete. They also start a quarter faster: torchmetrics imports scipy and
matplotlib wherever they are installed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import tempfile
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOTS = ("lastgasp[lightning]",)


@functools.cache
def python() -> str:
    """The interpreter: of a virtual environment of links beside this one, made anew when its packages have changed."""
    if os.environ.get("TESTS_DEVICE", "cpu") != "cpu":
        return sys.executable  # of a machine with a card, whose packages are wherever they are
    found = sorted(_closure(ROOTS), key=lambda one: one.name)
    if "lastgasp" not in {one.name for one in found}:
        return sys.executable  # not installed, but on PYTHONPATH: nothing tells what it needs
    links = {path.name: path for one in found for path in _top_level(one)}
    digest = hashlib.sha256(repr(sorted(map(str, links.values()))).encode()).hexdigest()[:12]
    home = Path(sys.prefix) / f"lean-{digest}"
    if not home.exists():
        _make(home, links)
    return str(home / "bin" / "python")


def _make(home: Path, links: dict[str, Path]) -> None:
    made = Path(tempfile.mkdtemp(prefix=".lean-", dir=home.parent))
    venv.create(made, symlinks=True)
    (site,) = made.glob("lib/python*/site-packages")
    for name, path in links.items():
        (site / name).symlink_to(path)
    try:
        made.rename(home)
    except OSError:  # another process was first
        if not home.exists():
            raise


def _closure(wanted: tuple[str, ...]) -> Iterator[Distribution]:
    """The installed distributions that these need, each once."""
    todo, seen = [(Requirement(one).name, extra) for one in wanted for extra in ("", *Requirement(one).extras)], set()
    while todo:
        name, extra = todo.pop()
        if (name.lower(), extra) in seen:
            continue
        seen.add((name.lower(), extra))
        try:
            one = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform
        if extra == "":
            yield one
        for line in one.requires or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                todo += [(needed.name, more) for more in ("", *needed.extras)]


def _top_level(one: Distribution) -> Iterator[Path]:
    """What it has put into site-packages: packages, modules, its metadata."""
    for name in {path.parts[0] for path in one.files or ()} - {"..", "__pycache__"}:
        path = Path(str(one.locate_file(name)))
        if path.exists():
            yield path
