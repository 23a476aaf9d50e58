"""What an incident's record says besides its phases: short texts by ranks, each kept once."""

from __future__ import annotations

from .messages import encodable

MOST = 50
"""Notes that one incident keeps."""
LONGEST = 1000
"""Characters of one note; a longer one is cut."""
MORE = f"more than {MOST} notes were given: the others were dropped"


def tidy(text: str) -> str:
    """The text as it is kept: one line, of bounded length, that every record and message can carry."""
    line = encodable(" ".join(text.split()))
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def add_note(notes: list[str], text: str) -> str:
    """Append `text` unless it is there already or there is no room.

    Returns:
        What was appended; empty where nothing was.
    """
    line = tidy(text)
    if not line or line in notes or len(notes) > MOST:
        return ""
    notes.append(line if len(notes) < MOST else MORE)
    return notes[-1]
