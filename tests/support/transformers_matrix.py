"""The matrix of faults under Hugging Face's Trainer: kind x moment x rank, shapes and world sizes taking turns."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

from support.matrix import STEP, Case

SCRIPT = Path(__file__).with_name("train_transformers.py")
KINDS = ("sigkill", "exception", "sigterm", "sigstop")
MOMENTS = ("data", "forward", "backward", "before_update", "update", "after_update", "step_end", "validation",
           "periodic_save", "gasp_save")  # fmt: skip
EVALUATED = 8
"""The first step after the fault's that is evaluated."""


@dataclass(frozen=True)
class TransformersCase(Case):
    """One job with one fault (or two)."""

    shape: str = "plain"

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.shape}"

    @property
    def exact_step(self) -> int | None:
        """The step that must be saved; None where the signal is asynchronous and some steps may follow."""
        found = super().exact_step
        if found is None or self.moment == "validation":
            return EVALUATED if found is not None else None
        if self.moment in ("before_update", "step_end"):
            return STEP if self.world == 1 and self.moment == "before_update" else STEP + 1
        raised = (self.kind, self.moment) == ("exception", "update")  # the others may not have begun theirs
        return None if raised else found

    @property
    def unmarked(self) -> set[int]:
        """The rank that is lost before its step's end has not ended the step that the others complete."""
        return super().unmarked | ({STEP + 1} if self.moment in ("before_update", "step_end") else set())

    def command(self, directory: Path, final: Path) -> list[str]:
        """The job's command line."""
        script = [str(SCRIPT), "--dir", str(directory), "--final", str(final), "--shape", self.shape]
        return [*launcher(self.world, self.launcher), *script]


def launcher(world: int, name: str = "run") -> list[str]:
    """What starts so many ranks."""
    module = ["lastgasp", "run"] if name == "run" else ["torch.distributed.run", "--standalone"]
    return [sys.executable, "-m", *module, "--nproc-per-node", str(world)]


COVERING = (TransformersCase("sigkill", "backward", "last", "run"),)
"""What runs with every test round."""


def all_cases() -> list[TransformersCase]:
    """Every kind at every moment on either rank."""
    cases = []
    for i, (kind, moment, rank) in enumerate(itertools.product(KINDS, MOMENTS, ("first", "last"))):
        cases.append(TransformersCase(kind, moment, rank, ("run", "torchrun")[i % 2], 3 if i % 7 == 6 else 2))
    return cases


_SHAPES = ("accumulating", "epochs", "unseeded", "grouped", "bf16", "workers")
SHAPES = tuple(
    TransformersCase("sigkill", moment, rank, "run", 2, shape)
    for (shape, moment), rank in zip(
        itertools.product(_SHAPES, ("forward", "step_end")),
        itertools.cycle(("first", "last")),
        strict=False,
    )
) + tuple(
    TransformersCase(kind, moment, "first", "run", 1, shape)
    for kind, moment, shape in (("exception", "forward", "stream"), ("exception", "after_update", "plain"),
                                ("exception", "step_end", "epochs"), ("sigterm", "data", "accumulating"))
)  # fmt: skip
"""Shapes of users' arguments, and one device."""
