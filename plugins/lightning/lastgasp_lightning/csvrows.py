"""Lightning's `metrics.csv`: how many rows it has, and the removal of those that a resumed run writes again."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from lastgasp.adapter.files import read_bounded, write_atomically

_LIMIT = 1 << 30
"""Bytes beyond which a file is not touched: it is read completely, as Lightning does whenever a column is added."""


def count_rows(path: Path) -> int:
    """How many rows follow the header; 0 where there is no file.

    Raises:
        OSError: it cannot be read; ValueError: it is not what Lightning writes.
    """
    return len(_row_ends(_lines(path))[1]) if path.exists() else 0


def keep_rows(path: Path, rows: int) -> list[str]:
    """Remove what follows the first `rows` rows; a crash leaves the old file or the new one.

    Returns:
        The columns; none where there is neither a file nor a row to keep.

    Raises:
        OSError: it cannot be read or written; ValueError: it is damaged, or has fewer rows.
    """
    if rows == 0 and not path.exists():
        return []
    lines = _lines(path)
    columns, ends = _row_ends(lines, rows)
    if len(ends) < rows:
        raise ValueError(f"{path} has {len(ends)} valid rows, but {rows} had been written")
    last = ends[rows - 1] if rows else 1
    if last < len(lines):
        kept = "".join(lines[:last])
        kept += "" if kept.endswith("\n") else "\r\n"
        write_atomically(path, kept.encode(errors="surrogateescape"), mode=path.stat().st_mode & 0o7777)
    return columns


def _lines(path: Path) -> list[str]:
    return list(io.StringIO(read_bounded(path, _LIMIT).decode(errors="surrogateescape"), newline=""))


def _row_ends(lines: list[str], limit: int | None = None) -> tuple[list[str], list[int]]:
    """The columns, and for each valid row in order the number of the line that it ends on."""
    reader = csv.reader(lines)
    ends: list[int] = []
    try:
        columns = next(reader, [])
        if "step" not in columns:
            raise ValueError("its first line names no column 'step'")
        while (limit is None or len(ends) < limit) and (row := next(reader, None)) is not None:
            if len(row) != len(columns):
                break
            ends.append(reader.line_num)
    except csv.Error as error:
        raise ValueError(f"it is not a table: {error}") from None
    return columns, ends
