"""MindSpore's strategy files: each start overwrites those that say how older checkpoints are sharded.

They are kept under changed names, in a folder beside theirs: MindFormers uses every file in the folder itself.
"""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lastgasp.adapter.files import make_directory

log = logging.getLogger("lastgasp")

GROUP_INFO = "GROUP_INFO_FILE"
"""The environment variable that names the file of communication groups."""
_ENDINGS = (".ckpt", ".json")


def keep(files: Iterable[Path], label: str) -> list[Path]:
    """Give each file that is there a second name, `FOLDER.kept/LABEL[-N]/NAME`; none where that content is kept.

    Args:
        files: strategy files of this rank.
        label: of the start that would overwrite them, such as `step-12`.

    Returns:
        The new names. What the disk refuses is logged, and training continues.
    """
    made = []
    for path in files:
        try:
            kept = _keep(path, label) if path.is_file() else None
        except OSError as error:
            log.warning("the strategy file %s could not be kept: %s", path, error)
        else:
            made += [kept] if kept is not None else []
    return made


def _keep(path: Path, label: str) -> Path | None:
    home = path.parent.with_name(f"{path.parent.name}.kept")
    kept = sorted(home.glob(f"*/{path.name}"))
    if any(filecmp.cmp(path, other, shallow=False) for other in kept):
        return None
    names = itertools.chain([label], (f"{label}-{number}" for number in itertools.count(1)))
    target = next(home / name / path.name for name in names if not (home / name / path.name).exists())
    make_directory(target.parent)
    shutil.copy2(path, target)  # not a link: MindSpore may write into the existing file
    return target


def files_of(config: Any, rank: int) -> list[Path]:
    """Those of a MindFormers job: `strategy` in its output directory, and what the environment names."""
    found = []
    folder = Path((config or {}).get("output_dir") or "./output").absolute() / "strategy"
    for path in sorted(folder.glob(f"*rank_{rank}.*")) if folder.is_dir() else ():
        found += [path] if path.suffix in _ENDINGS else []
    return found + files_of_context()


def files_of_context() -> list[Path]:
    """What MindSpore's context and the environment name for this process."""
    named = [os.environ.get(GROUP_INFO)]
    with contextlib.suppress(ImportError, ValueError):
        import mindspore

        named.append(mindspore.get_auto_parallel_context("strategy_ckpt_save_file"))
    return [Path(name).absolute() for name in named if name]
