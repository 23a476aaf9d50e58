"""What a launcher says of its job: each recovery once, with what comes next."""

from __future__ import annotations

import logging

from lastgasp import logs

log = logging.getLogger("lastgasp")


class JobLog:
    """One per launcher; makes sure that its lines are seen."""

    def __init__(self) -> None:
        logs.set_up()
        self._told = -1

    def recovery(self, attempt: int, text: str, then: str) -> None:
        """Say it, unless it was said already.

        Args:
            attempt: whose recovery it is. text: in one line; empty where there was none, or another node tells it.
            then: what happens now.
        """
        if text and attempt != self._told:
            self._told = attempt
            log.warning("%s; %s", text, then)

    def restarting(self, restart: int, most: int) -> str:
        """In words: the first attempt was no restart."""
        return f"restarting, attempt {restart + 1} of {most + 1}"

    def ended(self, summary: str) -> None:
        """The job's last line; empty where nobody used lastgasp."""
        if summary:
            log.info("%s", summary)
