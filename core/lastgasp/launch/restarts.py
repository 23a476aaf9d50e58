"""Decides when the launcher stops restarting: no new step in three restarts, two starts that fail alike, one exception
five times in a row, or a failure behind the training. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Literal

from lastgasp import exitcodes
from lastgasp.gasp.messages import JobOver
from lastgasp.gasp.repeats import Repeats
from lastgasp.launch.framework_verdict import Verdict

DEFAULT_MAX_RESTARTS = 32767
"""As MindCluster's (docs/facts/taskd.md)."""
WITHOUT_PROGRESS_LIMIT = 3
START_LIMIT = 2
"""Starts in a row that failed in the same way before any rank had joined."""
BEHIND_LIMIT = 2
"""Attempts in a row in which a rank was killed after all had completed their training."""

Completed = Literal["", "training", "script"]
"""Nothing that counts, the training, or all that the script does."""


@dataclass
class Restarts:
    """Counts restarts without progress.

    Args:
        always: also judge jobs whose ranks never joined (`lastgasp run`); under plain torchrun a job that does not
            use lastgasp keeps torchrun's own rule.
        verdict_of_framework: a framework's decision to end the job for good.
        left: how the recovery ended after which the job asked for no restart (`recovery="save"`); else empty.
        elsewhere: it is a rank of another host that has refused to start, if one has.
        repeats: how often in a row one exception has ended the training.
        over: what the first launcher, on another host, has said as it ended the job, if it has.
        completed: what all ranks had completed before one of them failed.
    """

    always: bool
    without_progress: int = 0
    refused: bool = False
    verdict_of_framework: Verdict | None = None
    left: str = ""
    elsewhere: bool = False
    over: JobOver | None = None
    repeats: Repeats = field(default_factory=Repeats)
    completed: Completed = ""
    starts: int = 0
    _behind: int = 0
    _ever_used: bool = False
    _how: frozenset[int] = frozenset()

    def ended(
        self, attempt: int, used: bool, progressed: bool, refused: bool = False, how: frozenset[int] = frozenset()
    ) -> None:
        """Record a failed attempt.

        Args:
            refused: one of its ranks reported that another try would end the same way.
            how: the exit codes of the failed ranks; empty if unknown.
        """
        self._ever_used = self._ever_used or used
        how = how - {-signal.SIGTERM} or how  # whom the launcher has stopped, because another one had failed
        counts = bool(how) and not used and (self.always or self._ever_used)
        self.starts = (self.starts + 1 if how == self._how else 1) if counts else 0
        self._how = how
        self._behind = self._behind + 1 if self.completed else 0
        self.refused = refused and not progressed and (self.always or self._ever_used)
        if progressed or attempt == 0:
            self.without_progress = 0
        elif self.always or self._ever_used:
            self.without_progress += 1

    @property
    def behind(self) -> str:
        """What is said where another attempt follows one that failed after its training; else empty."""
        return self._behind_text if self._behind and not self.should_give_up else ""

    @property
    def _behind_text(self) -> str:
        codes = ", ".join(map(str, sorted(self._how)))
        if self.completed == "script" and max(self._how, default=0) < 0:
            return f"the script had come to its end on all ranks, and one was killed behind it (exit code {codes})"
        return f"all ranks had completed their training, and what the script does after it failed (exit code {codes})"

    @property
    def should_give_up(self) -> bool:
        """Another restart would most likely fail in the same place."""
        stuck = self.without_progress >= WITHOUT_PROGRESS_LIMIT or self.starts >= START_LIMIT or self.repeats.hopeless
        once = self.completed == "script" or min(self._how, default=1) > 0
        stuck = stuck or self._behind >= (1 if once else BEHIND_LIMIT)
        told = self.verdict_of_framework is not None or self.over is not None or bool(self.left)
        return told or self.refused or stuck

    @property
    def exit_code(self) -> int:
        """The launcher's, where another restart would be useless."""
        if self.verdict_of_framework is not None:
            return self.verdict_of_framework.code
        if (code := exitcodes.of_ending(self.left)) is not None:
            return code
        if self.refused:
            return exitcodes.REFUSED
        if self.over is not None:
            return self.over.code
        return 1 if self._behind else exitcodes.NO_PROGRESS

    @property
    def verdict(self) -> str:
        """The message for the user."""
        if self.verdict_of_framework is not None:
            return str(self.verdict_of_framework)
        if self.left:
            return "stopped after the recovery, as recovery=save asks; start the job again and it resumes"
        if self.refused:
            whose = "a rank of another host" if self.elsewhere else "a rank"
            where = "What its launcher has written there" if self.elsewhere else "The traceback above"
            return (
                f"stopped: {whose} refused to start, and would refuse again. {where} says why and what to do; the "
                "checkpoints are kept, and the job resumes from them when it is started again."
            )
        if self.over is not None:
            return f"the launcher of the first host has ended the job: {self.over.why}"
        if self._behind:
            return (
                f"stopped: {self._behind_text}. A restart would train again from the newest checkpoint, and most "
                "likely end in the same way. Look at the output above; the checkpoints are kept."
            )
        if self.starts >= START_LIMIT:
            codes = ", ".join(map(str, sorted(self._how)))
            return (
                f"stopped: {self.starts} starts in a row failed in the same way (exit code {codes}) before any rank "
                "had joined the job, so the fault is in the command line, the script or its machine. Look at the first "
                "traceback above; the checkpoints are kept."
            )
        if self.repeats.hopeless:
            return (
                f"stopped: one exception has ended the training {self.repeats.count} times in a row, each time soon "
                f"after it had gone on ({self.repeats.cause}), so the fault is in the job. Look at the traceback "
                "above; the checkpoints are kept, and the job resumes from them when it is started again."
            )
        return (
            f"stopped: {self.without_progress} restarts in a row completed no new step, so the fault is in the job, "
            "its data or its machine. Look at the first traceback above and at `lastgasp incident DIR`; the "
            "checkpoints are kept, and the job resumes from them when it is started again."
        )
