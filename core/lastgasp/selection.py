"""Which checkpoint a job starts from: all ranks agree on the newest that verifies. The same for every framework."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from lastgasp._fs import remove_stale_temps
from lastgasp.checkpoint import Agreement, Candidate, Verdict, agree, candidates, progress_bar, quarantine, verify
from lastgasp.checkpoint.manifest import Fit
from lastgasp.checkpoint.manifest_lookup import has_manifest
from lastgasp.checkpoint.samefit import differences, number_of, of_fit
from lastgasp.checkpoint.trial import Trial, is_about_content
from lastgasp.checkpoint.unknown import all_of_training, unknown
from lastgasp.config import GaspConfig
from lastgasp.errors import CheckpointMismatch, ConfigError, DamagedCheckpoint, NoGoodCheckpoint, grouped
from lastgasp.ports import Gather, Layout
from lastgasp.sharing import require_shared
from lastgasp.topology import Place

log = logging.getLogger("lastgasp")

_LOST = msgspec.msgpack.Decoder(dict[str, str])
_LOST_AS_BYTES = msgspec.msgpack.Encoder().encode
_NOT_UNDERSTOOD = (
    "Refusing to start from scratch over them. Give lastgasp a directory of its own, move these files away, or give "
    "resume='never' to start anew and leave them where they are."
)


class CheckpointSelector:
    """The choice of one job. All ranks call `load`, or `choose`, together.

    Args:
        config: says what is wanted (`resume`).
        folders: where to look; layout: how checkpoints lie there.
        gather: the all-gather of the job.
        local: this rank among those of its node, and how many they are: they share the reading.
        fit: which training run of the process this is, of what; only its own checkpoints are resumed from. None where
            the framework has only one.

    Attributes:
        unnumbered: `choose` returned a checkpoint that does not say of which fit it is.
        named: it returned the one that the user named, whatever it is of.
        stood: own digests of all manifests that were there; any other one has been written since training began.
    """

    def __init__(
        self,
        config: GaspConfig,
        folders: Sequence[Path],
        layout: Layout,
        place: Place,
        gather: Gather,
        local: tuple[int, int],
        *,
        fit: Fit | None = None,
    ) -> None:
        self._config, self._folders, self._layout = config, list(folders), layout
        self._place, self._gather, self._local = place, gather, local
        self._fit, self.unnumbered, self.named = fit, False, False
        self.stood: frozenset[str] = frozenset()
        self._chosen: Candidate | None = None

    def load(
        self,
        load: Callable[[Path], None],
        instead: bool = False,
        about_content: Callable[[BaseException], bool] = is_about_content,
    ) -> Path | None:
        """Choose, and have the framework load; what verifies and loads on no rank is set aside once an older one loads.

        Args:
            load: hands it to the framework; where it raises, another one may follow.
            instead: as for `choose`; about_content: as for `Trial`.

        Returns:
            What was loaded, the same on every rank; None where there was nothing.

        Raises:
            NothingLoads: none of them loads; nothing was moved.
            Exception: as `choose`; and what the framework raised, where the user named the checkpoint, where it is not
                about its content, or not on all ranks.
        """
        path = self.choose(instead)
        if path is None or self._chosen is None:
            if path is not None:
                load(path)
            return path
        trial = Trial(self._gather, about_content)
        loaded = trial.load(self._next, lambda candidate: load(candidate.path))
        if self._local[0] == 0:
            trial.set_aside()
        return loaded.path if loaded is not None else None

    def _next(self, refused: Collection[Path]) -> Candidate | None:
        """The newest besides those that no rank could load."""
        if refused:
            agreement = self._agree(self._own_job(), refused)
            self._report(agreement)
            self._chosen = agreement.chosen
            if self._chosen is not None:
                self._of_this_fit(self._chosen)
        return self._chosen

    def _own_job(self) -> str | None:
        return self._place.job if self._config.resume != "auto" else None

    def choose(self, instead: bool = False) -> Path | None:
        """The checkpoint to start from, the same on every rank; None to start from scratch.

        Args:
            instead: the caller has something else to start from where no checkpoint is good.

        Raises:
            NoGoodCheckpoint: there are some, or other files of training, none is good, and nobody said to start anew.
            DamagedCheckpoint: resume=<path> names a damaged one.
            CheckpointMismatch: the newest of this fit is of another model, optimizer or data.
            ConfigError: resume=<path> names none; or each host has a directory of its own.
        """
        require_shared(self._config.directory, self._place, self._gather)
        if self._place.rank == 0:
            for folder in self._folders:
                remove_stale_temps(folder)
        resume = self._config.resume
        if resume not in ("auto", "never") and self._place.attempt == 0:
            return self._explicit(Path(resume))
        agreement = self._agree(self._own_job())
        if agreement.chosen is None and agreement.rejected and resume == "auto" and not instead:
            reasons = {path: "; ".join(why) for path, why in agreement.rejected.items()}
            raise NoGoodCheckpoint(", ".join(map(str, self._folders)), reasons)
        self._report(agreement)
        self._chosen = agreement.chosen
        if agreement.chosen is not None:
            return self._of_this_fit(agreement.chosen)
        if resume not in ("auto", "never"):
            return self._explicit(Path(resume))  # a restart before this job has saved anything
        if not instead:
            self._from_scratch()
        return None

    def _from_scratch(self) -> None:
        """Say over what training begins anew; refuse it over files of training, unless it was asked for."""
        if self._fit is not None and self._fit.number:
            return  # the script has trained before, and what it has saved of that is no loss; `_own` says it
        folders = ", ".join(map(str, self._folders))
        if self._config.resume == "never":
            self._begin_over(folders)
            return
        lost = self._seen_by_rank_0()
        if lost and self._place.attempt == 0:
            raise NoGoodCheckpoint(folders, lost, _NOT_UNDERSTOOD)
        if lost and self._place.rank == 0:  # a restart of a job that began without them
            log.warning("training begins from scratch again: %d files in %s are no checkpoints of lastgasp's (%s)",
                        len(lost), folders, ", ".join([*lost][:3]))  # fmt: skip

    def _begin_over(self, folders: str) -> None:
        over = all_of_training(self._folders, self._layout) if self._place.rank == 0 else []
        if over:
            log.warning("resume='never': training begins from scratch; %d checkpoints or files of training stay in %s "
                        "(%s), and a later start with resume='auto' resumes from the newest of all",
                        len(over), folders, ", ".join(over[:3]))  # fmt: skip

    def _seen_by_rank_0(self) -> dict[str, str]:
        """The same on every rank: none begins from scratch while another one refuses."""
        found = unknown(self._folders, self._layout) if self._place.rank == 0 else {}
        return _LOST.decode(self._gather("choose/unknown", _LOST_AS_BYTES(found))[0])

    def _of_this_fit(self, chosen: Candidate) -> Path:
        if self._fit is not None and chosen.manifest is not None:
            self.unnumbered = number_of(chosen) is None
            if found := differences(chosen.path, chosen.manifest.fit, self._fit):
                raise CheckpointMismatch(str(chosen.path), found)
        return chosen.path

    def _explicit(self, path: Path) -> Path:
        if not path.exists():
            raise ConfigError("resume", str(path), "'auto', 'never' or an existing checkpoint", "Check the path.")
        if has_manifest(path, self._layout) and not (verdict := verify(path, self._layout)).ok:
            raise DamagedCheckpoint(str(path), verdict.reasons)
        self.named = True
        self._list()
        return path

    def _agree(self, job: str | None, refused: Collection[Path] = ()) -> Agreement:
        found = [c for c in self._list() if c.path not in refused]
        if job is not None:
            found = [c for c in found if c.manifest is not None and c.manifest.job == job]
        if self._fit is not None:
            number = self._fit.number
            found = of_fit(found, number) if refused else self._own(found, number)
        return agree(found, self._verify_share, self._gather, self._place.rank, self._place.world_size)

    def _list(self) -> list[Candidate]:
        found = candidates(self._folders, self._layout)
        self.stood |= {c.manifest.self_digest for c in found if c.manifest is not None}
        return found

    def _own(self, found: list[Candidate], number: int) -> list[Candidate]:
        own = of_fit(found, number)
        if found and not own and self._place.rank == 0:
            folders = ", ".join(map(str, self._folders))
            log.warning("fit %d of this script starts from scratch: the %d checkpoints in %s are of other fits",
                        number, len(found), folders)  # fmt: skip
        return own

    def _verify_share(self, candidate: Candidate) -> Verdict:
        """This rank's part of the chunks."""
        with progress_bar(f"verifying {candidate.path.name}") as progress:
            return verify(
                candidate.path, self._layout, manifest=candidate.manifest, share=self._local, progress=progress
            )

    def _report(self, agreement: Agreement) -> None:
        """Say what was not used and why; move away what is proven bad."""
        if self._place.rank == 0:
            for line in grouped({path: "; ".join(why) for path, why in agreement.rejected.items()}, " was not used"):
                log.warning("%s", line)
        if agreement.chosen is not None and self._local[0] == 0:
            for bad in agreement.damaged:
                quarantine(bad, agreement.rejected[str(bad.path)], proven=True)
