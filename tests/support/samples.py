"""What the ranks of `train_elastic.py` have noted: which samples each step has used, and who has entered it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from support.train_elastic import SAMPLES


def used(directory: Path) -> dict[int, tuple[int, Counter[int], set[str]]]:
    """By step: its epoch, how often each sample was used in it, and what the ranks say of all samples so far.

    A step may have been done more than once by ranks that did not complete it; the last time counts.
    """
    rows: dict[int, dict[int, dict[str, Any]]] = {}
    for path in directory.glob("rank-*"):
        for number, line in enumerate(path.read_text().splitlines()):
            if line.startswith("used "):
                row = json.loads(line[5:])
                rows.setdefault(row["step"], {})[hash((path.name, number))] = row
    found = {}
    for step, told in rows.items():
        ids = Counter(sample for row in told.values() for part in row["ids"] for sample in part)
        found[step] = next(iter(told.values()))["epoch"], ids, {row["digest"] for row in told.values()}
    return found


def check_samples(directory: Path, undisturbed: Path) -> None:
    """Each sample of an epoch was used once, and each step has used those of the job without a fault."""
    steps, others = used(directory), used(undisturbed)
    assert steps == others
    assert sorted(steps) == list(range(1, 13))
    for epoch in (0, 1):
        whole = sum((ids for at, ids, _ in steps.values() if at == epoch), Counter[int]())
        assert whole == Counter(range(SAMPLES))
    assert all(len(digests) == 1 for _, _, digests in steps.values())


def entered(directory: Path, rank: int) -> list[tuple[int, int, int, int]]:
    """Process, step, number and number of ranks of each entry that was made under this number."""
    lines = (directory / f"rank-{rank}").read_text().splitlines()
    rows = [line.split()[1:] for line in lines if line.startswith("entered ")]
    return [(int(pid), int(step), int(number), int(size)) for pid, step, number, size in rows]
