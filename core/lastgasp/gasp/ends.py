"""How a rank's process ended."""

from __future__ import annotations

from lastgasp.events import FaultKind

BROKE = "its connection broke"
"""The evidence where the host of a rank, or the link to it, does not answer any more."""


def kind_of_end(how: str) -> FaultKind:
    """Return exit for a process that exited with a code, lost for one whose host is silent, otherwise killed.

    Args:
        how: what is known, as `process_monitor.describe_exit` formats it, or `BROKE` and why; may be empty.
    """
    if how.startswith(BROKE):
        return "lost"
    return "exit" if how.startswith("exited with code") else "killed"
