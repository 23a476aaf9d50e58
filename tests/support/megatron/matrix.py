"""Faults of real Megatron jobs: layout x kind x moment, and what must hold for each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from support.megatron.job import DIST_OPT, EXPERT_PARALLEL, EXPERTS, PIPELINE, TENSOR, TWO_INSTANCES, GptJob

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
OF_EXPERTS: dict[str, tuple[int, str]] = {
    "experts-dp2": (2, f"--bf16 {EXPERTS}"),
    "experts-dp2-one-instance": (2, f"--bf16 {EXPERTS} {DIST_OPT}"),
    "experts-dp2-two-instances": (2, f"--bf16 {EXPERTS} {TWO_INSTANCES}"),
    "ep2": (2, f"--bf16 {EXPERT_PARALLEL}"),
    "ep2-one-instance": (2, f"--bf16 {EXPERT_PARALLEL} {DIST_OPT}"),
    "ep2-dp4": (4, f"--bf16 {EXPERT_PARALLEL}"),
    "ep2-dp4-one-instance": (4, f"--bf16 {EXPERT_PARALLEL} {DIST_OPT}"),
    "ep2-dp4-two-instances": (4, f"--bf16 {EXPERT_PARALLEL} {TWO_INSTANCES}"),
    "tp2-ep2-one-instance": (
        4,  # gloo gathers equal sizes only, and the other dispatcher's differ
        f"--bf16 {EXPERT_PARALLEL} {DIST_OPT} {TENSOR} --sequence-parallel --moe-token-dispatcher-type allgather",
    ),
    "ep2-pp2": (4, f"--bf16 {EXPERT_PARALLEL} {PIPELINE}"),
    "ep2-pp2-one-instance": (4, f"--bf16 {EXPERT_PARALLEL} {PIPELINE} {DIST_OPT}"),
    "ep2-pp2-bare-stage": (4, f"--bf16 {EXPERT_PARALLEL} {PIPELINE} {DIST_OPT} --moe-layer-freq [0,1]"),
}
"""The same with experts: fewer combinations, and each rank. The bare stage has none."""
EXPERTS_WITHOUT_REPLICAS = (
    "experts-dp2-one-instance", "ep2", "ep2-one-instance", "ep2-dp4-one-instance", "tp2-ep2-one-instance",
    "ep2-pp2", "ep2-pp2-one-instance", "ep2-pp2-bare-stage",
)  # fmt: skip
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
        layouts = (*LAYOUTS, *OF_EXPERTS)
        turn = layouts.index(self.layout) + KINDS.index(self.kind) + (*MOMENTS, *OF_ARENAS).index(self.moment)
        return 0 if turn % 2 == 0 else flags_of(self.layout)[0] - 1

    @property
    def environment(self) -> dict[str, str]:
        """What brings the fault about."""
        step = SAVE_STEP if self.moment == "periodic_save" else STEP
        fault = f"kind={self.kind},rank={self.victim},step={step},phase={self.moment}"
        hang = {"LASTGASP_HANG_TIMEOUT": "8"} if self.kind == "sigstop" else {}
        return {"LASTGASP_FAULT": fault, "LASTGASP_ARENA": "every 1", "LASTGASP_RECOVERY": "restart"} | hang

    @property
    def exact_step(self) -> int | None:
        """The step that must be saved; None where the signal is asynchronous and some steps may follow, and where the
        others may have made their update, for which they need no more of the dead rank.
        """
        if self.kind == "sigterm" or self.moment == "before_update":
            return None
        at = {"after_update": STEP + 1, "step_end": STEP + 1, "periodic_save": SAVE_STEP}
        return at.get(self.moment, STEP)

    def job(self, folder: Path) -> GptJob:
        """It, under `lastgasp run` and with no line of lastgasp in the script."""
        ranks, flags = flags_of(self.layout)
        return GptJob(
            folder=folder, ranks=ranks, flags=flags, last=LAST, every=SAVE_STEP,
            launcher="run", launch_options=("--framework", "megatron"),
        )  # fmt: skip


def reference(layout: str, folder: Path) -> GptJob:
    """The same job under stock torchrun, without lastgasp."""
    ranks, flags = flags_of(layout)
    return GptJob(folder=folder, ranks=ranks, flags=flags, last=LAST, every=SAVE_STEP)


def flags_of(layout: str) -> tuple[int, str]:
    """Ranks and Megatron's flags."""
    return LAYOUTS[layout] if layout in LAYOUTS else OF_EXPERTS[layout]


def all_cases() -> list[Case]:
    """Every combination."""
    return [
        *(Case(*combination) for combination in itertools.product(LAYOUTS, KINDS, MOMENTS)),
        *(Case(layout, "sigkill", moment) for layout in WITHOUT_REPLICAS for moment in OF_ARENAS),
        *(Case(layout, "exception", "update", 1) for layout in WITHOUT_REPLICAS),
        *cases_of_experts(),
    ]


def cases_of_experts() -> list[Case]:
    """Each rank in the backward and about to update; in the update where that loses nothing; other kinds once."""
    return [
        *(
            Case(layout, "sigkill", moment, rank)
            for layout, (ranks, _) in OF_EXPERTS.items()
            for moment in ("backward", "before_update")
            for rank in range(ranks)
        ),
        *(Case(layout, "sigkill", "after_update") for layout in OF_EXPERTS),
        *(Case(layout, "sigkill", "periodic_save") for layout in OF_EXPERTS),
        *(Case(layout, "exception", "backward", 1) for layout in OF_EXPERTS),
        *(Case(layout, "sigterm", "forward", 0) for layout in OF_EXPERTS),
        *(Case(layout, "sigstop", "backward") for layout in ("ep2-one-instance", "ep2-dp4-two-instances")),
        *(
            Case(layout, "sigkill", "update", rank)
            for layout in EXPERTS_WITHOUT_REPLICAS
            for rank in range(OF_EXPERTS[layout][0])
        ),
        *(Case(layout, "exception", "update", 1) for layout in EXPERTS_WITHOUT_REPLICAS),
    ]


COVERING = [
    Case("tp2-dp2", "sigkill", "periodic_save"),
    Case("ep2-one-instance", "sigkill", "backward", 0),
]
"""What runs with every test round."""
