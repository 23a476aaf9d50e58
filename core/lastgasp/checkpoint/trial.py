"""Handles checkpoints that verify but do not load: all ranks try the newest, then together the next one.

A checkpoint is rejected only if every rank rejects its content: a rank that is out of memory, or whose disk fails,
proves nothing about it. Nothing is moved before another one has been loaded, so that a changed model leaves everything
in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

import msgspec

from lastgasp.errors import CheckpointError, ControlError, DeadlineExceeded, LastgaspError, NothingLoads
from lastgasp.ports import Gather, Layout

from .agree import merge_reasons
from .candidates import Candidate
from .quarantine import set_aside_unfit

_log = logging.getLogger("lastgasp")


class _Went(msgspec.Struct, frozen=True):
    """The result of loading on one rank: the framework's objection to the content, empty if it loaded."""

    problem: str


_WENT = msgspec.json.Decoder(_Went)


def is_about_content(error: BaseException) -> bool:
    """Whether an error raised while loading is about the content and not about the machine."""
    if isinstance(error, LastgaspError):
        return isinstance(error, CheckpointError)
    return isinstance(error, Exception) and not isinstance(error, OSError | MemoryError | ImportError)


class Trial:
    """Tries one checkpoint after the other until one loads on all ranks. All ranks make the same calls.

    Args:
        gather: the all-gather of the job.
        about_content: classifies a framework's errors; those not about the content are raised at once.

    Attributes:
        refused: checkpoints that no rank could load, newest first, with the reasons.
    """

    def __init__(self, gather: Gather, about_content: Callable[[BaseException], bool] = is_about_content) -> None:
        self._gather, self._about_content = gather, about_content
        self._number = 0
        self.refused: list[tuple[Candidate, list[str]]] = []

    def load(
        self, choose: Callable[[Collection[Path]], Candidate | None], load: Callable[[Candidate], None]
    ) -> Candidate | None:
        """Load the newest that loads.

        Args:
            choose: returns the newest good one except the given paths, the same on every rank, or None.
            load: loads it by the framework, and lets its exceptions pass.

        Returns:
            What was loaded; None if there was nothing to load.

        Raises:
            NothingLoads: there are checkpoints, and none of them loads; nothing was moved.
            CheckpointError: it loads here and not on another rank.
            Exception: the framework's, if it is not about the content, or not on all ranks.
        """
        last: Exception | None = None
        while True:
            candidate = choose([refused.path for refused, _ in self.refused])
            if candidate is None:
                if self.refused:
                    self._refuse(last)
                return None
            last = self.attempt(candidate, load)
            if last is None:
                return candidate
            _log.warning("%s does not load (%s); the next one is tried", candidate.path, _said(last))

    def set_aside(
        self,
        layout_of: Callable[[Path], Layout | None] = lambda path: None,
        note: Callable[[str], None] = lambda text: _log.warning("%s", text),
        resumed: int | None = None,
    ) -> list[Path]:
        """Move away the rejected ones after another one was loaded; for the process allowed to do so.

        Args:
            layout_of: returns a checkpoint's layout; note: reports what was moved and why, one line each.
            resumed: the step of the loaded one, to report how many are trained again.

        Returns:
            Their new paths.
        """
        moved = [set_aside_unfit(one, reasons, layout_of(one.path)) for one, reasons in self.refused]
        for (one, reasons), home in zip(self.refused, moved, strict=True):
            where = f"moved to {home.name}" if home is not None else "left where it is"
            again = trained_again(one.step, resumed)
            note(f"{one.path} verifies, but this job cannot load it: {'; '.join(reasons)}; {where}{again}")
        return [home for home in moved if home is not None]

    def attempt(self, candidate: Candidate, load: Callable[[Candidate], None]) -> Exception | None:
        """Load one on all ranks. None: all have loaded it. An error: none has, and it is in `refused`.

        Raises:
            CheckpointError, Exception: as `load`.
        """
        own: Exception | None = None
        try:
            load(candidate)
        except BaseException as error:
            errors = _errors(error)
            if not errors or not all(map(self._about_content, errors)):
                raise
            own = errors[0]
        reasons, all_refuse = self._ask(candidate, own)
        if not reasons:
            return None
        if own is None:
            raise CheckpointError(f"{candidate.path} was loaded here, but not by all ranks: {'; '.join(reasons)}")
        if not all_refuse:
            raise own
        self.refused.append((candidate, reasons))
        return own

    def _ask(self, candidate: Candidate, own: Exception | None) -> tuple[list[str], bool]:
        """The reasons of the ranks that could not load it, and whether none could."""
        self._number += 1
        mine = _Went("" if own is None else f"does not load: {_said(own)}")
        try:
            answers = self._gather(f"load/{self._number}", msgspec.json.encode(mine))
        except (ControlError, DeadlineExceeded) as error:
            if own is not None:
                raise own from error  # the others may wait for this rank in a collective of the framework
            raise
        problems = [_WENT.decode(answer).problem for answer in answers]
        return merge_reasons([[problem] if problem else [] for problem in problems]), all(problems)

    def _refuse(self, last: Exception | None) -> NoReturn:
        """Create the error that none loads. A single one rejected by our own error re-raises that."""
        if len(self.refused) == 1 and isinstance(last, LastgaspError) and not last.restart_helps:
            raise last
        folder = self.refused[0][0].path.parent
        reasons = {str(one.path): "; ".join(why) for one, why in self.refused}
        raise NothingLoads(str(folder), reasons) from last


def trained_again(passed_over: int | None, resumed: int | None) -> str:
    """The cost of skipping a checkpoint, to append to a sentence; empty if there is none."""
    if passed_over is None or resumed is None or passed_over <= resumed:
        return ""
    steps = passed_over - resumed
    return f"; step {resumed} was resumed from, and {steps} step{'s are' if steps > 1 else ' is'} trained again"


def _errors(error: BaseException) -> list[Exception]:
    """Itself; of torch's CheckpointException, which is no Exception, those of all ranks. Empty: it says nothing."""
    if isinstance(error, Exception):
        return [error]
    failures = getattr(error, "failures", None)
    found = [one for one, *_ in failures.values()] if isinstance(failures, dict) else []
    return found if all(isinstance(one, Exception) for one in found) else []


def _said(error: Exception) -> str:
    """The type and first lines: torch lists what does not match below the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:400]}"
