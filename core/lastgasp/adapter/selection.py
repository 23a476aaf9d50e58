"""Which checkpoint a job starts from: all ranks agree on the newest that verifies. The same for every framework."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from lastgasp.adapter.policy import OWN, SelectionPolicy
from lastgasp.checkpoint import Agreement, Candidate, agree, quarantine
from lastgasp.checkpoint.trial import Trial, is_about_content
from lastgasp.errors import DamagedCheckpoint, NoGoodCheckpoint, grouped
from lastgasp.ports import Gather
from lastgasp.sharing import require_shared

log = logging.getLogger("lastgasp")


class CheckpointSelector:
    """The selection of one job. All ranks make the same calls, together.

    Args:
        policy: how this framework's checkpoints are found, judged, verified and taken.
        gather: the all-gather of the job (`Session.gather`).
        about_content: whether an error that came out of loading speaks about the checkpoint (`Trial`).

    Attributes:
        named: the user has named the one that was selected, whatever it is of.
        present: own digests of all manifests that were there; any other one has been written since training began.
        trial: what was tried, and could not be loaded.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        gather: Gather,
        about_content: Callable[[BaseException], bool] = is_about_content,
    ) -> None:
        self._policy, self._gather = policy, gather
        self.named = self._tidied = False
        self.present: frozenset[str] = frozenset()
        self.trial = Trial(gather, about_content)

    def load(self, load: Callable[[Candidate], None], selected: Candidate | None = None) -> Candidate | None:
        """Select, and have the framework load; what verifies and loads on no rank is set aside once an older one loads.

        Args:
            load: hands it to the framework; where it raises, another one may follow.
            selected: what `select` has returned, where the framework had to know it before it loads.

        Returns:
            What was loaded, the same on every rank; None where there was nothing.

        Raises:
            NothingLoads: none of them loads; nothing was moved.
            Exception: as `select`; and what the framework raised, where the user named the checkpoint, where it is not
                about its content, or not on all ranks.
        """
        if selected is None:
            selected = self.select()
        if selected is None or self.named:
            if selected is not None:
                load(selected)
            return selected
        loaded = self.trial.load(lambda refused: self.select(refused) if refused else selected, load)
        self.set_aside(loaded)
        return loaded

    def set_aside(self, loaded: Candidate | None) -> None:
        """`loaded` was loaded: move away what no rank could load before it, and say what that costs."""
        policy = self._policy
        if policy.may_move and loaded is not None:
            self.trial.set_aside(policy.layout_of, policy.note, loaded.step)

    def select(self, refused: Collection[Path] = ()) -> Candidate | None:
        """The checkpoint to start from, the same on every rank; None to start from scratch.

        Args:
            refused: paths that no rank could load.

        Raises:
            NoGoodCheckpoint: there are some, or other files of training, none is good, and nobody said to start anew.
            DamagedCheckpoint: the user named a damaged one.
            CheckpointMismatch: the newest of this fit is of another model, optimizer or data.
            ConfigError: the user named none; or each host has a directory of its own.
        """
        policy = self._policy
        self.named = False
        self._tidy()
        selected = self._select(refused)
        if selected is not None:
            policy.selected(selected, self.named)
        self._gather("select/ready", b"")  # rank 0 may have repaired what all are about to read
        return selected

    def pass_over(self) -> None:
        """Training begins with something else, which this job has held in memory: tidy up, and know what is there."""
        self._tidy()
        self._know(self._policy.candidates(own=False))

    def _tidy(self) -> None:
        if self._tidied:
            return
        self._tidied, policy = True, self._policy
        local = require_shared(policy.config.directory, policy.place, self._gather)
        policy.local = policy.local if policy.one_disk else local
        if policy.place.rank == 0:
            policy.tidy()
        self._gather("select/tidied", b"")  # all ranks must list the same

    def _know(self, found: list[Candidate]) -> None:
        self.present |= {c.manifest.self_digest for c in found if c.manifest is not None}

    def _select(self, refused: Collection[Path]) -> Candidate | None:
        policy = self._policy
        asked = policy.asked()
        if policy.place.restarted and (asked is not None or policy.restarts_from_own):
            # A restart resumes from what the job has saved; where it started from counts only after that.
            own = policy.candidates(own=True)
            agreement = self._agree([one for one in own if self._of_this_start(one)], refused)
            if agreement.chosen is not None:
                return agreement.chosen
            self._refuse_to_begin_over(agreement, refused)
        if asked is not None:
            return None if asked in refused else self._named(asked)
        never = policy.config.resume == "never"
        found = policy.candidates(own=never)
        if never:
            self._know(found)  # of a run before that had the same name, too: a save of the same step replaces them
            found = [one for one in found if self._of_this_start(one)]
        agreement = self._agree(found, refused)
        if agreement.chosen is None and policy.place.restarted and never:
            self._refuse_to_begin_over(agreement, refused)
        if agreement.chosen is None and not refused:
            self._from_scratch(agreement)
        return agreement.chosen

    def _of_this_start(self, candidate: Candidate) -> bool:
        """Not of a run before, which the user has left (`resume`); jobs may share a name."""
        manifest = candidate.manifest
        return manifest is not None and manifest.creator.time_ns >= self._policy.place.since_ns

    def _refuse_to_begin_over(self, agreement: Agreement, refused: Collection[Path]) -> None:
        """A restart whose job has saved steps does not go back to where it began because none of them can be read."""
        policy = self._policy
        if agreement.rejected and not refused and not policy.instead:
            reasons = {path: "; ".join(why) for path, why in agreement.rejected.items()}
            raise NoGoodCheckpoint(", ".join(map(str, policy.folders)), reasons, OWN)

    def _named(self, path: Path) -> Candidate:
        agreement = self._agree([self._policy.named(path)], ())
        if agreement.chosen is None:
            raise DamagedCheckpoint(str(path), [why for reasons in agreement.rejected.values() for why in reasons])
        self.named = True
        return agreement.chosen

    def _from_scratch(self, agreement: Agreement) -> None:
        """Training from scratch over files of training is reported, and refused unless it was asked for."""
        policy = self._policy
        if policy.config.resume == "never":
            policy.begins_over()
            return
        lost = policy.lost(agreement, self._gather)
        if lost:
            raise NoGoodCheckpoint(", ".join(map(str, policy.folders)), lost, policy.remedy(agreement))
        policy.begins_from_scratch()

    def _agree(self, found: list[Candidate], refused: Collection[Path]) -> Agreement:
        policy = self._policy
        self._know(found)
        found = policy.shortlist([c for c in found if c.path not in refused])
        agreement = agree(found, policy.verify, self._gather, policy.place.rank, policy.place.world_size)
        if policy.place.rank == 0:
            reasons = {path: "; ".join(why) for path, why in agreement.rejected.items()}
            for line in grouped(reasons, " was not used"):
                log.warning("%s", line)
        if agreement.chosen is not None and policy.may_move:
            for bad in agreement.damaged:
                quarantine(bad, agreement.rejected[str(bad.path)], proven=True, layout=policy.layout_of(bad.path))
        return agreement
