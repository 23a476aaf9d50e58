"""What the environment alone adds to a job, where it asks for something (`lastgasp.trainer_callbacks`).

`callbacks` is called in every `Trainer.__init__` of every process, after the user's own callbacks
were taken. `LASTGASP=1` adds `LastGasp` with the directory in `LASTGASP_DIR`, unless the user gave one
(then theirs stays and nothing is added); `LASTGASP_FAULT` adds the faults of the test kit.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lastgasp.adapter import asked_recovery, switched
from lastgasp_lightning.enters import Enters


def callbacks() -> list[Callback]:
    """The callbacks that the environment requests; an empty list if it requests none.

    Never raises, as that would break a `Trainer()` that does not even train: what is wrong with the
    environment is raised by the returned callback when `fit` starts.
    """
    try:
        return _wanted()
    except Exception as error:  # whatever it is, fit must refuse with it rather than run unprotected
        return [Refusal(error)]


def _wanted() -> list[Callback]:
    from .testing import fault_callbacks

    on = [_automatic()] if switched() else []
    return [*on, *fault_callbacks()]


def _automatic() -> Callback:
    from .again import watch_fits
    from .logversions import watch_versions

    found = AutoLastGasp()
    watch_versions()
    found.asked = asked_recovery(None)
    watch_fits(found.asked)
    return found


class AutoLastGasp(Enters, Callback):
    """Turns into `LastGasp` when the trainer is set up, or removes itself if the user gave one.

    Only then are the user's callbacks known. It leaves the trainer's list in both cases, so that a step
    costs nothing for it (docs/facts/lightning.md: 10 us for each callback object).
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace itself.

        Raises:
            ConfigError: `LASTGASP_DIR` or another `LASTGASP_*` variable is missing or wrong.
        """
        from . import LastGasp

        # A new list, as Lightning is iterating over the old one.
        others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        if any(isinstance(other, LastGasp) for other in others):
            trainer.callbacks = others  # type: ignore[attr-defined]
            return
        real = LastGasp()
        real.looked_at, real.recovery = self.looked_at, self.recovery
        trainer.callbacks = [real if c is self else c for c in trainer.callbacks]  # type: ignore[attr-defined]
        real.setup(trainer, pl_module, stage)


class Refusal(Callback):
    """Raises what was wrong with the environment as soon as something is run."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse.

        Raises:
            Exception: the error that the environment caused.
        """
        raise self.error
