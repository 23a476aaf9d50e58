"""What loggers have left: the rows of a table, the scalars of a board."""

from __future__ import annotations

import csv
from pathlib import Path


def rows(folder: Path, version: int = 0) -> list[dict[str, str]]:
    """The content of metrics.csv, without empty fields: columns come in the order of their first use."""
    with (folder / f"lightning_logs/version_{version}/metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def scalars(folder: Path, version: int = 0) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of every event file, whatever a reader leaves out; none without tensorboard."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    except ImportError:
        return {}
    found: dict[str, list[tuple[int, float]]] = {}
    for file in (folder / f"lightning_logs/version_{version}").glob("events*"):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    return {tag: sorted(points) for tag, points in found.items()}


def versions(folder: Path) -> list[str]:
    """The directories that there are, of all loggers below."""
    return sorted(path.name for path in folder.glob("**/lightning_logs/*"))
