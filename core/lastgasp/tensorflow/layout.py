"""TensorFlow's layout: `ckpt-7.index` and `ckpt-7.data-00000-of-00001` form `ckpt-7`, which is not a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from lastgasp.checkpoint import ScatteredLayout

FORMAT = "tensorflow"
"""`format` in the manifests."""
_NUMBER = re.compile(r"(?<=[-_=.])[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|inf)(?![A-Za-z0-9])|\d+")
"""Metrics as Keras writes them into names: `-0.12`, `1e-05`, `nan`."""
_DOTTED = re.compile(r"#(?:\.#)+")
"""`05.12` may be one number or two."""
_SHARD = re.compile(r"(.+)\.data-\d{5}-of-(\d{5})")


class TensorFlowLayout(ScatteredLayout):
    """Object-based checkpoints (`tf.train.Checkpoint`) and those of `Saver` in its second format.

    The checkpoint is what TensorFlow calls the prefix; its manifest is `<prefix>.manifest.json`. The state file
    `checkpoint` belongs to none. The step is the number that the prefix ends with: TensorFlow's save counter, unless
    the caller of `save` gave another.
    """

    def __init__(self) -> None:
        super().__init__(
            pattern=r"(?P<prefix>.+)\.(?:index|data-\d{5}-of-\d{5})",
            title=r"\g<prefix>",
            names=r".+-(?P<step>\d+)",
        )
        self.name = "tensorflow"

    def discover(self, directory: Path) -> Iterable[Path]:
        """Prefixes that have data, and names of which only a manifest is left; a lone `.index` is not a checkpoint."""
        for path in super().discover(directory):
            if self.manifest_path(path).exists() or any(_SHARD.fullmatch(name) for name in self.files(path)):
                yield path


class OfNames(TensorFlowLayout):
    """Only prefixes that are called like one of these but for their numbers: `ckpt-7`, `cp-0007.ckpt`, `epoch3-3`."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._names = {_unnumbered(name) for name in names}

    def discover(self, directory: Path) -> Iterable[Path]:
        """As in the base."""
        return (path for path in super().discover(directory) if _unnumbered(path.name) in self._names)


def _unnumbered(name: str) -> str:
    return _DOTTED.sub("#", _NUMBER.sub("#", name))


LAYOUT = TensorFlowLayout()


def absent(checkpoint: Path) -> list[str]:
    """Names of missing files, as implied by the names of the others, sorted."""
    names = set(LAYOUT.files(checkpoint))
    totals = {int(match[2]) for name in names if (match := _SHARD.fullmatch(name))}
    stem = checkpoint.name
    wanted = {f"{stem}.data-{i:05}-of-{total:05}" for total in totals or {1} for i in range(total)}
    return sorted((wanted | {f"{stem}.index"}) - names)


def exists(checkpoint: Path) -> bool:
    """Whether its index is there: TensorFlow writes it last."""
    return os.path.isfile(f"{checkpoint}.index")
