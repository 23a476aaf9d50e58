"""A checkpoint in one pass: what a rank verifies is what its framework parses, and loads once all ranks agree.

Read for its digests first and by the framework afterwards, a file that is not in the page cache takes twice as long.
Nothing is handed out before all of its file has verified, and all ranks have agreed on the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from lastgasp.checkpoint import Candidate, Damage, FileEntry, Verdict
from lastgasp.checkpoint.chunks import ChunkReader, chunks_of
from lastgasp.errors import CheckpointError, DamagedCheckpoint
from lastgasp.exception_origin import cause_of

log = logging.getLogger("lastgasp")


class Preload:
    """This rank's files of the candidate that was verified last (`SelectionPolicy.preload`).

    A framework says which files these are (`covers`, `mine`) and how one is parsed (`parse`).
    """

    def __init__(self) -> None:
        self._loaded: dict[Path, Any] = {}

    def covers(self, candidate: Candidate) -> Collection[str]:
        """The files that some rank or other loads, and verifies: paths in the manifest, the same on all ranks.

        Raises:
            CheckpointError: it is not for these ranks, as whoever loads it will say.
        """
        raise NotImplementedError

    def mine(self, candidate: Candidate) -> list[FileEntry]:
        """Those that this rank loads."""
        raise NotImplementedError

    def parse(self, path: Path, entry: FileEntry) -> Any:
        """What the framework makes of a file, all of whose bytes have verified.

        Raises:
            DamagedCheckpoint: they do not.
            Exception: what the framework raises.
        """
        raise NotImplementedError

    def read(self, candidate: Candidate) -> list[Damage]:
        """Parse this rank's files and verify them; returns what is damaged. What was loaded before is forgotten."""
        self.forget()
        damages: list[Damage] = []
        for entry in self.mine(candidate):
            path = candidate.path.parent / entry.path
            try:
                self._loaded[path.absolute()] = self.parse(path, entry)
            except Exception as error:
                # With their places, and whether they are proven: what is good at a second look is not.
                found = ChunkReader(chunks_of(candidate.path, [entry])).run(threads=2)
                if isinstance(error, DamagedCheckpoint):
                    found = found or [Damage(file=entry.path, kind="unreadable", detail=why) for why in error.reasons]
                elif not found:  # the framework may fare better, or say why not
                    log.info("%s will be read again by the framework: %s", path, cause_of(error))
                damages += found
        return damages

    def verdict(self, candidate: Candidate, verify: Callable[..., Verdict]) -> Verdict:
        """Of all files: by `verify`, which takes `read_by_others`, and by loading this rank's."""
        self.forget()
        try:
            names = self.covers(candidate)
        except CheckpointError:
            names = ()
        verdict = verify(read_by_others=names)
        if not verdict.ok or not names:
            return verdict
        damages = tuple(self.read(candidate))
        return msgspec.structs.replace(verdict, ok=not damages, damages=damages)

    def take(self, path: Path) -> Any:
        """What `read` has loaded of that file, once; None where there is nothing."""
        return self._loaded.pop(path.absolute(), None)

    def forget(self) -> None:
        """Release what was loaded and not taken."""
        self._loaded.clear()
