"""Which training of its script a session belongs to: it resumes only from that one's checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path

from lastgasp.checkpoint.manifest import Fit
from lastgasp.fits import FITS
from lastgasp.pytorch.loop.state import TorchState

log = logging.getLogger("lastgasp")


def this_fit(state: TorchState, directory: Path, again: Fit | None = None) -> tuple[Fit, str]:
    """Count a session that is being opened; folds of a cross-validation open several in one directory.

    One that is entered `again` is counted already. Returns it, and what to note of those before it (`Fits.not_kept`).

    Models and optimizers are not compared here: the state does that, name by name, before it loads anything.

    Raises:
        ConfigError: a further one, when the first resumed from a checkpoint that may belong to any of them.
    """
    if again is not None:
        return again, ""
    not_kept = FITS.not_kept()
    broken_off, before = FITS.interrupted(directory), FITS.coming(directory) - 1
    number = FITS.begin(directory, next(iter(state.modules.values())))
    if broken_off and number > before:
        log.warning(
            "session %d of this script in %s did not end well; this is session %d, of another model, and does not "
            "resume it. To do so give resume=<its checkpoint>", before, directory, number
        )  # fmt: skip
    FITS.refuse_unnumbered(directory)
    return Fit(number=number), not_kept
