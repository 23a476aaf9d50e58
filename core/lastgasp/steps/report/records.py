"""Reads the rows of one rank: complete lines only, in pieces, and resuming where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from .sources import data_files

PIECE = 1 << 20
"""Bytes decoded at a time: some 5000 rows, which is what the memory for rows is bounded by."""
LONGEST_LINE = 1 << 20
"""A longer line does not belong to a profiling file (TaskD's have at most 999 bytes); it is skipped."""


class Owner(msgspec.Struct, gc=False):
    """`Pt`: the process and thread of a host row."""

    ProcessId: int = 0
    ThreadId: int = 0


class ObjectId(msgspec.Struct, gc=False):
    """`MsptiObjectId`; on device rows `Pt` holds the device and the stream (docs/facts/taskd.md §6)."""

    Pt: Owner


class Row(msgspec.Struct, gc=False):
    """What is used of one line. Other kinds than 1 lack most of it."""

    Kind: int = 0
    Flag: int = 0
    SourceKind: int = 0
    Timestamp: int = 0
    Id: int = 0
    MsptiObjectId: ObjectId | None = None
    Name: str = ""
    Domain: str = ""


_decoder = msgspec.json.Decoder(Row)


class RankReader:
    """The files of one rank, in the order of their names. Call `read` again to get what was appended meanwhile.

    Attributes:
        unreadable: lines that were not rows: cut off by a crash, damaged, or not JSON.
        nbytes: bytes read so far.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.unreadable = self.nbytes = 0
        self._name, self._offset, self._rest = "", 0, b""

    def read(self, progress: Callable[[int], object] = lambda nbytes: None) -> Iterator[list[Row]]:
        """Rows since the last call, some thousand at a time.

        Args:
            progress: called with the bytes of each piece.

        A line without an end is kept for the next call; with a newer file behind it, it never gets one. A file
        that goes away while it is read (ageing) is left out.
        """
        for path in data_files(self.directory):
            if path.name < self._name:
                continue
            if path.name > self._name:
                self.unreadable += bool(self._rest)
                self._name, self._offset, self._rest = path.name, 0, b""
            yield from self._file(path, progress)

    def end(self) -> None:
        """Nothing more will be appended: a last line without an end was cut off."""
        self.unreadable += bool(self._rest)
        self._rest = b""

    def _file(self, path: Path, progress: Callable[[int], object]) -> Iterator[list[Row]]:
        try:
            with path.open("rb") as file:
                file.seek(self._offset)
                while piece := file.read(PIECE):
                    self._offset += len(piece)
                    self.nbytes += len(piece)
                    rows = self._rows(piece)
                    if rows:
                        yield rows
                    progress(len(piece))
        except OSError:
            return

    def _rows(self, piece: bytes) -> list[Row]:
        whole, newline, rest = (self._rest + piece if self._rest else piece).rpartition(b"\n")
        self._rest = rest
        if len(rest) > LONGEST_LINE:
            self._rest = rest[:LONGEST_LINE]  # stays unreadable, and does not grow
        if not newline:
            return []
        try:
            return _decoder.decode_lines(whole)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return [row for line in whole.split(b"\n") if line and (row := self._row(line)) is not None]

    def _row(self, line: bytes) -> Row | None:
        try:
            return _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.unreadable += 1
            return None
