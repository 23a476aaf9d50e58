"""The rules by which TaskD's slow-node tool reads profiling files (docs/facts/taskd.md §7), written anew.

What it takes from a directory is what that tool would: a test that finds its ranges here has files that the tool
accepts. It is strict where the tool is silently confused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OPEN_MAX = 100
HOST_ONLY = ("dataloader", "save_checkpoint")
Row = dict[str, Any]


@dataclass
class Taken:
    """What the tool knows after reading.

    Attributes:
        steps: device duration in ns by step number.
        forward: host and device duration of each forward pass.
        host_only: durations by name, `dataloader` and `save_checkpoint`.
        communication: the parsed name and the device duration of each collective.
        names: of every complete range, ignored ones as well, in order of completion.
        open: Ids that have begun and are not complete.
    """

    steps: dict[int, int] = field(default_factory=dict)
    forward: list[tuple[int, int]] = field(default_factory=list)
    host_only: dict[str, list[int]] = field(default_factory=dict)
    communication: list[tuple[dict[str, str], int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    open: dict[int, list[Row]] = field(default_factory=dict)


def files(directory: Path) -> list[Path]:
    """The files it reads, in its order."""
    return sorted(path for path in directory.iterdir() if re.match(r"^\d{10}$", path.name))


def rows(directory: Path) -> Iterator[Row]:
    """Every row of a rank's directory; fails at an incomplete line."""
    for path in files(directory):
        content = path.read_bytes()
        assert content == b"" or content.endswith(b"\n"), f"{path} ends with half a line"
        yield from map(json.loads, content.splitlines())


def take(found: Iterator[Row]) -> Taken:
    """Read rows in their order."""
    taken = Taken()
    for row in found:
        group = taken.open.setdefault(row["Id"], [])
        group.append(row)
        if len(group) == (2 if group[0]["Name"] in HOST_ONLY else 4):
            _complete(taken, taken.open.pop(row["Id"]))
        assert len(taken.open) <= OPEN_MAX, "too many open Ids"
    return taken


def read(directory: Path) -> Taken:
    """Read a rank's directory."""
    return take(rows(directory))


def _complete(taken: Taken, group: list[Row]) -> None:
    name, domain = group[0]["Name"], group[0]["Domain"]
    taken.names.append(name)
    if domain == "communication":
        about = json.loads(name)
        float(about["count"])
        taken.communication.append((about, _duration(group, 1, (16, 32))))
    elif domain == "default" and name in HOST_ONLY:
        taken.host_only.setdefault(name, []).append(_duration(group, 0, (2, 4)))
    elif domain == "default" and name == "forward":
        taken.forward.append((_duration(group, 0, (16, 32)), _duration(group, 1, (16, 32))))
    elif domain == "default" and "step" in name.lower():
        words = name.split()
        if len(words) > 1 and words[1].isdigit():
            taken.steps.setdefault(int(words[1]), _duration(group, 1, (16, 32)))


def _duration(group: list[Row], source: int, flags: tuple[int, int]) -> int:
    begin, end = (
        [row["Timestamp"] for row in group if row["SourceKind"] == source and row["Flag"] == flag] for flag in flags
    )
    assert len(begin) == len(end) == 1, group
    duration: int = end[0] - begin[0]
    return duration
