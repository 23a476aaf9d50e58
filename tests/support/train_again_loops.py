"""The loops of `train_loop` and `train_shapes`, each in one function that is entered again; held at a gate for faults.

Usage: train_again_loops.py NAME ARGUMENTS, where NAME is one of those two.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from lastgasp.pytorch import Session, train
from lastgasp.pytorch.loop.run import Run
from support.again_faults import note

GATE = 3
"""Completed steps after which the ranks wait for the file `go`: faults come behind it."""


def main() -> None:
    """Train."""
    name = sys.argv.pop(1)
    directory = Path(sys.argv[sys.argv.index("--dir") + 1])
    complete, opened = Run.complete, Session.__init__

    def held(run: Run, step: int) -> None:
        complete(run, step)
        while step >= GATE and not (directory / "go").exists():
            run.engine.progress("between")
            time.sleep(0.01)

    def noted(session: Session, *args: Any) -> None:
        opened(session, *args)
        note(directory, f"entered {os.getpid()} {session.step}")

    vars_of: Any = setattr
    vars_of(Run, "complete", held)
    vars_of(Session, "__init__", noted)
    train(importlib.import_module(f"support.{name}").main)


if __name__ == "__main__":
    main()
