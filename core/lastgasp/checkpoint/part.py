"""What one rank has written of a checkpoint that several ranks write together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .commit import Staged
from .manifest import FileEntry, Provenance


class _Files(msgspec.Struct, frozen=True):
    """What the rank that publishes must know of another's files."""

    folder: str
    entries: tuple[FileEntry, ...]


_FILES = msgspec.json.Decoder(_Files)


@dataclass(frozen=True, kw_only=True)
class SavedPart:
    """Implements `ports.SaveResult`.

    Args:
        step: completed updates.
        staged: this rank's files; none where it has only helped others.
        nbytes: bytes written; first_byte_ns: wall-clock time of the first, ns since the epoch; 0 if not known.
        part: names the files to the rank that publishes (`part_of`).
    """

    step: int
    staged: Staged
    nbytes: int
    first_byte_ns: int = 0
    part: bytes = b""

    @property
    def path(self) -> str:
        """Where the checkpoint will stand."""
        return str(self.staged.target)

    def publish(
        self,
        parts: Mapping[int, bytes],
        provenance: Provenance,
        markers: Mapping[str, bytes] | None = None,
        present: Collection[str] | None = None,
    ) -> str:
        """Bring the files of all savers together and make them visible, over whatever stands there.

        Args:
            parts: of all savers; provenance, markers, present: as in `Staged.publish`.

        Returns:
            What people must know about it (`Staged.kept`); empty where there is nothing.

        Raises:
            OSError, CheckpointError: as `Staged.adopt` and `Staged.publish`.
        """
        for _, data in sorted(parts.items()):
            if data and data != self.part:
                found = _FILES.decode(data)
                self.staged.adopt(Path(found.folder), found.entries)
        self.staged.publish(provenance, markers=markers, aside=True, present=present)
        return self.staged.kept


def part_of(staged: Staged) -> bytes:
    """Seal the files, and name them for the rank that publishes. Raises OSError."""
    folder, entries = staged.sealed()
    return msgspec.json.encode(_Files(str(folder), entries))
