"""The notes in an incident's record: short texts by ranks, each kept once."""

from __future__ import annotations

from .messages import encodable

MOST = 50
"""Greatest number of notes of one incident."""
LONGEST = 1000
"""Characters of one note; a longer one is cut."""
MORE = f"more than {MOST} notes were given: the others were dropped"


def tidy(text: str) -> str:
    """Reduce a text to one line of bounded length that every record and message can carry."""
    line = encodable(" ".join(text.split()))
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def add_note(notes: list[str], text: str) -> str:
    """Append `text` unless it is already there or the limit is reached.

    Returns:
        What was appended; empty if nothing was.
    """
    line = tidy(text)
    if not line or line in notes or len(notes) > MOST:
        return ""
    notes.append(line if len(notes) < MOST else MORE)
    return notes[-1]
