"""The lines a launcher logs about its job: each recovery once, with what happens next."""

from __future__ import annotations

import logging

from lastgasp import logs

log = logging.getLogger("lastgasp")


class JobLog:
    """One per launcher; ensures that its lines are visible."""

    def __init__(self) -> None:
        logs.set_up()
        self._told = -1

    def recovery(self, attempt: int, text: str, then: str, behind: str = "") -> None:
        """Log a recovery once.

        Args:
            attempt: its attempt. text: one line; empty if there was no recovery, or another node logs it.
            then: what happens now. behind: what is logged instead of an attempt that failed after its training.
        """
        if behind:
            self._told = attempt
            log.warning("%s; %s", behind, then)
        elif text and attempt != self._told:
            self._told = attempt
            log.warning("%s; %s", text, then)

    def restarting(self, restart: int, most: int) -> str:
        """Describe a restart; the first attempt was none."""
        return f"restarting, attempt {restart + 1} of {most + 1}"

    def ended(self, summary: str) -> None:
        """Log the job's last line; empty if no rank used lastgasp."""
        if summary:
            log.info("%s", summary)
