"""A rank of a job that waits, in the middle of its first attempt, until the test lets it go on.

Usage: warm_worker.py SHAPE DIRECTORY [MORE]: `lightning` is `train_tiny`, `loop` is `train_loop`; both train 12 steps.
Each rank writes what it is into DIRECTORY/rank-RANK-ATTEMPT.json.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from support.interpreter import interpreter

GATE = 6
"""Before the pass of this number, counted from 1."""


def main() -> None:
    """One rank."""
    shape, directory = sys.argv[1], Path(sys.argv[2])
    directory.mkdir(exist_ok=True, parents=True)
    attempt = os.environ.get("LASTGASP_ATTEMPT", "0")
    (directory / f"rank-{os.environ['RANK']}-{attempt}.json").write_text(json.dumps(facts()))
    sys.argv[1:] = ["--dir", str(directory), "--final", str(directory / "final.pt"), *sys.argv[3:]]
    first = attempt == "0"
    if shape == "lightning":
        from lightning.fabric.utilities import rank_zero
        from torchmetrics.utilities import prints

        from support import train_tiny

        ranks = [vars(module.rank_zero_only)["rank"] for module in (rank_zero, prints)]
        (directory / f"read-{os.environ['RANK']}-{attempt}.json").write_text(json.dumps(ranks))
        train_tiny.Tiny.training_step = gated(train_tiny.Tiny.training_step, directory, first)  # type: ignore[method-assign]
        train_tiny.main()
    else:
        from support import train_loop

        train_loop.TURNS["plain"] = gated(train_loop.plain, directory, first)
        train_loop.main()


def gated(inner: Callable[..., Any], directory: Path, closed: bool) -> Callable[..., Any]:
    """`inner`, which waits at the gate for the file `go`."""
    passes = 0

    def training_step(*arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        while closed and passes == GATE and not (directory / "go").exists():
            time.sleep(0.02)
        return inner(*arguments)

    return training_step


def facts() -> dict[str, Any]:
    """What a fresh interpreter has, and a forked one must have as well; `pid`, `parent` and `seeds` are its own."""
    return interpreter() | {
        "seeds": [torch.initial_seed(), random.getrandbits(64), int(np.random.randint(1 << 62))],
    }


if __name__ == "__main__":
    main()
