"""Which fit of the script this is, and of what: only its own checkpoints are resumed from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lastgasp.adapter import FITS, CheckpointMismatch
from lastgasp.adapter.checkpoint import Fit, differences
from lastgasp.adapter.torch import AsSet, fingerprints
from lastgasp_lightning.fsdp import is_fsdp

log = logging.getLogger("lastgasp")


class ThisFit:
    """Made in `setup` of each fit but a tuner's.

    Args:
        entered: this process was in the same fit before (recovery in place).

    Attributes:
        settings: of optimizers and schedulers, as the script sets them; None until they are there.
        note: gets what people must know (`Session.note`).
        fit: number and digests, as they become known: the model's before weights are loaded, the optimizers' when
            training begins. What stands in checkpoints.

    Raises:
        ConfigError: fit 0 resumed from a checkpoint that may be of any fit.
    """

    def __init__(self, trainer: Any, directory: Path, entered: bool = False) -> None:
        self._trainer, self._directory, self._entered = trainer, directory, entered
        broken_off = FITS.interrupted(directory)
        before, again = FITS.coming(directory) - 1, FITS.trains_again(directory)
        self.fit = Fit(number=FITS.begin(directory, trainer.lightning_module))
        if broken_off and self.fit.number > before:
            log.warning(
                "fit %d of this script did not end well; this is fit %d, of another model, and does not resume it. "
                "To do so give resume=<its checkpoint>, or fit the same model again", before, self.fit.number
            )  # fmt: skip
        self._not_kept = again if trainer.is_global_zero else None
        self.note: Callable[[str], object] = log.warning
        self.settings: AsSet | None = None
        self._from: Path | None = None
        self._trial: Path | None = None
        self._saved: Fit | None = None
        self._set: object = None

    def tell_of_others(self) -> None:
        """Say what a restart from here on does once more. Call it when `note` is set."""
        if self._not_kept is not None:
            self.note(
                f"the last step of fit {self._not_kept} of this script is in no checkpoint: a restart from here on "
                f"trains it again before it comes to fit {self.fit.number}. Give its Trainer "
                "ModelCheckpoint(dirpath=...) to keep its end"
            )

    def number(self) -> int:
        """From 0, in the order in which the script begins them in this directory."""
        return self.fit.number

    def look_at_model(self) -> Fit:
        """Take the model's digest: after `configure_model`, before anything is loaded or added."""
        FITS.refuse_unnumbered(self._directory)
        strategy, module = self._trainer.strategy, self._trainer.lightning_module
        model = strategy.model if is_fsdp(strategy) else module  # the wrapper may hold some of the parameters
        self.fit = msgspec.structs.replace(self.fit, model=fingerprints.of_model(model))
        return self.fit

    def resumed(self, path: Path, unnumbered: bool, several: bool) -> None:
        """The checkpoint that was chosen as this fit's newest; `several`: there are those of other fits, too."""
        self._from, self._trial = path, path if several else None
        if unnumbered:
            FITS.resumed_unnumbered(self._directory, path)

    def loaded(self, record: dict[str, Any]) -> None:
        """What the checkpoint says of its fit; it counts only where `resumed` was called before."""
        saved, self._set = record.get("fit"), record.get("as_set")
        self._saved = msgspec.convert(saved, Fit) if saved is not None else None

    def look_at_optimizers(self) -> None:
        """Take the optimizers' digest: in `on_fit_start`, before their states are loaded.

        Raises:
            CheckpointMismatch: the checkpoint is of other optimizers, or may be of another trial.
        """
        if self.settings is None:
            schedulers = [one.scheduler for one in self._trainer.lr_scheduler_configs]
            module = None if self._entered else self._trainer.lightning_module  # as training has left it there
            self.settings = AsSet(_named("optimizer", self._trainer.optimizers), _named("scheduler", schedulers),
                                  module=module)  # fmt: skip
            self.settings.tell(self._set, self.note, self._trial)
        self.fit = msgspec.structs.replace(self.fit, optimizer=fingerprints.of_optimizers(self._trainer.optimizers))
        self._compare(self._saved)

    def look_at_data(self, loaders: list[Any], saved: str) -> str:
        """The digest of this rank's training data, each time that loaders are made; the first one is compared.

        Args:
            saved: this rank's, in the checkpoint; empty where there is none.

        Raises:
            CheckpointMismatch: the checkpoint is of other data.
        """
        digest = fingerprints.of_data(loaders)
        if self._saved is not None:
            self.fit = msgspec.structs.replace(self.fit, data=digest)
            if self._trainer.reload_dataloaders_every_n_epochs:  # those of this epoch may be others than of the first
                saved = ""
            self._compare(msgspec.structs.replace(self._saved, data=saved))
            self._saved = None
        self.fit = msgspec.structs.replace(self.fit, data="")  # each rank has data of its own
        return digest

    def _compare(self, saved: Fit | None) -> None:
        if saved is not None and self._from is not None and (found := differences(self._from, saved, self.fit)):
            raise CheckpointMismatch(str(self._from), found)

    def ended(self, durable: bool) -> None:
        """Training ended well; `durable`: with its last step in a checkpoint."""
        FITS.end(self._directory, durable)


def _named(label: str, found: Sequence[Any]) -> dict[str, Any]:
    return {label if len(found) == 1 else f"{label} {i}": one for i, one in enumerate(found)}
