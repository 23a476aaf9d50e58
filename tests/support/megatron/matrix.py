"""Faults of real Megatron jobs: layout x kind x moment, and what must hold for each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from support.megatron.job import PIPELINE, TENSOR, TWO_INSTANCES, GptJob

LAYOUTS: dict[str, tuple[int, str]] = {
    "dp2": (2, "--bf16"),
    "dp2-two-instances": (2, f"--bf16 {TWO_INSTANCES}"),
    "dp4-two-instances": (4, f"--bf16 {TWO_INSTANCES}"),
    "tp2-dp2": (4, f"--bf16 {TENSOR}"),
    "pp2-dp2": (4, f"--bf16 {PIPELINE}"),
    "tp2": (2, f"--bf16 {TENSOR}"),
    "pp2": (2, f"--bf16 {PIPELINE}"),
    "tp2-pp2": (4, f"--bf16 {TENSOR} {PIPELINE}"),
}
"""Ranks and Megatron's flags."""
WITHOUT_REPLICAS = ("tp2", "pp2", "tp2-pp2")
"""Each shard is on one rank only: a dead or a stopped one takes it along."""
KINDS = ("sigkill", "sigstop", "exception", "sigterm")
MOMENTS = ("forward", "backward", "after_update", "periodic_save")
STEP, SAVE_STEP = 6, 8
"""Completed iterations at the fault; the one with a periodic save."""
LAST = 28
"""20 iterations after the fault."""
PLACES = {
    "forward": "forward_step",
    "backward": "finalize_model_grads",
    "after_update": "step_with_ready_grads",
    "periodic_save": "save_checkpoint",
}
"""Which of Megatron's functions is under way at each moment: the traceback of an exception names it."""


@dataclass(frozen=True)
class Case:
    """One job with one fault."""

    layout: str
    kind: str
    moment: str

    def __str__(self) -> str:
        return f"{self.layout}-{self.kind}-{self.moment}"

    @property
    def victim(self) -> int:
        """The rank that it happens on: the first, which writes periodic saves, and the last take turns."""
        turn = (*LAYOUTS,).index(self.layout) + KINDS.index(self.kind) + MOMENTS.index(self.moment)
        return 0 if turn % 2 == 0 else LAYOUTS[self.layout][0] - 1

    @property
    def environment(self) -> dict[str, str]:
        """What brings the fault about."""
        step = SAVE_STEP if self.moment == "periodic_save" else STEP
        fault = f"kind={self.kind},rank={self.victim},step={step},phase={self.moment}"
        hang = {"LASTGASP_HANG_TIMEOUT": "8"} if self.kind == "sigstop" else {}
        return {"LASTGASP_FAULT": fault} | hang

    @property
    def exact_step(self) -> int | None:
        """The step that must be saved; None where the signal is asynchronous and some steps may follow."""
        if self.kind == "sigterm":
            return None
        return {"after_update": STEP + 1, "periodic_save": SAVE_STEP}.get(self.moment, STEP)

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
    """Every combination that physics allow: a rank without a replica must live."""
    cases = [Case(*combination) for combination in itertools.product(LAYOUTS, KINDS, MOMENTS)]
    return [case for case in cases if case.layout not in WITHOUT_REPLICAS or case.kind in ("exception", "sigterm")]


COVERING = [
    Case("tp2-dp2", "sigkill", "periodic_save"),
]
"""What runs with every test round."""
