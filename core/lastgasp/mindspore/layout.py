"""Where checkpoints of MindFormers and of plain MindSpore are.

Legacy: `rank_R/{prefix}_rank_R[_K]-{epoch}_{step}.{safetensors|ckpt}` for each rank; `_K` appears if a job runs
again in the same directory. Newer: a directory `iteration_NNNNNNNN`. Manifests are outside `rank_*`, because
MindFormers counts the files in there. What a gasp holds beyond the native files goes to one file beside the manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec

from lastgasp.checkpoint import DirectoryLayout, ScatteredLayout
from lastgasp.errors import CheckpointError
from lastgasp.mindspore.modelcheckpoint import ModelCheckpointLayout
from lastgasp.mindspore.modelcheckpoint import is_title as is_plain
from lastgasp.mindspore.modelcheckpoint import layout_of as plain_layout_of
from lastgasp.ports import Layout

FORMAT = "mindformers"
"""`format` in the manifests."""
Extension = Literal["safetensors", "ckpt"]
_ENDINGS = "|".join(get_args(Extension))
_NAME = re.compile(rf"(?P<prefix>.+)_rank(?P<again>_\d+)?-(?P<epoch>\d+)_(?P<within>\d+)\.(?P<ext>{_ENDINGS})")
_MONITOR = re.compile(r"(?P<prefix>.+)_rank_\d+(?P<again>_\d+)?")

LEGACY = ScatteredLayout(
    pattern=r"rank_(?P<rank>\d+)/(?P<prefix>.+_rank)_(?P=rank)(?P<again>_\d+)?(?P<at>-\d+_\d+)"
    rf"(?P<ext>\.(?:{_ENDINGS}))|(?P<small>[^/]+_rank(?:_\d+)?-\d+_\d+\.(?:{_ENDINGS}))\.small",
    title=r"\g<small>\g<prefix>\g<again>\g<at>\g<ext>",
    names=_NAME.pattern,
    folders=("rank_*", ""),
)
"""`tiny_rank-2_4.safetensors` is the name for the files of all ranks. It has no step: epochs vary in length."""
ITERATIONS = DirectoryLayout("iteration_*")


@dataclass(frozen=True)
class LegacyName:
    """The place of one legacy checkpoint.

    Args:
        prefix: CheckpointMonitor's, without the rank.
        epoch: the current one, from 1.
        within: completed steps of this epoch.
        ext: the format.
        again: "" or MindFormers' `_K`.
    """

    prefix: str
    epoch: int
    within: int
    ext: Extension
    again: str = ""

    @classmethod
    def of_monitor(cls, prefix: str, epoch: int, within: int, ext: Extension) -> LegacyName:
        """Parse CheckpointMonitor's `_prefix`, such as `tiny_rank_0_1`.

        Raises:
            CheckpointError: it contains no rank.
        """
        match = _MONITOR.fullmatch(prefix)
        if match is None:
            raise CheckpointError(f"CheckpointMonitor's prefix {prefix!r} names no rank: expected PREFIX_rank_R")
        return cls(match["prefix"], epoch, within, ext, match["again"] or "")

    @classmethod
    def parse(cls, name: str) -> LegacyName | None:
        """Parse `name`; None if it is not such a name."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        ext: Extension = "ckpt" if match["ext"] == "ckpt" else "safetensors"
        return cls(match["prefix"], int(match["epoch"]), int(match["within"]), ext, match["again"] or "")

    @property
    def name(self) -> str:
        """The checkpoint's own name; its manifest is beside it."""
        return f"{self.prefix}_rank{self.again}-{self.epoch}_{self.within}.{self.ext}"

    def file(self, rank: int) -> str:
        """MindFormers' file of `rank`: POSIX path in the directory."""
        return f"rank_{rank}/{self.base(rank)}"

    def base(self, rank: int) -> str:
        """The name of that file alone, as `resume_training` expects it."""
        return f"{self.prefix}_rank_{rank}{self.again}-{self.epoch}_{self.within}.{self.ext}"

    @property
    def aux(self) -> str:
        """The file of all ranks' auxiliary state."""
        return f"{self.name}.small"

    def markers(self, ranks: Iterable[int]) -> dict[str, bytes]:
        """The `meta.json` of each rank: path in the directory -> content that names this checkpoint."""
        return {f"rank_{rank}/{META}": self.meta(rank) for rank in ranks}

    def meta(self, rank: int) -> bytes:
        """The content of the `meta.json` of one rank, as MindFormers writes it."""
        told = {"last_epoch": self.epoch, "last_step": self.within, "last_ckpt_file": self.base(rank)}
        return json.dumps(told).encode()


_RANK = re.compile(r"rank_(\d+)/")


def layout_of(checkpoint: Path) -> Layout:
    """The layout of a checkpoint of that name."""
    if is_plain(checkpoint.name):
        return plain_layout_of(checkpoint.name)
    return LEGACY if re.fullmatch(LEGACY.names, checkpoint.name) else ITERATIONS


def rank_of(checkpoint: Path, relative: str) -> int | None:
    """The rank of a file, by its path relative to `checkpoint`'s directory; None if it is not one rank's."""
    layout = layout_of(checkpoint)
    if isinstance(layout, ModelCheckpointLayout):
        return layout.rank_of(checkpoint, relative)
    match = _RANK.match(relative)
    return int(match[1]) if match else None


META = "meta.json"
_SMALL = msgspec.msgpack.Decoder(dict[int, bytes])


def encode_aux(aux: Mapping[int, bytes]) -> bytes:
    """The content of the file of auxiliary states: rank -> its state."""
    return msgspec.msgpack.encode({rank: bytes(state) for rank, state in sorted(aux.items())})


def decode_aux(data: bytes) -> dict[int, bytes]:
    """What `encode_aux` wrote.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        return _SMALL.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CheckpointError(f"a small-state file cannot be read: {error}") from error
