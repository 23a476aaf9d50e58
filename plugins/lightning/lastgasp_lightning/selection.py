"""Which checkpoint a fit starts from: all ranks agree on the newest that verifies."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from lightning.pytorch.trainer.states import TrainerFn

from lastgasp.adapter import FITS, CheckpointSelector, GaspConfig, Gather, Place, SelectionPolicy, Undo
from lastgasp.adapter.again import MEMORY, Memory, cloned
from lastgasp.adapter.checkpoint import (
    Candidate,
    Fit,
    Verdict,
    differences,
    has_ended,
    is_of_home,
    mark_ended,
    newest_good,
)
from lastgasp.adapter.torch import OnePass, exception_origin
from lastgasp_lightning.checkpoint_io import (
    LAYOUT,
    SHARDED,
    VerifiedCheckpointIO,
    is_remote,
    named,
    search_folders,
)
from lastgasp_lightning.compat import given_on, replace_method
from lastgasp_lightning.ranks import is_sharded_by
from lastgasp_lightning.thisfit import ThisFit

log = logging.getLogger("lastgasp")


def last_good(dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint in `dir` that verifies, for `trainer.fit(ckpt_path=...)`; None where there is none.

    For a script that wants to say itself what it starts from; `LastGasp(dir)` does it alone. Where the script has begun
    fits in `dir` before, only checkpoints of the one that comes next count.

    Raises:
        NoGoodCheckpoint: there are checkpoints, and none verifies.
    """
    folder = Path(dir).expanduser().absolute()
    found = newest_good([folder], SHARDED, quarantine=False, fit=FITS.coming(folder))
    return str(found.path) if found is not None else None


class _Policy(SelectionPolicy):
    """Also what Lightning would begin with, where this fit has saved that in no folder of these: `hpc_ckpt_N.ckpt`.

    Attributes:
        given: what Lightning would begin with, as far as it can be read; None where there is nothing.
        compared: it is of this fit, so that the newer one of both is taken.
    """

    given: Candidate | None = None
    compared = False

    def look_at(self, given: Any) -> None:
        """Lightning would begin with this."""
        if not given or is_remote(given) or not Path(given).exists():
            return
        self.given = one = self.named(named(Path(given).absolute(), self.layout))
        assert self.fit is not None
        fits = one.manifest is not None and not differences(one.path, one.manifest.fit, self.fit)
        self.compared = fits and one.path.parent not in self.folders and is_of_home(one, self.config.directory)

    def candidates(self, own: bool) -> list[Candidate]:
        """As ever, and the one that Lightning would begin with."""
        found, one = super().candidates(own), self.given
        if one is None or not self.compared or (own and one.manifest and one.manifest.job != self.place.job):
            return found
        return sorted([*found, one], key=lambda candidate: candidate.age_key, reverse=True)

    def verify(self, candidate: Candidate) -> Verdict:
        """What the user or Slurm names stays where it is, whatever is found."""
        verdict = super().verify(candidate)
        if not self.is_given(candidate):
            return verdict
        damages = [msgspec.structs.replace(damage, proven=False) for damage in verdict.damages]
        return msgspec.structs.replace(verdict, damages=tuple(damages))

    def is_given(self, candidate: Candidate | None) -> bool:
        """Whether Lightning would begin with it, and it has been compared."""
        return self.compared and candidate is self.given

    def why_not(self, chosen: Candidate) -> str:
        """Why the one that Lightning would begin with was not used."""
        one = self.given
        if one is None or one.manifest is None:
            return f"it has no manifest, and this training has saved {chosen.path} itself; which is newer is not known"
        if not self.compared and one.path.parent not in self.folders:
            return f"it is not of this training, which has saved {chosen.path} itself"
        return f"{chosen.path} is {'newer' if one.age_key < chosen.age_key else 'the newest good one'}"


class LightningSelector:
    """Replaces the path that Lightning restores from, once its process group is up.

    Attributes:
        resumed: a checkpoint of ours was chosen.
        present: the manifests that were there before (`CheckpointSelector.present`).
        same_run: and the user did not name it, so that it is the same run that resumes.
        goes_on: what was chosen is of a training that had not come to its end, or is done again only because the script
            begins anew. Otherwise its end may have been that of another job. As this rank's disk says.
        begins: called when all is as the script has it; loaded: on all ranks once a checkpoint is loaded.
        note: reports what people must know (`Session.note`).
        memory: where the fit was entered again: what all ranks begin with, instead of any file.
        left: begins with what ranks before have left in arenas, where it is newer than all files; says whether it did.
        entered: the same where the fit was entered again, with what ranks have held; has `present`.
        loading: the verified path that is being loaded; chosen: the last one that was.
        io: is handed what was loaded while it was verified; None where Lightning shall read files itself.
    """

    def __init__(self, trainer: Any, config: GaspConfig, place: Place, gather: Gather, fit: ThisFit) -> None:
        self._trainer, self._config, self._place, self._gather, self._fit = trainer, config, place, gather, fit
        self.resumed = self.same_run = self.goes_on = False
        self.begins: Callable[[], None] = lambda: None
        self.loaded: Callable[[], None] = lambda: None
        self.note: Callable[[str], None] = log.warning
        self.present: frozenset[str] | None = None
        self.memory: Callable[[], Memory] | None = None
        self.left: Callable[[Callable[[dict[str, Any]], None]], bool] | None = None
        self.entered: Callable[[Callable[[dict[str, Any]], None]], frozenset[str] | None] | None = None
        self.loading: Path | None = None
        self.io: VerifiedCheckpointIO | None = None
        self.chosen: Candidate | None = None
        self._layout = SHARDED if is_sharded_by(trainer.strategy) else LAYOUT

    def install(self) -> Undo:
        """Wrap `_restore_modules_and_callbacks`, which runs after all `setup` hooks."""
        connector = self._trainer._checkpoint_connector

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def restore(checkpoint_path: Any = None, weights_only: bool | None = None) -> Any:
                if self._trainer.state.fn != TrainerFn.FITTING:
                    return original(checkpoint_path, *given_on(weights_only))

                def load(path: Path) -> None:
                    # Our own key holds more than tensors; Lightning's default would refuse it.
                    original(str(path), *given_on(False if weights_only is None else weights_only))

                if weights_only:  # the user does not trust what would be unpickled
                    self.io = None
                if self.load(load, checkpoint_path):
                    return None
                return original(checkpoint_path, *given_on(weights_only))

            return restore

        return replace_method(connector, "_restore_modules_and_callbacks", make)

    def load(self, load: Callable[[Path], None], given: Any) -> bool:
        """Have the newest that is good and that loads restored; the same on every rank.

        Args:
            load: Lightning restores from a path; given: what the user wants where there is none of ours.

        Returns:
            Whether one was loaded; not where `given` is newer.

        Raises:
            NoGoodCheckpoint: candidates exist, none is good, and nobody said to start anew.
            NothingLoads: none of them loads.
            DamagedCheckpoint: resume=<path> names a damaged one.
            CheckpointMismatch: the newest is of another model.
        """
        trainer, config = self._trainer, self._config
        folders, fit = search_folders(trainer, config), self._fit.look_at_model()
        self.begins()
        if self.memory is not None:
            self._load_memory(self.memory(), load)
            return True
        if self.entered is not None:
            self.present = self.entered(lambda checkpoint: self._load_held(lambda: checkpoint, load))
            self.loaded()
            return True
        policy = _Policy(config, self._place, folders, self._layout, fit=fit, instead=bool(given))
        policy.note = self.note
        policy.look_at(given)
        selector = CheckpointSelector(policy, self._gather, exception_origin.is_about_content)
        if self.left is not None and self.left(lambda checkpoint: self._load_held(lambda: checkpoint, load)):
            selector.pass_over()
            self.present = selector.present
            self.loaded()
            return True

        def restore(candidate: Candidate) -> None:
            self.resumed, self.same_run = True, not selector.named
            self.goes_on = policy.behind or self._goes_on(candidate)
            if not selector.named:
                self._fit.resumed(candidate.path, policy.unnumbered, policy.several)
            self._warn(given, policy, candidate)
            self.loading, self.chosen = candidate.path, candidate
            try:
                load(candidate.path)
            finally:
                self.loading = None

        with self._in_one_pass(policy, fit):
            selected = selector.select()
            found = selected is not None and not policy.is_given(selected)
            if found:
                selector.load(restore, selected)
        self.present = selector.present
        if found and self.same_run:
            self.loaded()
        return found

    @contextlib.contextmanager
    def _in_one_pass(self, policy: _Policy, fit: Fit) -> Iterator[None]:
        """Within it, what is verified is loaded as well, and handed to Lightning once it was selected."""
        if self.io is None:
            yield
            return
        policy.preload = self.io.preload = OnePass(fit)
        try:
            yield
        finally:
            self.io.preload = None

    def _load_memory(self, memory: Memory, load: Callable[[Path], None]) -> None:
        self._load_held(lambda: cloned(memory.checkpoint), load)  # optimizers train the very tensors they are given
        self.present = memory.present
        self.loaded()

    def _load_held(self, checkpoint: Callable[[], dict[str, Any]], load: Callable[[Path], None]) -> None:
        """Have Lightning restore from what is no file."""
        connector = self._trainer._checkpoint_connector
        given = connector._ckpt_path
        undo = replace_method(
            self._trainer.strategy, "load_checkpoint", lambda _: lambda *args, **options: checkpoint()
        )
        try:
            self.resumed = self.same_run = self.goes_on = True
            load(MEMORY)
        finally:
            undo()
            connector._ckpt_path = given

    def _goes_on(self, candidate: Candidate) -> bool:
        found, place = candidate.manifest, self._place
        if found is None or (place.restarted and found.job == place.job):
            return found is not None
        return found.kind == "gasp" and not has_ended(candidate.path, found)

    def ended(self) -> None:
        """The training that goes on has ended where it was asked to, after what was due: the next job trains on."""
        if self.chosen is not None and self.chosen.manifest is not None:
            mark_ended(self.chosen.path, self.chosen.manifest)

    def _warn(self, given: Any, policy: _Policy, chosen: Candidate) -> None:
        told = self._config.resume not in ("auto", "never") and self._place.attempt == 0
        if given and not told and Path(given).resolve() != chosen.path.resolve():
            why = policy.why_not(chosen)
            log.warning("ckpt_path=%s was not used: %s; say resume='never' to start from it", given, why)
