"""How one framework's checkpoints are found, judged, verified and taken; the selection itself is `selection`.

The defaults suit checkpoints of one layout in some directories, as those of a custom loop or of Lightning are. Methods
are called on all ranks alike unless they say otherwise.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from lastgasp._fs import remove_stale_temps
from lastgasp.adapter.preload import Preload
from lastgasp.checkpoint import Agreement, Candidate, Manifest, Verdict, candidates, progress_bar, verify
from lastgasp.checkpoint.manifest import Fit
from lastgasp.checkpoint.manifest_lookup import has_manifest, read_pair
from lastgasp.checkpoint.moving import put_back
from lastgasp.checkpoint.samefit import differences, is_behind, number_of, of_fit
from lastgasp.checkpoint.unknown import all_of_training, unknown
from lastgasp.config import GaspConfig
from lastgasp.errors import CheckpointMismatch, ConfigError
from lastgasp.gasp.meeting import remove_meetings
from lastgasp.ports import Gather, Layout
from lastgasp.topology import Place

log = logging.getLogger("lastgasp")

_REASONS = msgspec.msgpack.Decoder(dict[str, str])
_encode = msgspec.msgpack.encode
_TRUST = (
    "Refusing to start from scratch over them. Restore one of them, give resume=<path> to load one that you trust, or "
    "give resume='never' to start anew."
)
_NOT_UNDERSTOOD = (
    "Refusing to start from scratch over them. Give lastgasp a directory of its own, move these files away, or give "
    "resume='never' to start anew and leave them where they are."
)


OWN = (
    "This job has saved them, and refuses to begin over. Restore one of them, or give resume=<path> to load one that "
    "you trust; to begin over all the same, move them away."
)


class SelectionPolicy:
    """What a `CheckpointSelector` asks about one framework.

    Args:
        config: says what is wanted (`resume`).
        place: who this rank is.
        folders: where to look; layout: how checkpoints lie there.
        fit: which training run of the process this is, of what; only its own checkpoints are resumed from. None where
            the framework has only one.
        instead: the caller has something else to start from where no checkpoint is good.
        note: reports what people must know (`Session.note`).

    Attributes:
        unnumbered: what was selected does not say of which fit it is.
        several: there are checkpoints of several fits, or this is not the first one of its script.
        behind: there are checkpoints of a later fit of the script.
        restarts_from_own: a restart looks for what this job has saved before anything else, although the user named no
            checkpoint (finetuning).
        preload: what loads this rank's files while they are verified; None verifies first.
        missing_manifest: what to do about a selected checkpoint without a manifest, for a warning; empty for none.
        one_disk: checkpoints lie only where all hosts see the same, so one rank of the job needs to read each byte.
        local: this rank among those that share the reading of a checkpoint, and how many they are. The ranks agree on
            that (`CheckpointSelector`): by LOCAL_RANK and LOCAL_WORLD_SIZE nobody would read some parts
            (`torchrun --virtual-local-rank`, srun, after a recovery with fewer ranks).
    """

    restarts_from_own = False
    missing_manifest = ""
    one_disk = False
    preload: Preload | None = None

    def __init__(
        self,
        config: GaspConfig,
        place: Place,
        folders: Sequence[Path],
        layout: Layout,
        *,
        fit: Fit | None = None,
        instead: bool = False,
        note: Callable[[str], None] = lambda text: log.warning("%s", text),
    ) -> None:
        self.config, self.place, self.folders, self.layout = config, place, list(folders), layout
        self.local = (place.rank, place.world_size) if self.one_disk else (0, 1)
        self.fit, self.instead, self.note = fit, instead, note
        self.unnumbered = self.several = self.behind = self._said = self._other = False

    @property
    def may_move(self) -> bool:
        """Whether this rank may move files of these directories: one of each node, as each may have its own disks."""
        return self.local[0] == 0

    # -- listing ----------------------------------------------------------------------------------

    def tidy(self) -> None:
        """On rank 0, before anybody lists: finish or remove what killed processes have left."""
        for folder in self.folders:
            remove_stale_temps(folder)
            put_back(folder, self.layout)
        remove_meetings(self.config.directory, self.place.job)

    def asked(self) -> Path | None:
        """The checkpoint that the user has named; None where the newest good one is wanted."""
        resume = self.config.resume
        if resume in ("auto", "never"):
            return None
        path, fit = Path(resume).absolute(), self.fit
        if fit is None or os.environ.get("LASTGASP_RESUME") != resume or not path.exists():
            return path
        number = number_of(self.named(path))
        if number in (None, fit.number):
            return path
        if not self._other and self.place.rank == 0:
            log.warning("LASTGASP_RESUME=%s is of fit %d of its script, and this is fit %d: it is resumed from its own "
                        "newest checkpoint", resume, number, fit.number)  # fmt: skip
        self._other = True
        return None

    def candidates(self, own: bool) -> list[Candidate]:
        """What may be resumed from, newest first; what cannot be has a `problem`.

        Args:
            own: only what this job itself has saved.

        Raises:
            ConfigError: a directory cannot be listed.
        """
        found = [self.judged(one) for one in candidates(self.folders, self.layout)]
        if own:
            found = [one for one in found if one.manifest is not None and one.manifest.job == self.place.job]
        return self._of_this_fit(found)

    def shortlist(self, found: list[Candidate]) -> list[Candidate]:
        """Those that are looked at in this try; what is not gets a problem, so that it is listed with a reason."""
        return found

    def judged(self, candidate: Candidate) -> Candidate:
        """The candidate, with or without a problem: what this framework knows before it reads the content."""
        return candidate

    def named(self, path: Path) -> Candidate:
        """The checkpoint that the user has named; trusted where it has no manifest.

        Raises:
            ConfigError: it is not there.
        """
        if not path.exists():
            raise ConfigError("resume", str(path), "'auto', 'never' or an existing checkpoint", "Check the path.")
        pair = read_pair(path, self.layout)
        if isinstance(pair, Manifest):
            return Candidate(path, pair.step, pair)
        problem = pair.text if has_manifest(path, self.layout) else None
        return Candidate(path, self.layout.step(path), None, problem)

    def layout_of(self, path: Path) -> Layout:
        """How a checkpoint lies."""
        return self.layout

    def verify(self, candidate: Candidate) -> Verdict:
        """This rank's share of the content, against the manifest. What it raises becomes a bad verdict."""
        if candidate.manifest is None:
            return Verdict(path=candidate.path, step=candidate.step, ok=True)
        path, manifest = candidate.path, candidate.manifest
        with progress_bar(f"verifying {path.name}") as progress:
            check = partial(verify, path, self.layout_of(path), manifest=manifest, share=self.local, progress=progress)
            return check() if self.preload is None else self.preload.verdict(candidate, check)

    # -- one was selected -------------------------------------------------------------------------

    def selected(self, candidate: Candidate, by_name: bool) -> None:
        """All ranks have agreed on it; the framework loads it next. Steer the framework, repair its tracker.

        Args:
            by_name: the user has named it, whatever it is of.

        Raises:
            CheckpointMismatch: it is of another model, optimizer or data.
        """
        if candidate.manifest is None and self.missing_manifest and self.place.rank == 0:
            log.warning("%s has no manifest, so a flipped bit in it would not be seen; `lastgasp manifest %s` adds "
                        "manifests, and %s refuses checkpoints without one",
                        candidate.path, candidate.path.parent, self.missing_manifest)  # fmt: skip
        if self.fit is None or by_name or candidate.manifest is None:
            return
        self.unnumbered = number_of(candidate) is None
        if found := differences(candidate.path, candidate.manifest.fit, self.fit):
            raise CheckpointMismatch(str(candidate.path), found)

    # -- none was ---------------------------------------------------------------------------------

    def lost(self, agreement: Agreement, gather: Gather) -> dict[str, str]:
        """What training from scratch would lose: path -> reason, the same on all ranks. Not with resume='never'.

        Args:
            agreement: none of whose candidates was accepted.
        """
        if self.instead:
            return {}
        if agreement.rejected:
            return {path: "; ".join(why) for path, why in agreement.rejected.items()}
        if self._trained_before:
            return {}
        found = self.unknown() if self.place.rank == 0 else {}
        found = _REASONS.decode(gather("select/unknown", _encode(found))[0])
        if found and self.place.restarted:  # a restart of a job that began without them
            if self.place.rank == 0:
                log.warning("training begins from scratch again: %d files in %s are not lastgasp's checkpoints (%s)",
                            len(found), self._where, ", ".join([*found][:3]))  # fmt: skip
            return {}
        return found

    def unknown(self) -> dict[str, str]:
        """On rank 0: files of training that the layout does not explain, with the reason to take them for such."""
        return unknown(self.folders, self.layout)

    def remedy(self, agreement: Agreement) -> str:
        """What to do about what `lost` has found."""
        return _TRUST if agreement.rejected else _NOT_UNDERSTOOD

    def begins_from_scratch(self) -> None:
        """Nothing was there, and nothing is lost."""

    def begins_over(self) -> None:
        """The user wants nothing of what is there (resume='never'): say what that leaves unused."""
        over = [] if self._trained_before or self.place.rank != 0 else self.left_unused()
        if over:
            log.warning("resume='never': training begins from scratch; %d checkpoints or files of training stay in %s "
                        "(%s), and a later start with resume='auto' resumes from the newest of all",
                        len(over), self._where, ", ".join(over[:3]))  # fmt: skip

    def left_unused(self) -> list[str]:
        """On rank 0: checkpoints and files of training that stay where they are, newest first."""
        return all_of_training(self.folders, self.layout)

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return ", ".join(map(str, self.folders))

    @property
    def _trained_before(self) -> bool:
        """The script has trained before; what it has saved of that is no loss, and `_of_this_fit` reports it."""
        return self.fit is not None and self.fit.number > 0

    def _of_this_fit(self, found: list[Candidate]) -> list[Candidate]:
        if self.fit is None:
            return found
        own = of_fit(found, self.fit.number, self.config.directory)
        self.several = self.fit.number > 0 or len(own) < len(found)
        self.behind = is_behind(found, self.fit.number, self.config.directory)
        if found and not own and self.place.rank == 0 and not self._said:
            count = "the only checkpoint in %s is" if len(found) == 1 else f"the {len(found)} checkpoints in %s are"
            begins = "has no checkpoint of its own" if self.instead else "starts from scratch"
            log.warning(f"fit %d of this script %s: {count} of other fits", self.fit.number, begins, self._where)
            self._said = True
        return own
