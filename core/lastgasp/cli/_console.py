"""How commands print: rich on a terminal, plain and wide into a file or pipe."""

from __future__ import annotations

import sys

from rich.console import Console

WIDE = 160
"""Columns where there is no terminal: paths in logs must not be folded."""


def console() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
