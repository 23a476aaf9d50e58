"""How a rank's process ended."""

from __future__ import annotations

from lastgasp.events import FaultKind


def kind_of_end(how: str) -> FaultKind:
    """Return exit for a process that exited with a code; killed for a signal, or while the cause is unknown.

    Args:
        how: what is known, as `process_monitor.describe_exit` formats it; may be empty.
    """
    return "exit" if how.startswith("exited with code") else "killed"
