"""Which iteration a job starts from: all ranks agree on the newest that verifies, before Megatron loads.

Megatron is steered by `args.load`, `args.ckpt_step` and a tracker of its own while it loads, since it reads a part of
the state from where the tracker says. That on disk is repaired once it has loaded, so that a plain Megatron would take
the same one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lastgasp.adapter import CheckpointSelector, ConfigError, Gather, Options, Place, SelectionPolicy
from lastgasp.adapter.checkpoint import (
    Agreement,
    Candidate,
    Verdict,
    candidates,
    set_aside_unfit,
    trained_again,
)
from lastgasp_megatron.exits import is_about_content
from lastgasp_megatron.own_buffers import OwnBuffers
from lastgasp_megatron.preload import MegatronPreload
from lastgasp_megatron.probe import drop_unfinished, misfit, probe
from lastgasp_megatron.tracker import (
    LAYOUT,
    NAME,
    Tracker,
    checkpoint_path,
    read_tracker,
    tracker_saying,
    write_tracker,
)
from lastgasp_megatron.trainings import is_of

log = logging.getLogger("lastgasp")

_PARTS = ("finetune", "no_load_optim", "no_load_rng")
"""Options with which parts of a checkpoint are not loaded."""
_OF_THE_START: dict[str, bool | None] = {
    **dict.fromkeys(_PARTS, False),
    "override_ckpt_iteration": None,
    "ckpt_convert_update_legacy_dist_opt_format": False,
}
"""Options that say how a training begins with a checkpoint, and the values without them."""


class MegatronSelector(SelectionPolicy):
    """Steers what Megatron loads. All ranks call together `steer` before `load_checkpoint`, and `load` in its place.

    Args:
        args: Megatron's namespace; `load` and `ckpt_step` are set in it.
        gather: the all-gather of the job.
        preload: what this rank loads while it verifies; None verifies first, and lets Megatron read again.
        number: of the training in its script (`Trainings`).

    Attributes:
        resumed: the iteration that was chosen; 0 where none was.
        goes_on: this job has saved it itself, since its launcher began.
    """

    missing_manifest = "--lastgasp-require-manifest"
    one_disk = True

    def __init__(
        self, args: Any, options: Options, place: Place, gather: Gather, preload: MegatronPreload | None = None,
        *, number: int = 0,
    ) -> None:  # fmt: skip
        named = (args.load, options.gasp.directory, getattr(args, "save", None))
        self._all, self._own = _folders(named), _folders(named[1:])
        self.restarts_from_own = bool(getattr(args, "finetune", False))
        # A new training from old weights: what lies in --save is not where it starts.
        folders = self._all[:1] if self.restarts_from_own and args.load else self._all
        super().__init__(options.gasp, place, folders, LAYOUT)
        self._args, self._options, self._preload, self._number = args, options, preload, number
        self._ckpt_step, self._load = getattr(args, "ckpt_step", None), args.load
        self._selector = CheckpointSelector(self, gather, is_about_content)
        self._chosen: Candidate | None = None
        self._steered = args.load
        self._misfits: dict[Path, tuple[Candidate, str]] = {}
        self._put_off: dict[str, Any] = {}
        self._set: dict[str, Any] = {}
        self._tracker: tuple[Path, str] | None = None
        self.resumed, self.goes_on = 0, False

    @property
    def present(self) -> frozenset[str]:
        """As of `CheckpointSelector`."""
        return self._selector.present

    def steer(self) -> None:
        """Choose, and set what Megatron will load. Raises as `CheckpointSelector.select`."""
        self._chosen = self._selector.select()

    def load(self, call: Callable[[], Any]) -> Any:
        """Have Megatron load, by `call`; if all ranks refuse a checkpoint that verifies, the next one is tried.

        Raises:
            NothingLoads: none of them loads.
            Exception: what Megatron raised, where the user named the checkpoint, or where it is not about its content.
        """
        results: list[Any] = []

        def load(candidate: Candidate) -> None:
            handed = contextlib.nullcontext() if self._preload is None else self._preload.handed_out()
            with handed, self._tracked(candidate.path.parent):
                results.append(call())

        if self._chosen is None or self._args.load != self._steered:
            return self.load_other(call)
        loaded = self._selector.load(load, self._chosen)
        if loaded is not None and loaded.path != self.asked() and self.place.rank == 0:
            _repair(loaded.path.parent, self.resumed)
        self._set_misfits_aside()
        return results[-1]

    def restore(self, own: OwnBuffers) -> None:
        """Behind `load`: the buffers that are this rank's own, where a training goes on."""
        if self._chosen is not None and self._preload is not None and not getattr(self._args, "finetune", False):
            own.restore(self._preload.own, self.goes_on, self.note)

    def load_other(self, call: Callable[[], Any]) -> Any:
        """Have Megatron load something else meanwhile, a teacher for instance, with the options that the user gave."""
        args = vars(self._args)
        given = self._put_off | ({"ckpt_step": self._ckpt_step} if self._chosen is not None else {})
        left = {name: args[name] for name in given if args.get(name) == self._set.get(name)}  # else the caller's own
        args.update({name: given[name] for name in left})
        try:
            return call()
        finally:
            args.update({name: value for name, value in left.items() if args.get(name) == given[name]})

    def tracker(self, path: str) -> str:
        """What Megatron shall read for the tracker at `path`."""
        return self._tracker[1] if self._tracker is not None and Path(path).absolute() == self._tracker[0] else path

    @contextlib.contextmanager
    def _tracked(self, directory: Path) -> Iterator[None]:
        """Within it the tracker in `directory` says for Megatron what was chosen; there may be none that can be read,
        and one that names an older iteration would stay, where that does not load either.
        """
        with tracker_saying(self.resumed) as path:
            self._tracker = directory / NAME, path
            try:
                yield
            finally:
                self._tracker = None

    def done(self) -> None:
        """Loading is over: restore the user's values, which are written into checkpoints."""
        self._args.ckpt_step, self._chosen = self._ckpt_step, None
        vars(self._args).update(self._put_off)
        self._forget()

    def _set_misfits_aside(self) -> None:
        """Another one was loaded: move away those that were found not to fit."""
        for candidate, why in self._misfits.values() if self.may_move and not self._selector.named else ():
            again = trained_again(candidate.step, self.resumed)
            if again and (home := set_aside_unfit(candidate, [why])) is not None:
                self.note(f"{candidate.path} {why}; moved to {home.name}{again}")

    def _forget(self) -> None:
        if self._preload is not None:
            self._preload.forget()

    # -- the policy -------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Also what a job that was killed has left of a save over a gasp."""
        super().tidy()
        for one in candidates(self._own, LAYOUT):
            if one.manifest is not None:
                try:
                    drop_unfinished(one.path, one.manifest)
                except OSError as error:
                    log.warning("what an unfinished save has left in %s cannot be removed: %s", one.path, error)

    def asked(self) -> Path | None:
        """By --lastgasp-resume, or by --ckpt-step."""
        found = super().asked()
        if found is None and self._ckpt_step and self._load:
            return checkpoint_path(Path(self._load).absolute(), int(self._ckpt_step))
        return found

    def candidates(self, own: bool) -> list[Candidate]:
        """Where the training starts; a restart looks where the job saves."""
        folders = self.folders
        if own and self.place.restarted:
            folders = self._own
        found = [self.judged(one) for one in candidates(folders, LAYOUT)]
        if own:
            return [one for one in found if self._is_own(one)]
        return _without_abandoned(found)

    def _is_own(self, one: Candidate) -> bool:
        """Whether this training has saved it: with what an earlier one of the script has saved it may begin."""
        of = one.manifest
        job = of is not None and of.job == self.place.job
        return job and one.path.parent in self._own and is_of(one, self._number)

    def judged(self, candidate: Candidate) -> Candidate:
        """Not one that Megatron cannot load, or has not finished saving."""
        found = self._trusted(candidate)
        why = misfit(found, self._args) if found.problem is None else ""
        if why:
            self._misfits[found.path] = found, why
        return dataclasses.replace(found, problem=why) if why else found

    def named(self, path: Path) -> Candidate:
        """Of any sizes: Megatron says what does not fit."""
        for found in candidates([path.parent], LAYOUT):
            if found.path == path and path.is_dir() and LAYOUT.step(path) is not None:
                return self._trusted(found)
        allowed = "'auto', 'never' or an existing iter_* directory"
        remedy = "Look at `lastgasp verify` of its directory."
        raise ConfigError("--lastgasp-resume or --ckpt-step", str(path), allowed, remedy)

    def _trusted(self, candidate: Candidate) -> Candidate:
        """A checkpoint without a manifest may be taken, unless the tracker says that it was never finished."""
        bare = candidate.path.is_dir() and not LAYOUT.manifest_path(candidate.path).exists()
        if not bare or candidate.manifest is not None or self._options.require_manifest:
            return candidate
        tracker, problem = read_tracker(candidate.path.parent), None
        if tracker.state == "iteration" and (candidate.step or 0) > tracker.iteration:
            problem = f"has no manifest, and the tracker says {tracker.iteration}: its save was not finished"
        elif tracker.state == "release":
            problem = "has no manifest, and the tracker says release"
        return dataclasses.replace(candidate, problem=problem)

    def verify(self, candidate: Candidate) -> Verdict:
        """This rank's part; what a rank is going to load it verifies itself, while it loads it."""
        self._forget()
        if candidate.manifest is None:
            return probe(candidate.path, candidate.step, self.local)
        self.preload = None if misfit(candidate, self._args) else self._preload
        return super().verify(candidate)

    def selected(self, candidate: Candidate, by_name: bool) -> None:
        """Steer Megatron there."""
        super().selected(candidate, by_name)
        path, step = candidate.path, LAYOUT.step(candidate.path)
        assert step is not None
        elsewhere = self._load is None or Path(self._load).absolute() != path.parent
        if elsewhere and self.place.rank == 0:
            log.warning("loading from %s and not from --load=%s: what is there is newer", path.parent, self._load)
        self._args.load = self._steered = str(path.parent) if elsewhere else self._load
        self._args.ckpt_step = self.resumed = step
        if not by_name:
            self._load_whole(candidate)
        self._set = {name: getattr(self._args, name, None) for name in ("ckpt_step", *self._put_off)}

    def _load_whole(self, candidate: Candidate) -> None:
        """Options that say how the training begins have no part in how this job goes on after a fault."""
        vars(self._args).update(self._put_off)  # for one that has not loaded
        self._put_off = {}
        of = candidate.manifest
        begun = of is not None and of.creator.time_ns >= self.place.since_ns
        self.goes_on = self.place.restarted and begun and self._is_own(candidate)
        given = {name: off for name, off in _OF_THE_START.items() if getattr(self._args, name, None) not in (None, off)}
        if self.goes_on and getattr(self._args, "no_save_rng", False):
            given.pop("no_load_rng", None)
            self._put_off["no_load_rng"] = bool(getattr(self._args, "no_load_rng", False))
            self._args.no_load_rng = True  # Megatron would exit over what is not there
            if self.place.rank == 0:
                self.note(f"--no-save-rng: random numbers behind iteration {candidate.step} are not those of a job "
                          "without the fault")  # fmt: skip
        if self.goes_on:
            self._put_off |= {name: getattr(self._args, name) for name in given}
            vars(self._args).update(given)
            if self.place.rank == 0 and given:
                log.info("%s: for the start only; after a fault all of %s is loaded as it is", _said(given),
                         candidate.path.name)  # fmt: skip
            return
        parts = [name for name in _PARTS if name in given]
        if parts and self.place.rank == 0 and candidate.path.parent in self._own:
            log.warning("%s: what %s holds beside the weights is not all loaded. Leave it out to go on with that "
                        "training as it was", _said(parts), candidate.path)  # fmt: skip

    def lost(self, agreement: Agreement, gather: Gather) -> dict[str, str]:
        """Also what trackers name."""
        trackers = {folder: read_tracker(folder) for folder in self.folders}
        if any(t.state == "release" for t in trackers.values()) and not self._options.require_manifest:
            log.warning("a release checkpoint has no manifest: it is loaded as it is")
            return {}
        lost = {path: "; ".join(why) for path, why in agreement.rejected.items()}
        for folder, tracker in trackers.items():
            if tracker.state == "torn":
                lost[str(folder)] = "its tracker cannot be read, and there is no good iteration to repair it from"
            elif tracker.state != "missing" and not agreement.listed:
                lost[str(folder)] = f"its tracker names {tracker.name}, and no iteration is there"
        return lost or super().lost(agreement, gather)

    def unknown(self) -> dict[str, str]:
        """Beside Megatron's tracker."""
        return {path: why for path, why in super().unknown().items() if Path(path).name != NAME}

    def begins_over(self) -> None:
        """Warn about what lastgasp leaves alone but Megatron may not."""
        over = [path for path in self.left_unused() if Path(path).name != NAME] if self.place.rank == 0 else []
        if over:
            log.warning("resume='never': lastgasp uses none of the %d checkpoints or files of training that are there "
                        "(%s). Megatron loads what the tracker in --load names, unverified, or begins from scratch; "
                        "a later start with 'auto' resumes from the newest of all",
                        len(over), ", ".join(over[:3]))  # fmt: skip


def _without_abandoned(found: list[Candidate]) -> list[Candidate]:
    """Iterations behind a roll-back get a problem: the tracker was made to name an earlier one after they were saved.

    By hand, as Megatron's way back, or by saves of a job that `--ckpt-step` had begin before them. A job that is killed
    before it has written the tracker leaves one that is older than the manifest.
    """
    trackers = {folder: read_tracker(folder) for folder in {one.path.parent for one in found}}
    there = {(one.path.parent, one.step) for one in found if one.problem is None}
    return [_unless_abandoned(one, trackers[one.path.parent], there) for one in found]


def _unless_abandoned(one: Candidate, tracker: Tracker, there: set[tuple[Path, int | None]]) -> Candidate:
    folder, at = one.path.parent, tracker.iteration
    if (folder, at) not in there or one.problem is not None or one.manifest is None or (one.step or 0) <= at:
        return one
    if not _is_newer(folder / NAME, LAYOUT.manifest_path(one.path)):
        return one
    why = f"was rolled back: the tracker was set to {at} after this one had been saved"
    return dataclasses.replace(one, problem=why)


def _is_newer(one: Path, other: Path) -> bool:
    """By the file system's clock, which has written both."""
    with contextlib.suppress(OSError):
        return one.stat().st_mtime_ns > other.stat().st_mtime_ns
    return False


def _said(options: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in options)


def _folders(named: Iterable[str | Path | None]) -> list[Path]:
    return list(dict.fromkeys(Path(name).absolute() for name in named if name))


def _repair(directory: Path, step: int) -> None:
    was = read_tracker(directory)
    if was.name == str(step):
        return
    try:
        write_tracker(directory, step)
    except OSError as error:
        log.warning("the tracker in %s still says %s: %s", directory, was.name, error)
        return
    log.warning("the tracker in %s said %s, it says %d now", directory, was.name, step)
