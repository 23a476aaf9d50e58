"""What module, callbacks and datamodule keep beside their state goes from a gasp to the restart that begins with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lastgasp.adapter import NotSaveable
from lastgasp.adapter.again import Began, Carried, Places, changed
from lastgasp.adapter.torch import OnDemand, split_trailer
from lastgasp_lightning.uservalues import known_of, roots_of, unsaved_roots

if TYPE_CHECKING:
    from lastgasp_lightning.run import LightningRun

VALUES = "values"
"""In lastgasp's own key of a checkpoint: by rank."""


class CarriedValues:
    """Of one fit. What saves itself (`state_dict`, `on_save_checkpoint`, `get_extra_state`) is left to that.

    Args:
        run: of this fit.

    Attributes:
        written: those of this rank at the end of a step.
        places: where all was when hooks of the start had run, if this fit may be entered again; before: in the entry
            before this one.
    """

    def __init__(self, run: LightningRun) -> None:
        self._run, self._began, self._start = run, Began(), Began()
        self.places, self.before = Places(), Places()
        self._started = False
        self.written = OnDemand(self._of, apart=run.trainer.strategy.root_device.type != "cpu")

    def begins(self) -> None:
        """All is as the script has it: `setup` was called, and nothing is restored yet."""
        run = self._run
        kept: Any = run.entry.objects if run.entry is not None else None
        before = kept.began if kept is not None else None  # entered again: by now they are those of the training
        self._began = before[0] if before is not None else self._now()

    def starts(self) -> None:
        """Hooks of the fit's start have run, and no epoch has begun."""
        if self._started:
            return
        run, self._started = self._run, True
        kept: Any = run.entry.objects if run.entry is not None else None
        if kept is not None:
            self.before, self.places = kept.places, Places.of(roots_of(run.trainer), known_of(run.trainer))
            kept.places = self.places
        if kept is not None and kept.began is not None:
            self._start = kept.began[1]
            return
        self._start = self._now()
        if kept is not None:
            kept.began = self._began, self._start

    def _now(self) -> Began:
        trainer = self._run.trainer
        return Began.of(unsaved_roots(trainer), known_of(trainer))

    def _of(self, step: int) -> bytes:
        state, world = self._run.state, self._run.place.world_size
        found = state.values.of(step) if state.values is not None else None
        if found is None:
            return b""
        try:
            with state.recorder.queued.reading():
                return changed(found, self._began, self._start, world)
        except NotSaveable:  # the device does not answer
            return b""

    def names(self, values: Mapping[int, bytes]) -> frozenset[str]:
        """What a restart of this script has again, of the values by rank."""
        return Carried(values, self._run.place.world_size).names

    def restore(self, record: Mapping[str, Any]) -> str:
        """Give this process the values in a checkpoint's record. All ranks call it together.

        Returns:
            What to note, on rank 0; empty if nothing is missing.

        Raises:
            LastgaspError: another rank is gone.
        """
        run, place, world = self._run, self._run.place, record["world_size"]
        added = {rank: split_trailer(data)[1] for rank, data in record["small"].items()}
        values = {rank: data for rank, data in added.items() if data} | record.get(VALUES, {})
        carried = Carried(values, world)
        if not carried.any:
            return ""
        if world != place.world_size:
            return "what training had changed beside the state begins with the script's values: the ranks are others"
        trainer = run.trainer
        refused = carried.prepare(place.rank, unsaved_roots(trainer), self._began, trainer.strategy.root_device)
        note = carried.restore(run.session.gather(f"values/{run.fit.number()}/{record['step']}", refused))
        return note if place.rank == 0 else ""


def split(aux: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The ranks' auxiliary states, and the values of those that have sent them."""
    parts = {rank: split_trailer(data) for rank, data in aux.items()}
    return {rank: one[0] for rank, one in parts.items()}, {rank: one[1] for rank, one in parts.items() if one[1]}
