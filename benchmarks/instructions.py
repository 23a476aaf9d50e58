"""Instructions of the training thread per Lightning step, counted by callgrind: for machines too busy to time on.

Run: python -m benchmarks.instructions [KIND...]   (needs valgrind and a C compiler; about a minute a fit)
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench_callback import KINDS, SHAPES, fit

FIRST, STEPS = 80, 300
"""Steps before the first that is counted, and those that are."""
_SOURCE = """
#include <valgrind/callgrind.h>
void count(int on) { if (on) CALLGRIND_START_INSTRUMENTATION; else CALLGRIND_STOP_INSTRUMENTATION; }
"""


class Counted:
    """A fit's lane (`bench_callback.Lane`) that counts some of its steps instead of timing them."""

    steps, cpu, wall = FIRST + STEPS + 1, (), ()

    def __init__(self, library: str) -> None:
        self._count = ctypes.CDLL(library).count

    def at(self, step: int) -> None:
        """Called in each step."""
        if step in (FIRST, FIRST + STEPS):
            self._count(step == FIRST)


class _Nobody:
    def send(self, _: object) -> None:
        """The times of a fit, of which there are none."""


def count(shape: int, kind: str, folder: Path, library: str) -> float:
    """Instructions of the main thread per step of one fit.

    Raises:
        subprocess.CalledProcessError: the fit failed.
    """
    out = folder / f"{shape}-{kind}"
    valgrind = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes"]
    command = [*valgrind, f"--callgrind-out-file={out}", sys.executable, "-m", "benchmarks.instructions", "--fit"]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    subprocess.run([*command, str(shape), kind, str(folder), library], check=True, env=environment)
    (total,) = re.findall(r"^totals: (\d+)", Path(f"{out}-01").read_text(), re.MULTILINE)
    return int(total) / STEPS


def main() -> None:
    """Print what each kind takes, and what it adds to a step without a callback."""
    if sys.argv[1:2] == ["--fit"]:
        index, kind, folder, library = sys.argv[2:]
        lane: Any = Counted(library)
        connection: Any = _Nobody()
        fit(SHAPES[int(index)], lane, kind, Path(folder) / f"run{index}", connection)
        return
    with tempfile.TemporaryDirectory() as name:
        library = str(Path(name) / "count.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=_SOURCE.encode(), check=True)
        for number, shape in enumerate(SHAPES):
            found = {kind: count(number, kind, Path(name), library) for kind in sys.argv[1:] or KINDS}
            for kind, each in found.items():
                more = f", {each - found['none']:+,.0f}" if "none" in found else ""
                print(f"{shape.name}: {kind}: {each:,.0f} instructions a step{more}", flush=True)


if __name__ == "__main__":
    main()
