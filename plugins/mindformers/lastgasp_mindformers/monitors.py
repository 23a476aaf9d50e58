"""MindSpore's and MindFormers' own checkpoint callbacks: where they save, and what they saved since the last call."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lastgasp.adapter import Gather, Layout, NativeSave
from lastgasp.adapter.mindspore import ITERATIONS, LEGACY, PLAIN, SavePlace, layout_of, place_of_callback
from lastgasp_mindformers.tracker import read_tracker

log = logging.getLogger("lastgasp")

_FOLDER = re.compile(r"rank_\d+")


@dataclass(frozen=True)
class Saved(NativeSave):
    """A checkpoint that the framework has written, or is still writing in the background.

    Args:
        file: the file of this rank; None of a directory checkpoint.
    """

    file: Path | None = None

    @property
    def there(self) -> bool:
        """Whether its save is over, as far as this rank sees: names are given last."""
        if self.file is not None:
            return self.file.exists()
        tracker = read_tracker(self.path.parent)
        return tracker is not None and tracker >= (self.layout.step(self.path) or 0)


def is_monitor(callback: Any) -> bool:
    """Whether it is MindSpore's ModelCheckpoint, of which MindFormers' CheckpointMonitor is one."""
    return is_a(callback, "ModelCheckpoint")


def is_a(callback: Any, kind: str) -> bool:
    """Whether it is a callback of MindSpore's of that name, or of a class made of it."""
    return ("mindspore", kind) in _kinds(callback)


def forgetful(callbacks: Sequence[Any]) -> str:
    """What to say of those whose state is in no checkpoint, where training resumes; empty where there is none."""
    names = [kind for kind in ("EarlyStopping", "ReduceLROnPlateau") if any(is_a(one, kind) for one in callbacks)]
    if not names:
        return ""
    return f"{' and '.join(names)} begin anew at this resume: their best value and patience are in no checkpoint"


def is_partial(callback: Any) -> bool:
    """Whether what it saves is nothing to resume from: weights alone, a part of what ranks hold alike, or encrypted.

    MindFormers itself loads what its own CheckpointMonitor saves.
    """
    config = callback._config
    if getattr(config, "saved_network", None) is not None:
        return True
    unloadable = bool(getattr(config, "remove_redundancy", False)) or getattr(config, "enc_key", None) is not None
    return unloadable and ("mindformers", "CheckpointMonitor") not in _kinds(callback)


def _kinds(callback: Any) -> set[tuple[str, str]]:
    return {(base.__module__.partition(".")[0], base.__name__) for base in type(callback).__mro__}


class Monitor:
    """What a ModelCheckpoint or a CheckpointMonitor has saved.

    Args:
        callback: the framework's own.
        rank: of this process.

    Attributes:
        place: where all ranks save, once they have agreed.
    """

    def __init__(self, callback: Any, rank: int) -> None:
        self._callback, self._rank = callback, rank
        self.place: SavePlace | None = None
        self._seen = callback._last_triggered_step
        self.legacy = bool(getattr(callback, "use_legacy_format", True))

    @property
    def by_time(self) -> bool:
        """Whether it saves at time intervals."""
        return not self._callback._config.save_checkpoint_steps

    @property
    def again(self) -> int:
        """The K of `_K` in its files' names; 0 where there is none."""
        added = self._added()
        return int(added[1:]) if added else 0

    def align(self, again: int) -> None:
        """Let `_K` be the same on all ranks: MindFormers takes a step only where it is."""
        if self.legacy and isinstance(self._callback._prefix, str) and again != self.again:
            bare = self._callback._prefix.removesuffix(self._added())
            self._callback._prefix = f"{bare}_{again}" if again else bare

    def saved(self, step: int) -> Saved | None:
        """What it has saved since the last call; None if nothing, or not a checkpoint's name."""
        callback = self._callback
        if callback._last_triggered_step == self._seen:
            return None
        self._seen = callback._last_triggered_step
        return self._legacy(step) if self.legacy else self._iteration(step)

    def told(self) -> Told:
        """What the other ranks must know of it. Empty where a function decides it, which is only known at a save."""
        callback = self._callback
        directory, prefix = getattr(callback, "_directory", None), getattr(callback, "_exception_prefix", None)
        partial = is_partial(callback)
        if not isinstance(directory, str) or not isinstance(prefix, str):
            return Told(self.again, "", "", partial)
        return Told(self.again, str(Path(directory).absolute()), prefix, partial)

    def _added(self) -> str:
        given, prefix = getattr(self._callback, "_exception_prefix", None), self._callback._prefix
        if not isinstance(given, str) or not isinstance(prefix, str) or not prefix.startswith(given):
            return ""
        added = prefix[len(given) :]
        return added if re.fullmatch(r"_\d+", added) else ""

    def _legacy(self, step: int) -> Saved | None:
        file = Path(self._callback._latest_ckpt_file_name).absolute()
        directory = file.parent.parent if _FOLDER.fullmatch(file.parent.name) else file.parent
        title = LEGACY.title_of(file.relative_to(directory).as_posix())
        if title is None and self.place is not None:
            directory = self.place.directory
            at = file.name.removeprefix(str(self._callback._prefix))
            title = self.place.layout.title(f"{self.place.prefix}{self._added()}{at}")
        path = directory / (title or file.name)
        layout = layout_of(path)
        if layout is not ITERATIONS:
            return Saved(path, layout, step, file=file)
        log.warning("%s got no manifest: its name does not contain epoch and step", file)
        return None

    def _iteration(self, step: int) -> Saved | None:
        callback = self._callback
        if callback.directory:
            root = Path(callback.directory).resolve()
        else:
            from mindformers.tools.utils import get_output_subpath

            root = Path(get_output_subpath("checkpoint", append_rank=False)).absolute()
        path = root / f"iteration_{callback.common_info.step_num:08d}"
        return Saved(path, ITERATIONS, step)


# -- all ranks ------------------------------------------------------------------------------------


class Told(msgspec.Struct, frozen=True):
    """Where one rank's ModelCheckpoint saves.

    Attributes:
        again: the K of `_K` in its files' names; directory: absolute; prefix: without `_K`; partial: as `is_partial`.
    """

    again: int
    directory: str
    prefix: str
    partial: bool = False


_TOLD = msgspec.json.Decoder(list[Told])


def told_by_all(monitors: Sequence[Monitor], gather: Gather) -> list[list[Told]]:
    """What the ModelCheckpoints of each rank say, by rank. All ranks call it together.

    Raises:
        DeadlineExceeded, ControlError: the ranks could not agree.
    """
    mine = msgspec.json.encode([monitor.told() for monitor in monitors])
    return [_TOLD.decode(payload) for payload in gather("manifests/monitors", mine)]


def places_of(told: Sequence[Sequence[Told]]) -> list[SavePlace | Unpaired | None]:
    """Where each ModelCheckpoint saves, on all ranks; None where only a save shows that. Needs as many on each."""
    return [_place_of([rank[number] for rank in told]) for number in range(len(told[0]))]


@dataclass(frozen=True)
class Unpaired:
    """No rank could recognise which files of the others belong to its own.

    Attributes:
        few: some of the ranks' places, for people.
    """

    few: str

    def __str__(self) -> str:
        return (
            f"a ModelCheckpoint saves under other names on each rank ({self.few}), so no rank can tell which files of "
            "the others belong to its own: they get no manifest, and a start leaves them alone. Have directory and "
            "prefix be the same on all ranks but for the rank's number, in the last folder's name and in the prefix"
        )


def _place_of(told: Sequence[Told]) -> SavePlace | Unpaired | None:
    if not all(each.directory for each in told):
        return None
    found = place_of_callback([Path(each.directory) for each in told], [each.prefix for each in told])
    return found or Unpaired(", ".join(f"{each.directory}/{each.prefix}" for each in told[:3]))


def searched(
    callbacks: Iterable[Any], rank: int, gather: Gather
) -> tuple[list[tuple[Path, Layout]], set[tuple[str, str]]]:
    """Where the ModelCheckpoints of all ranks save, and how: where the next start looks. All ranks together.

    Returns:
        These, and directories and prefixes of those that save no checkpoints.

    Raises:
        DeadlineExceeded, ControlError: the ranks could not agree.
    """
    monitors = [Monitor(callback, rank) for callback in callbacks if is_monitor(callback)]
    all_told = told_by_all(monitors, gather)
    apart = {(os.path.realpath(each.directory), each.prefix) for one in all_told for each in one if each.partial}
    told = [[each for each in one if not each.partial] for one in all_told]
    if any(not each.directory for rank_told in told for each in rank_told):
        log.warning(
            "the directory or prefix of a ModelCheckpoint is a function: a start looks for its files only where they "
            "lie in the directory of LastGasp"
        )
    found: list[tuple[Path, Layout]] = []
    if len({len(each) for each in told}) == 1:
        for number, place in enumerate(places_of(told)):
            if isinstance(place, Unpaired):
                apart |= {(os.path.realpath(one[number].directory), one[number].prefix) for one in told}
            elif place is not None:
                found += [(place.directory, place.layout)]
    else:  # some ranks save for all
        found += [
            (_without_rank(Path(each.directory)), PLAIN) for rank_told in told for each in rank_told if each.directory
        ]
    usual = [(directory, LEGACY) for directory, layout in found if layout is PLAIN]
    return list(dict.fromkeys([*found, *usual])), apart


def _without_rank(directory: Path) -> Path:
    return directory.parent if _FOLDER.fullmatch(directory.name) else directory
