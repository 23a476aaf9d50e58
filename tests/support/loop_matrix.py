"""The matrix of faults of a hand-written loop: kind x moment x rank, with launcher and world size taking turns."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from support.matrix import STEP, Case

SCRIPT = Path(__file__).with_name("train_loop.py")
SHAPES_SCRIPT = Path(__file__).with_name("train_shapes.py")
FRAMEWORKS = ("nanogpt", "overflowing", "gan", "augmented", "unlike")
"""Shapes of `train_shapes.py`: as frameworks and papers have their loops."""
KINDS = ("sigkill", "exception", "sigterm", "sigstop")
MOMENTS = ("data", "forward", "backward", "update", "after_update", "validation", "periodic_save", "gasp_save")
LAUNCHERS = ("run", "torchrun", "script")
RANKS = ("first", "last")


@dataclass(frozen=True)
class LoopCase(Case):
    """One job with one fault (or two). Launcher `script` starts the ranks itself, as a shell script would."""

    shape: str = "plain"

    def __str__(self) -> str:
        return super().__str__() + ("" if self.shape == "plain" else f"-{self.shape}")

    @property
    def exact_step(self) -> int | None:
        """The step that must be saved; loops that wait after their update go back to the step before it."""
        if self.moment == "before_update":
            return None  # gloo may give the others the last gradients after it has given them to the one that raises
        if self.moment == "step_end":
            return STEP + 1  # the others have completed it
        if self.shape in FRAMEWORKS:
            return STEP
        if self.shape == "closure" and self.moment == "after_update":
            return None  # the survivor may have come to the end of the step, or not
        if self.shape != "plain" and self.moment in ("update", "after_update", "forward", "backward"):
            return STEP
        return super().exact_step

    def command(self, directory: Path, final: Path) -> list[str]:
        """The job's command line."""
        path = SHAPES_SCRIPT if self.shape in FRAMEWORKS else SCRIPT
        script = [str(path), "--dir", str(directory), "--final", str(final), "--shape", self.shape]
        ranks = ["--nproc-per-node", str(self.world)]
        if self.launcher == "run":
            return [sys.executable, "-m", "lastgasp", "run", *ranks, *script]
        if self.launcher == "torchrun":
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks, *script]
        return [sys.executable, *script, "--processes", str(self.world)]


def all_cases() -> list[LoopCase]:
    """Every kind at every moment on either rank."""
    cases = []
    for i, (kind, moment, rank) in enumerate(itertools.product(KINDS, MOMENTS, RANKS)):
        cases.append(LoopCase(kind, moment, rank, LAUNCHERS[i % 3], 3 if i % 5 == 4 else 2))
    return cases


COVERING = (
    LoopCase("sigstop", "data", "last", "torchrun"),
    LoopCase("exception", "before_update", "last", "run", shape="nanogpt"),
)
"""What runs with every test round: a rank that hangs, and one that raises where loops look for NaN, in a loop without
loader and epochs."""

SHAPES = tuple(
    LoopCase("sigkill", moment, rank, launcher, shape=shape)
    for (shape, moment), rank, launcher in zip(
        itertools.product(("waiting", "adversary", "closure"), ("forward", "backward", "after_update")),
        itertools.cycle(RANKS),
        itertools.cycle(("run", "torchrun", "run")),
        strict=False,
    )
)
"""Loops that wait for other ranks between an update and the end of its step."""

FRAMEWORK_CASES = (
    LoopCase("sigkill", "forward", "last", "run", shape="nanogpt"),
    LoopCase("sigkill", "backward", "first", "torchrun", shape="overflowing"),
    LoopCase("sigkill", "step_end", "first", "run", shape="gan"),
    LoopCase("sigkill", "forward", "last", "run", shape="augmented"),
)
"""Frameworks' own shapes, each at the moment that was hardest for it."""
