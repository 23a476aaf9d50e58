"""Faults of real Megatron jobs: layout x kind x moment, and what must hold for each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from support.megatron.job import DIST_OPT, PIPELINE, TENSOR, TWO_INSTANCES, GptJob

LAYOUTS: dict[str, tuple[int, str]] = {
    "dp2": (2, "--bf16"),
    "dp2-two-instances": (2, f"--bf16 {TWO_INSTANCES}"),
    "dp4-two-instances": (4, f"--bf16 {TWO_INSTANCES}"),
    "tp2-dp2": (4, f"--bf16 {TENSOR}"),
    "pp2-dp2": (4, f"--bf16 {PIPELINE}"),
    "tp2": (2, f"--bf16 {TENSOR}"),
    "pp2": (2, f"--bf16 {PIPELINE}"),
    "tp2-pp2": (4, f"--bf16 {TENSOR} {PIPELINE}"),
    "dp2-one-instance": (2, f"--bf16 {DIST_OPT}"),
    "dp4-one-instance": (4, f"--bf16 {DIST_OPT}"),
    "tp2-dp2-one-instance": (4, f"--bf16 {DIST_OPT} {TENSOR}"),
}
"""Ranks and Megatron's flags."""
WITHOUT_REPLICAS = ("tp2", "pp2", "tp2-pp2", "dp2-one-instance", "dp4-one-instance", "tp2-dp2-one-instance")
"""Each shard is on one rank only: that of a dead or a stopped one is in its arena."""
KINDS = ("sigkill", "sigstop", "exception", "sigterm")
MOMENTS = ("forward", "backward", "after_update", "periodic_save")
OF_ARENAS = ("data", "update", "arena_copy", "step_end")
"""Further ones where each shard is on one rank only; in the update and in the copy the step is done again."""
STEP, SAVE_STEP = 6, 8
"""Completed iterations at the fault; the one with a periodic save."""
LAST = 28
"""20 iterations after the fault."""
PLACES = {
    "forward": "forward_step",
    "backward": "finalize_model_grads",
    "after_update": "step_with_ready_grads",
    "periodic_save": "save_checkpoint",
    "update": "step_with_ready_grads",
}
"""Which of Megatron's functions is under way at each moment: the traceback of an exception names it."""


@dataclass(frozen=True)
class Case:
    """One job with one fault."""

    layout: str
    kind: str
    moment: str
    rank: int | None = None
    """The one that it happens on; left out, the first, which writes periodic saves, and the last take turns."""

    def __str__(self) -> str:
        named = "" if self.rank is None else f"-rank{self.rank}"
        return f"{self.layout}-{self.kind}-{self.moment}{named}"

    @property
    def victim(self) -> int:
        """The rank that it happens on."""
        if self.rank is not None:
            return self.rank
        turn = (*LAYOUTS,).index(self.layout) + KINDS.index(self.kind) + (*MOMENTS, *OF_ARENAS).index(self.moment)
        return 0 if turn % 2 == 0 else LAYOUTS[self.layout][0] - 1

    @property
    def environment(self) -> dict[str, str]:
        """What brings the fault about."""
        step = SAVE_STEP if self.moment == "periodic_save" else STEP
        fault = f"kind={self.kind},rank={self.victim},step={step},phase={self.moment}"
        hang = {"LASTGASP_HANG_TIMEOUT": "8"} if self.kind == "sigstop" else {}
        return {"LASTGASP_FAULT": fault, "LASTGASP_ARENA": "every 1"} | hang

    @property
    def exact_step(self) -> int | None:
        """The step that must be saved; None where the signal is asynchronous and some steps may follow."""
        if self.kind == "sigterm":
            return None
        at = {"after_update": STEP + 1, "step_end": STEP + 1, "periodic_save": SAVE_STEP}
        return at.get(self.moment, STEP)

    def job(self, folder: Path) -> GptJob:
        """It, under `lastgasp run` and with no line of lastgasp in the script."""
        ranks, flags = LAYOUTS[self.layout]
        return GptJob(
            folder=folder, ranks=ranks, flags=flags, last=LAST, every=SAVE_STEP,
            launcher="run", launch_options=("--framework", "megatron"),
        )  # fmt: skip


def reference(layout: str, folder: Path) -> GptJob:
    """The same job under stock torchrun, without lastgasp."""
    ranks, flags = LAYOUTS[layout]
    return GptJob(folder=folder, ranks=ranks, flags=flags, last=LAST, every=SAVE_STEP)


def all_cases() -> list[Case]:
    """Every combination."""
    return [
        *(Case(*combination) for combination in itertools.product(LAYOUTS, KINDS, MOMENTS)),
        *(Case(layout, "sigkill", moment) for layout in WITHOUT_REPLICAS for moment in OF_ARENAS),
        *(Case(layout, "exception", "update", 1) for layout in WITHOUT_REPLICAS),
    ]


COVERING = [
    Case("tp2-dp2", "sigkill", "periodic_save"),
    Case("dp2-one-instance", "sigkill", "backward", 0),
]
"""What runs with every test round."""
