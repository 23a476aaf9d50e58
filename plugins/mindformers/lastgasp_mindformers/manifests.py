"""Manifests of the checkpoints that MindFormers and MindSpore themselves write: after each save, all ranks together.

Each rank makes its own files durable, which MindSpore does not do (mindformers.md §5), and reads them back; rank 0 adds
the auxiliary states of all.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lastgasp.adapter import (
    Gather,
    LastgaspError,
    Layout,
    ManifestWriter,
    NativeManifests,
    NativeSave,
    RankStatus,
)
from lastgasp.adapter.checkpoint import remove_orphans
from lastgasp.adapter.files import write_atomically
from lastgasp.adapter.mindspore import ITERATIONS, encode_aux, rank_of
from lastgasp_mindformers.monitors import Monitor, Saved, Unpaired, is_monitor, is_partial, places_of, told_by_all

log = logging.getLogger("lastgasp")

AUX_SUFFIX = "lastgasp.small"
"""The file of auxiliary states inside a directory checkpoint."""
_PARTIAL = (
    "a ModelCheckpoint with saved_network, remove_redundancy or enc_key saves no checkpoint that a training could "
    "resume from: its files get no manifest, and a start leaves them alone. What lastgasp saves beside them is not "
    "encrypted"
)


class Manifests(NativeManifests):
    """Gives the framework's own checkpoints their manifests. All ranks make the same calls.

    Args:
        writer: names who writes.
        gather: the all-gather of the job.
        status: learns which step is durable.
        aux: this rank's auxiliary state of a step, for the file beside the native ones; b"" if it is
            not known. Without `aux` there is no such file.
        finished: called when a save is over, before it has a manifest; again for each.

    """

    def __init__(
        self,
        writer: ManifestWriter,
        gather: Gather,
        status: RankStatus,
        aux: Callable[[int], bytes] | None = None,
        finished: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(writer, gather, status)
        self._aux, self._finished = aux, finished
        self._monitors: list[Monitor] = []
        self._waiting: list[Saved] = []
        self._together = True
        self._asked = itertools.count(1)

    def bind(self, callbacks: Iterable[Any]) -> None:
        """Find the callbacks of `Model.train` that save, and make all ranks number their files alike.

        Raises:
            DeadlineExceeded, ControlError: the ranks could not agree.
        """
        saving = [callback for callback in callbacks if is_monitor(callback)]
        whole = [callback for callback in saving if not is_partial(callback)]
        self._monitors = [Monitor(callback, self.place.rank) for callback in whole]
        if len(whole) < len(saving) and self.place.rank == 0:
            log.warning("%s", _PARTIAL)
        told = told_by_all(self._monitors, self._gather)
        self._together = len({len(each) for each in told}) == 1
        if self._together:
            found, self._monitors = list(zip(self._monitors, places_of(told), itertools.count())), []
            for monitor, place, number in found:
                if isinstance(place, Unpaired):
                    if self.place.rank == 0:
                        log.warning("%s", place)
                    continue
                monitor.align(max(each[number].again for each in told))
                monitor.place = place
                self._monitors.append(monitor)
        for monitor in self._monitors:
            if monitor.by_time and self.place.world_size > 1:
                log.warning("checkpoints get no manifest: save_checkpoint_seconds lets ranks save at different steps")
        if any(monitor.by_time for monitor in self._monitors):
            self._finished()  # the end of a save is not visible
        self._monitors = [m for m in self._monitors if not (m.by_time and self.place.world_size > 1)]

    def step_end(self, step: int, *, last: bool = False) -> None:
        """After each step, and once more (`last`) when training has ended, behind the framework's own callbacks.

        Never raises for what is on disk or for a rank that is gone: then there is no manifest.

        Args:
            step: completed updates.
            last: saves in the background are over.
        """
        self._waiting += [saved for monitor in self._monitors if (saved := monitor.saved(step)) is not None]
        if not self._waiting:
            return
        try:
            if last or self._all_there():
                waiting, self._waiting = self._waiting, []
                for saved in waiting:
                    self.commit(saved)
        except LastgaspError as error:
            names = ", ".join(saved.path.name for saved in self._waiting)
            self._waiting = []  # asking again would cost every further step the same wait
            log.error("%s got no manifest and will not be trusted: %s", names, error)

    def commit(self, save: NativeSave, *, alone: bool = False) -> bool:
        """As NativeManifests does; by this rank alone where only it saves at all."""
        self._finished()
        aux = self._aux(save.step) if self._aux is not None else b""
        return super().commit(dataclasses.replace(save, aux=aux), alone=alone or not self._together)

    def _all_there(self) -> bool:
        """Whether the files are there on every rank: a save in the background may be under way."""
        here = all(saved.there for saved in self._waiting)
        if not self._together:
            return here
        return all(self._gather(f"manifest/there/{next(self._asked)}", b"1" if here else b""))

    # -- what differs from other frameworks -------------------------------------------------------

    def share(self, save: NativeSave, files: Mapping[str, Path]) -> dict[str, Path]:
        """The files that this rank reads: its own, which its node has in memory; rank 0 also those of no rank."""
        rank, world = self.place.rank, self.place.world_size
        owners = {}
        for number, name in enumerate(sorted(files)):
            told = rank_of(save.path, name)
            owner = (number % world if "/" in name else 0) if told is None else told
            owners[name] = owner if owner < world else 0
        return {name: path for name, path in files.items() if owners[name] == rank}

    def add_aux(self, save: NativeSave, aux: Mapping[int, bytes]) -> None:
        """Beside the checkpoint, or in it where it is a directory."""
        put_aux(save, aux)

    def committed(self, save: NativeSave) -> None:
        """keep_checkpoint_max may have removed some."""
        tidy(save.path.parent, save.layout)


def put_aux(save: NativeSave, aux: Mapping[int, bytes]) -> None:
    """Put the auxiliary states of all ranks beside (or into) the checkpoint, durably. Raises OSError."""
    if aux:
        inside = save.layout is ITERATIONS
        path = save.path / AUX_SUFFIX if inside else save.path.with_name(f"{save.path.name}.small")
        write_atomically(path, encode_aux(aux))


def tidy(directory: Path, layout: Layout) -> None:
    """Remove files beside checkpoints that keep_checkpoint_max has removed. Raises OSError."""
    for path in layout.discover(directory):
        left = layout.parts(path)
        if left and all(part.name.endswith(".small") for part in left):
            for part in left:
                part.unlink(missing_ok=True)
    remove_orphans(directory, layout)
