"""Exit codes of ranks and of the launcher (documented in docs/faults.md)."""

SAVED = 83
"""The step was saved: start the job again and it resumes from there."""

NOTHING_TO_SAVE = 84
"""No step since the newest committed checkpoint: start again, nothing is lost."""

GAVE_UP = 85
"""The step could not be saved; the incident record says why. Start again from the newest good one."""

NO_PROGRESS = 86
"""The launcher stopped: three restarts in a row completed no new step."""

REFUSED = 87
"""A rank refused to start, and says why; another try would end the same way, so the launcher stopped."""

_ENDINGS = {"saved": SAVED, "nothing_to_save": NOTHING_TO_SAVE, "gave_up": GAVE_UP}


def of_ending(ending: str) -> int | None:
    """The launcher's code for how its last recovery ended (`events.Ending`); None when there was none."""
    return _ENDINGS.get(ending)
