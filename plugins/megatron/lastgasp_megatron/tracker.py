"""Where Megatron's checkpoints lie, and its tracker: the iteration that a plain Megatron resumes from.

Megatron writes it with open and write, so a crash leaves it empty, and then ends with exit code 0 when it reads
it (docs/facts/megatron.md §2).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lastgasp.adapter.checkpoint import DirectoryLayout
from lastgasp.adapter.files import memory_file, write_atomically

LAYOUT, FORMAT = DirectoryLayout("iter_*"), "megatron"
NAME = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Tracker:
    """What a tracker says.

    Args:
        state: "missing", "torn" (cannot be read as an iteration), "release" or "iteration".
        iteration: the iteration, else -1.
    """

    state: Literal["missing", "torn", "release", "iteration"]
    iteration: int = -1

    @property
    def name(self) -> str:
        """For people: the iteration, or the state."""
        return str(self.iteration) if self.state == "iteration" else self.state


def read_tracker(directory: Path) -> Tracker:
    """The content of the tracker in `directory`; a failed read is torn."""
    try:
        text = (directory / NAME).read_text().strip()
    except FileNotFoundError:
        return Tracker("missing")
    except (OSError, UnicodeDecodeError):
        return Tracker("torn")
    if text == "release":
        return Tracker("release")
    return Tracker("iteration", int(text)) if text.isascii() and text.isdigit() else Tracker("torn")


def write_tracker(directory: Path, iteration: int) -> None:
    """Make the tracker say `iteration`, atomically and durably. Raises OSError."""
    write_atomically(directory / NAME, str(iteration).encode())


@contextmanager
def tracker_saying(iteration: int) -> Iterator[str]:
    """The path of a tracker for this process alone, which says `iteration`; in memory, where no disk can be full."""
    number = memory_file("lastgasp-tracker")
    try:
        os.write(number, str(iteration).encode())
        yield f"/proc/{os.getpid()}/fd/{number}"
    finally:
        os.close(number)


def checkpoint_path(directory: Path, iteration: int) -> Path:
    """Where Megatron puts that iteration."""
    return directory / f"iter_{iteration:07d}"
