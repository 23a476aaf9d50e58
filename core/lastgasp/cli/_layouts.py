"""The layouts that the commands know, and what lies in a directory under any of them."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

from lastgasp.checkpoint import Candidate, DirectoryLayout, candidates
from lastgasp.errors import ConfigError
from lastgasp.mindspore.layout import ITERATIONS, LEGACY
from lastgasp.mindspore.modelcheckpoint import PLAIN as MINDSPORE
from lastgasp.mindspore.modelcheckpoint import ModelCheckpointLayout, layouts_in
from lastgasp.mindspore.probe import told_step
from lastgasp.ports import Layout
from lastgasp.pytorch.layout import PlainFiles
from lastgasp.pytorch.loop.files import LAYOUT as LOOP
from lastgasp.tensorflow.layout import LAYOUT

LIGHTNING, MEGATRON, PLAIN = DirectoryLayout("*.ckpt"), DirectoryLayout("iter_*"), PlainFiles()
"""Files and, with ModelParallelStrategy, directories are both Lightning's; this layout reads either."""
TRANSFORMERS = DirectoryLayout("checkpoint-[0-9]*")
LAYOUTS: dict[str, Layout] = {
    "mindformers": LEGACY,
    "mindformers iterations": ITERATIONS,
    "mindspore": MINDSPORE,
    "lightning": LIGHTNING,
    "megatron": MEGATRON,
    "transformers": TRANSFORMERS,
    "tensorflow": LAYOUT,
    "pytorch-sharded": DirectoryLayout("*step=*.dcp"),
    "deepspeed": DirectoryLayout("*step=*.zero"),
    "pytorch-loop": LOOP,
    "pytorch": PLAIN,
}
"""By the name of their format. What two of them find belongs to the first."""


def find(directory: Path) -> list[tuple[str, Layout, Candidate]]:
    """Format, layout and checkpoint, newest first.

    Raises:
        ConfigError: the directory cannot be listed.
    """
    found: dict[Path, tuple[str, Layout, Candidate]] = {}
    taken = {path for candidate in candidates([directory], LAYOUT) for path in LAYOUT.parts(candidate.path)}
    """Files of checkpoints that other files belong to as well: no checkpoints by themselves."""
    for name, layout in [*(("mindspore", layout) for layout in layouts_in(directory)), *LAYOUTS.items()]:
        for candidate in candidates([directory], layout):
            by_torch = isinstance(layout, ModelCheckpointLayout) and _by_torch(candidate.path)
            if not by_torch and candidate.path not in taken:
                known = found.get(candidate.path)
                # A lone manifest, such as that of TensorFlow's cp-0007.ckpt, belongs to whoever finds files.
                if known is None or (layout.parts(candidate.path) and not known[1].parts(candidate.path)):
                    found[candidate.path] = (name, layout, _with_step(layout, candidate))
                taken |= (
                    set(layout.files(candidate.path).values()) if isinstance(layout, ModelCheckpointLayout) else set()
                )
    kept = [item for item in found.values() if not _only_exported(item, list(found.values()))]
    return sorted(kept, key=lambda item: item[2].age_key, reverse=True)


def _by_torch(path: Path) -> bool:
    return path.is_file() and zipfile.is_zipfile(path)


def _only_exported(item: tuple[str, Layout, Candidate], all_of_them: list[tuple[str, Layout, Candidate]]) -> bool:
    """A plain file without a manifest beside a framework's or a loop's checkpoints: weights put there by the user."""
    _, layout, candidate = item
    bare = layout is PLAIN and candidate.manifest is None and not layout.manifest_path(candidate.path).exists()
    return bare and any(other is not PLAIN for _, other, _ in all_of_them)


def _with_step(layout: Layout, candidate: Candidate) -> Candidate:
    """Names of MindSpore's files contain no step; their content does."""
    if candidate.step is not None or not (layout is LEGACY or isinstance(layout, ModelCheckpointLayout)):
        return candidate
    return dataclasses.replace(candidate, step=told_step(candidate.path, layout))


def nothing_in(directory: Path) -> ConfigError:
    """The error for a directory without checkpoints."""
    allowed = "a directory with *.ckpt, *.pt or *.pth files, TensorFlow's *.index with *.data-*, MindFormers' rank_* "
    allowed += "or iteration_*, iter_* directories, checkpoint-N directories of Trainer's, or a loop's *.dcp or *.zero"
    return ConfigError("DIR", str(directory), allowed, "Give the checkpoint directory.")
