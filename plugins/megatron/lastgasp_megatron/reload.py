"""Which iteration a job starts from: all ranks agree on the newest that verifies, before Megatron loads.

Megatron is steered by `args.load` and `args.ckpt_step`; the tracker is repaired so that a plain Megatron
would take the same one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from lastgasp._fs import remove_stale_temps
from lastgasp.checkpoint import Agreement, Candidate, Verdict, agree, candidates, progress_bar, quarantine, verify
from lastgasp.checkpoint.moving import put_back
from lastgasp.checkpoint.quarantine import set_aside_unfit
from lastgasp.checkpoint.trial import Trial, trained_again
from lastgasp.checkpoint.unknown import all_of_training, unknown
from lastgasp.errors import ConfigError, DamagedCheckpoint, NoGoodCheckpoint, grouped
from lastgasp.ports import Gather
from lastgasp.sharing import require_shared
from lastgasp.topology import Place
from lastgasp_megatron.args import Options
from lastgasp_megatron.exits import is_about_content
from lastgasp_megatron.fit import misfit
from lastgasp_megatron.manifests import LAYOUT
from lastgasp_megatron.preload import Preload
from lastgasp_megatron.probe import probe
from lastgasp_megatron.tracker import NAME as TRACKER
from lastgasp_megatron.tracker import Tracker, checkpoint_path, read_tracker, write_tracker

log = logging.getLogger("lastgasp")


class MegatronSelector:
    """Steers what Megatron loads. All ranks call together `steer` before `load_checkpoint`, and `load` in its place.

    Args:
        args: Megatron's namespace; `load` and `ckpt_step` are set in it.
        gather: the all-gather of the job.
        preload: what this rank loads while it verifies; None verifies first, and lets Megatron read again.

    Attributes:
        resumed: the iteration that was chosen; 0 where none was.
        note: tells people what they must know about the choice (`Session.note`).
    """

    def __init__(
        self, args: Any, options: Options, place: Place, gather: Gather, preload: Preload | None = None
    ) -> None:
        self._preload = preload or Preload(lambda step: "", optimizer=False, first=False)
        self._one_pass = preload is not None
        self._args, self._options, self._place, self._gather = args, options, place, gather
        self._given, self._load = getattr(args, "ckpt_step", None), args.load
        self._trial = Trial(gather, is_about_content)
        self._chosen: Candidate | None = None
        self._by_name = False
        self._misfits: dict[Path, tuple[Candidate, str]] = {}
        self.resumed = 0
        self.note: Callable[[str], None] = lambda text: log.warning("%s", text)

    def steer(self) -> None:
        """Choose, and set what Megatron will load.

        Raises:
            NoGoodCheckpoint: there are checkpoints, or a tracker that names one, and none can be trusted.
            DamagedCheckpoint: the one that was asked for by name is damaged.
            ConfigError: the one that was asked for is not there; or each host has a directory of its own.
        """
        require_shared(self._options.gasp.directory, self._place, self._gather)
        if self._place.rank == 0:
            for folder in self._folders():
                remove_stale_temps(folder)
                put_back(folder, LAYOUT)
        self._gather("reload/tidied", b"")  # all ranks must list the same
        self._steer(())

    def load(self, call: Callable[[], Any]) -> Any:
        """Have Megatron load; where all its ranks refuse a checkpoint that verifies, the next one is tried.

        Args:
            call: `load_checkpoint` of Megatron's.

        Raises:
            NothingLoads: none of them loads.
            Exception: what Megatron raised, where the user named the checkpoint, or where it is not about its content.
        """

        def load() -> Any:
            with self._preload.handed_out():
                return call()

        if self._chosen is None or self._by_name:
            return load()
        results: list[Any] = []
        self._trial.load(
            lambda refused: self._steer(refused) if refused else self._chosen, lambda _: results.append(load())
        )
        self._set_aside()
        return results[-1]

    def done(self) -> None:
        """Loading is over: `ckpt_step` is the user's again, as it is written into checkpoints."""
        self._args.ckpt_step, self._chosen = self._given, None
        self._preload.forget()

    def _steer(self, refused: Collection[Path]) -> Candidate | None:
        self._args.load = self._load
        self._chosen = self._choose(refused)
        if self._chosen is not None:
            self._take(self._chosen.path)
        self._gather("reload/ready", b"")  # rank 0 may have repaired the tracker that all are about to read
        return self._chosen

    def _set_aside(self) -> None:
        """Another one was loaded: move away what no rank could load, and what could be seen not to fit."""
        if self._place.rank != 0:
            return
        self._trial.set_aside(note=self.note, resumed=self.resumed)
        for candidate, why in self._misfits.values():
            again = trained_again(candidate.step, self.resumed)
            if again and (home := set_aside_unfit(candidate, [why])) is not None:
                self.note(f"{candidate.path} {why}; moved to {home.name}{again}")

    # -- choice -----------------------------------------------------------------------------------

    def _choose(self, refused: Collection[Path]) -> Candidate | None:
        """The checkpoint to load, verified; None where Megatron shall do what it does by itself."""
        self._by_name = False
        asked, resume = self._asked(), self._options.gasp.resume
        if self._place.attempt > 0 and (asked is not None or self._finetune):
            # A restart goes on from what the job has saved; where it started from counts only after that.
            agreement = self._agree(self._folders() if asked is not None else self._folders()[1:], refused, own=True)
            if agreement.chosen is not None:
                self._args.finetune = False
                return agreement.chosen
        if asked is not None:
            return self._explicit(asked)
        folders = [Path(self._args.load).absolute()] if self._finetune and self._args.load else self._folders()
        agreement = self._agree(folders, refused, own=resume == "never")
        if agreement.chosen is None and resume == "auto" and not refused:
            self._refuse_if_lost(agreement, folders)
        if agreement.chosen is None and resume == "never":
            self._begin_over(folders)
        return agreement.chosen

    @property
    def _finetune(self) -> bool:
        """A new training from old weights: what lies in --save is not where it starts."""
        return bool(getattr(self._args, "finetune", False))

    def _asked(self) -> Path | None:
        """The checkpoint that the user named; None where the newest good one is wanted."""
        if self._options.gasp.resume not in ("auto", "never"):
            return Path(self._options.gasp.resume).absolute()
        if self._given and self._args.load:
            return checkpoint_path(Path(self._args.load).absolute(), int(self._given))
        return None

    def _explicit(self, path: Path) -> Candidate:
        if not path.is_dir() or LAYOUT.step(path) is None:
            raise ConfigError(
                "--lastgasp-resume or --ckpt-step",
                str(path),
                "'auto', 'never' or an existing iter_* directory",
                "Look at `lastgasp verify` of its directory.",
            )
        self._by_name = True
        agreement = self._agree([path.parent], only=path)
        if agreement.chosen is None:
            raise DamagedCheckpoint(str(path), [why for reasons in agreement.rejected.values() for why in reasons])
        return agreement.chosen

    # -- agreement --------------------------------------------------------------------------------

    def _folders(self) -> list[Path]:
        named = (self._args.load, self._options.gasp.directory, getattr(self._args, "save", None))
        return list(dict.fromkeys(Path(name).absolute() for name in named if name))

    def _agree(
        self, folders: list[Path], refused: Collection[Path] = (), own: bool = False, only: Path | None = None
    ) -> Agreement:
        found = [self._judged(c) for c in candidates(folders, LAYOUT) if c.path not in refused]
        if own:
            found = [c for c in found if c.manifest is not None and c.manifest.job == self._place.job]
        if only is not None:
            found = [c for c in found if c.path == only]
        agreement = agree(found, self._verify_share, self._gather, self._place.rank, self._place.world_size)
        self._report(agreement)
        return agreement

    def _judged(self, candidate: Candidate) -> Candidate:
        found = self._trusted(candidate)
        why = misfit(found, self._args) if found.problem is None and not self._by_name else ""
        if why:
            self._misfits[found.path] = found, why
            return dataclasses.replace(found, problem=why)
        return found

    def _trusted(self, candidate: Candidate) -> Candidate:
        """A checkpoint without a manifest may be taken, unless the tracker says that it was never finished."""
        bare = candidate.path.is_dir() and not LAYOUT.manifest_path(candidate.path).exists()
        if not bare or candidate.manifest is not None or self._options.require_manifest:
            return candidate
        tracker = read_tracker(candidate.path.parent)
        if tracker.state == "iteration" and (candidate.step or 0) > tracker.iteration:
            why = f"has no manifest, and the tracker says {tracker.iteration}: its save was not finished"
            return dataclasses.replace(candidate, problem=why)
        if tracker.state == "release":
            return dataclasses.replace(candidate, problem="has no manifest, and the tracker says release")
        return dataclasses.replace(candidate, problem=None)

    def _verify_share(self, candidate: Candidate) -> Verdict:
        """This rank's part: each byte is read by one rank, as all of them see the same disk.

        What a rank is going to load it verifies itself, while it loads it.
        """
        share = (self._place.rank, self._place.world_size)
        self._preload.forget()
        if candidate.manifest is None:
            return probe(candidate.path, candidate.step, share)
        ahead = self._one_pass and not misfit(candidate, self._args)
        names = self._preload.covers(candidate) if ahead else []
        with progress_bar(f"verifying {candidate.path.name}") as progress:
            verdict = verify(
                candidate.path, LAYOUT, manifest=candidate.manifest, share=share, progress=progress,
                read_by_others=names,
            )  # fmt: skip
        if not verdict.ok or not names:
            return verdict
        damages = tuple(self._preload.read(candidate))
        return msgspec.structs.replace(verdict, ok=not damages, damages=damages)

    def _report(self, agreement: Agreement) -> None:
        """Say what was not used and why; move away what is proven bad."""
        if self._place.rank != 0:
            return
        for line in grouped({path: "; ".join(why) for path, why in agreement.rejected.items()}, " was not used"):
            log.warning("%s", line)
        if agreement.chosen is not None:
            for bad in agreement.damaged:
                quarantine(bad, agreement.rejected[str(bad.path)], proven=True)
            if agreement.chosen.manifest is None:
                log.warning(
                    "%s has no manifest, so a flipped bit in it would not be seen; `lastgasp manifest %s` adds "
                    "manifests, and --lastgasp-require-manifest refuses checkpoints without one",
                    agreement.chosen.path,
                    agreement.chosen.path.parent,
                )

    def _refuse_if_lost(self, agreement: Agreement, folders: list[Path]) -> None:
        """Training from scratch over checkpoints that were there would lose them silently."""
        trackers = {folder: read_tracker(folder) for folder in folders}
        if any(t.state == "release" for t in trackers.values()) and not self._options.require_manifest:
            log.warning("a release checkpoint has no manifest: it is loaded as it is")
            return
        lost = {path: "; ".join(why) for path, why in agreement.rejected.items()}
        for folder, tracker in trackers.items():
            if tracker.state == "torn":
                lost[str(folder)] = "its tracker cannot be read, and there is no good iteration to repair it from"
            elif tracker.state != "missing" and not agreement.listed:
                lost[str(folder)] = f"its tracker names {tracker.name}, and no iteration is there"
        lost = lost or self._not_understood(folders, agreement)
        if lost:
            raise NoGoodCheckpoint(", ".join(map(str, folders)), lost)

    def _not_understood(self, folders: list[Path], agreement: Agreement) -> dict[str, str]:
        """Files of training beside what Megatron writes: no directory with such is an empty one. Alike on all ranks."""
        if agreement.listed:
            return {}
        mine = unknown(folders, LAYOUT) if self._place.rank == 0 else {}
        mine = {path: why for path, why in mine.items() if Path(path).name != TRACKER}
        found: dict[str, str] = msgspec.msgpack.decode(
            self._gather("reload/unknown", msgspec.msgpack.encode(mine))[0], type=dict[str, str]
        )
        if found and self._place.attempt > 0:  # written by the job itself, which began without them
            if self._place.rank == 0:
                log.warning("training begins from scratch again beside files that are no iterations: %s", [*found][:3])
            return {}
        return found

    def _begin_over(self, folders: list[Path]) -> None:
        """Say what lastgasp leaves alone, where the user wants nothing of it."""
        over = all_of_training(folders, LAYOUT) if self._place.rank == 0 else []
        if over := [path for path in over if Path(path).name != TRACKER]:
            log.warning("resume='never': lastgasp uses none of the %d checkpoints or files of training that are there "
                        "(%s). Megatron loads what the tracker in --load names, unverified, or begins from scratch; "
                        "a later start with 'auto' goes on from the newest of all",
                        len(over), ", ".join(over[:3]))  # fmt: skip

    # -- steering ---------------------------------------------------------------------------------

    def _take(self, path: Path) -> None:
        step, load = LAYOUT.step(path), self._args.load
        assert step is not None
        if load is None or Path(load).absolute() != path.parent:
            if self._place.rank == 0:
                log.warning("loading from %s and not from --load=%s: what is there is newer", path.parent, load)
            self._args.load = str(path.parent)
        self._args.ckpt_step, self.resumed = step, step
        tracker = read_tracker(path.parent)
        stale = tracker.state in ("torn", "release") if path == self._asked() else tracker.name != str(step)
        if self._place.rank == 0 and stale:
            self._repair(path.parent, step, tracker)

    def _repair(self, directory: Path, step: int, was: Tracker) -> None:
        try:
            write_tracker(directory, step)
        except OSError as error:
            if was.state in ("torn", "release"):
                raise  # Megatron would exit over it, or load something else
            log.warning("the tracker in %s still says %s: %s", directory, was.name, error)
            return
        log.warning("the tracker in %s said %s, it says %d now", directory, was.name, step)
