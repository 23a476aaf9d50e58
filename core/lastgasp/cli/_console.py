"""How commands print: rich on a terminal, plain and wide into a file or pipe."""

from __future__ import annotations

import sys

from rich.console import Console

WIDE = 160
"""Columns where there is no terminal: paths in logs must not be folded."""


def console() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)


def counted(errors: int, warnings: int) -> str:
    """`1 error, 2 warnings`."""
    return f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
