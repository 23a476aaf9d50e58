"""Whether one exception ends the training again and again: a fault of the program, which no restart cures. Pure.

Such a job would go on for ever where the exception is raised behind the update (a log that cannot be written, a metric
that cannot be computed): the step is complete then, and saved, so that each restart gets one step further.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lastgasp.events import Fault

LIMIT = 5
"""So many times in a row are no accident."""
SOON = 300.0
"""Seconds of training, or one step, after which the same exception counts as the same one."""


@dataclass(frozen=True)
class Repeats:
    """How often in a row.

    Attributes:
        count: of incarnations that ended so.
        cause: the exception; its numbers do not count, as they may be those of steps.
    """

    count: int = 0
    cause: str = ""

    def then(self, faults: Iterable[Fault], steps: int, seconds: float) -> Repeats:
        """After one more incarnation, which was ended by `faults` after so many new steps and seconds of training."""
        causes = {fault.kind: fault.cause for fault in faults if fault.kind != "peer"}
        cause = causes.get("exception", "")
        if not cause or len(causes) > 1 or (steps > 1 and seconds > SOON):
            return Repeats()
        return Repeats(self.count + 1 if _alike(cause, self.cause) else 1, cause)

    @property
    def hopeless(self) -> bool:
        """It will end the next one, too."""
        return self.count >= LIMIT


def _alike(one: str, other: str) -> bool:
    return re.sub(r"\d+", "0", one) == re.sub(r"\d+", "0", other)
