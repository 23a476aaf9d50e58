"""How commands print: rich on a terminal, plain and wide into a file or pipe."""

from __future__ import annotations

import sys
import unicodedata

from rich import markup
from rich.console import Console

WIDE = 160
"""Columns where there is no terminal: paths in logs must not be folded."""


def console() -> Console:
    """Standard output."""
    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)


def counted(errors: int, warnings: int) -> str:
    """`1 error, 2 warnings`."""
    return f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"


def escape(text: str) -> str:
    """For rich: neither its markup nor anything that a terminal would obey; records and file names may hold both."""
    return markup.escape(printable(text))


def printable(text: str) -> str:
    """`text` with control and formatting characters (but tab and newline) as escapes, such as \\x1b."""
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in "\t\n" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()
