"""Which checkpoint a fit starts from: all ranks agree on the newest that verifies."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from lastgasp._fs import remove_stale_temps
from lastgasp.checkpoint import (
    Agreement,
    Candidate,
    Verdict,
    agree,
    candidates,
    newest_good,
    progress_bar,
    quarantine,
    verify,
)
from lastgasp.config import GaspConfig
from lastgasp.errors import ConfigError, DamagedCheckpoint, NoGoodCheckpoint
from lastgasp.ports import Gather
from lastgasp.topology import Place
from lastgasp_lightning.checkpoint_io import search_folders
from lastgasp_lightning.compat import Undo, replace_method
from lastgasp_lightning.source import LAYOUT

log = logging.getLogger("lastgasp")


def last_good(dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint in `dir` that verifies, for `trainer.fit(ckpt_path=...)`; None in an empty one.

    For a script that wants to say itself what it starts from; `LastGasp(dir)` does it alone.

    Raises:
        NoGoodCheckpoint: there are checkpoints, and none verifies.
    """
    found = newest_good([Path(dir)], LAYOUT, quarantine=False)
    return str(found.path) if found is not None else None


class Chooser:
    """Replaces the path that Lightning restores from, once its process group is up.

    Attributes:
        resumed: a checkpoint of ours was chosen.
    """

    def __init__(self, trainer: Any, config: GaspConfig, place: Place, gather: Gather) -> None:
        self._trainer, self._config, self._place, self._gather = trainer, config, place, gather
        self._folders = search_folders(trainer, config)
        self.resumed = False

    def install(self) -> Undo:
        """Wrap `_restore_modules_and_callbacks`, which runs after all `setup` hooks."""
        connector = self._trainer._checkpoint_connector

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def restore(checkpoint_path: Any = None, weights_only: bool | None = None) -> Any:
                if self._trainer.state.fn != TrainerFn.FITTING:
                    return original(checkpoint_path, weights_only)
                path = self.choose(checkpoint_path)
                # Our own key holds more than tensors; Lightning's default would refuse it.
                trusted = False if self.resumed and weights_only is None else weights_only
                return original(path, trusted)

            return restore

        return replace_method(connector, "_restore_modules_and_callbacks", make)

    def choose(self, given: Any) -> Any:
        """The path to restore from, or None to start from scratch; the same on every rank.

        Raises:
            NoGoodCheckpoint: candidates exist, none is good, and nobody said to start anew.
            DamagedCheckpoint: resume=<path> names a damaged one.
        """
        if self._place.rank == 0:
            for folder in self._folders:
                remove_stale_temps(folder)
        resume = self._config.resume
        first = self._place.attempt == 0
        if resume not in ("auto", "never") and first:
            self.resumed = True
            return self._explicit(Path(resume))
        agreement = self._agree(job=self._place.job if resume != "auto" else None)
        self._report(agreement)
        if agreement.chosen is not None:
            self.resumed = True
            if given and Path(given).absolute() != agreement.chosen.path.absolute():
                log.warning("ckpt_path=%s was not used: %s is newer; say resume='never' to start from it", given,
                            agreement.chosen.path)  # fmt: skip
            return str(agreement.chosen.path)
        if agreement.rejected and resume == "auto" and not given:
            reasons = {path: "; ".join(why) for path, why in agreement.rejected.items()}
            raise NoGoodCheckpoint(", ".join(map(str, self._folders)), reasons)
        return given

    def _explicit(self, path: Path) -> str:
        if not path.exists():
            raise ConfigError("resume", str(path), "'auto', 'never' or an existing checkpoint", "Check the path.")
        if LAYOUT.manifest_path(path).exists() and not (verdict := verify(path, LAYOUT)).ok:
            raise DamagedCheckpoint(str(path), verdict.reasons)
        return str(path)

    def _agree(self, job: str | None) -> Agreement:
        found = candidates(self._folders, LAYOUT)
        if job is not None:
            found = [c for c in found if c.manifest is not None and c.manifest.job == job]
        return agree(found, self._verify_share, self._gather, self._place.rank, self._place.world_size)

    def _verify_share(self, candidate: Candidate) -> Verdict:
        """This rank's part of the chunks: the ranks of one node share the reading."""
        share = (self._trainer.local_rank, max(1, self._trainer.num_devices))
        with progress_bar(f"verifying {candidate.path.name}") as progress:
            return verify(candidate.path, LAYOUT, manifest=candidate.manifest, share=share, progress=progress)

    def _report(self, agreement: Agreement) -> None:
        """Say what was not used and why; move away what is proven bad."""
        for path, reasons in agreement.rejected.items():
            if self._place.rank == 0:
                log.warning("%s was not used: %s", path, "; ".join(reasons))
        if agreement.chosen is not None and self._trainer.local_rank == 0:
            for bad in agreement.damaged:
                quarantine(bad, agreement.rejected[str(bad.path)], proven=True)
