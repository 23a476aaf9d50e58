"""What processes hold: tests that bring many faults ask whether it grows with their number."""

from __future__ import annotations

from pathlib import Path

COUNTED = "kB, descriptors, threads, children, mappings of shared memory"


def held(*pids: int | str) -> str:
    """One line for each process: what is COUNTED.

    The memory is what is theirs alone: they share pages with whatever was forked from the same process, and their part
    of those grows when another one ends.
    """
    return "\n".join(" ".join(map(str, _of(Path("/proc", str(pid))))) for pid in pids)


def _of(place: Path) -> tuple[int, ...]:
    sizes = dict(line.split(":") for line in (place / "smaps_rollup").read_text().splitlines()[1:])
    shared = sum(line.split(maxsplit=2)[1].endswith("s") for line in (place / "maps").read_text().splitlines())
    children = sum(len(path.read_text().split()) for path in place.glob("task/*/children"))
    descriptors, threads = (len(list((place / name).iterdir())) for name in ("fd", "task"))
    return int(sizes["Private_Dirty"].split()[0]), descriptors, threads, children, shared


def more(before: str, now: str, memory: int) -> str:
    """The lines of those that hold more than before, of memory by more than so many kB; empty where none does."""
    found = []
    for number, lines in enumerate(zip(before.splitlines(), now.splitlines(), strict=True)):
        (kb, *counts), (kb_now, *counts_now) = (tuple(map(int, line.split())) for line in lines)
        if kb_now > kb + memory or any(b > a for a, b in zip(counts, counts_now, strict=True)):
            found.append(f"process {number}: {lines[0]} -> {lines[1]}")
    return "\n".join(found)
