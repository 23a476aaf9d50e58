"""A stand-in of torch_npu's mstx for contract tests: ranges have ids from 1, host-only ones have no stream."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

rows: list[tuple[Any, ...]] = []
open_ranges: dict[int, str] = {}
_ids = itertools.count(1)
STREAM = object()


def _fits(message: str) -> bool:
    """The C side puts it into a row of JSON of at most 999 bytes, about 200 of which are the row's own (§6)."""
    try:
        return bool(json.loads(f'"{message}"')) and len(message.encode()) <= 780
    except ValueError:
        return False


def _range_start(message: str, stream: Any = None, domain: str = "default") -> int:
    if not isinstance(message, str) or not message or not _fits(message):
        raise AssertionError(f"mstx drops {message!r} (docs/facts/taskd.md §6)")
    if stream is not None and stream is not STREAM:
        raise AssertionError(f"{stream!r} is not a stream")
    number = next(_ids)
    open_ranges[number] = message
    rows.append(("start", number, message, domain, stream is not None))
    return number


def _range_end(range_id: int, domain: str = "default") -> None:
    if type(range_id) is not int or range_id not in open_ranges:
        raise AssertionError(f"range_end({range_id!r}): no such range is open")
    rows.append(("end", range_id, open_ranges.pop(range_id), domain))


npu = SimpleNamespace(
    mstx=SimpleNamespace(range_start=_range_start, range_end=_range_end), current_stream=lambda: STREAM,
    current_device=lambda: 0, stop_device=lambda device: None, restart_device=lambda device: None,
)  # fmt: skip
