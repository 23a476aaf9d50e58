"""A loop of one's own with MindIO's calls: no decorator, and no tft_destroy_processor. Two ranks, each holds all.

`JOB_RAISES`: a rank and a step behind which it raises in the first attempt. `JOB_WRONG`: rank 1 finds wrong values
behind step 4, once rank 0 has completed it, too, and says so by `tft_report_error`, or raises it out of a decorated
function. `JOB_LOAD`: where it loads from, instead of the directory of its dumps.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mindio_ttp.framework_ttp import (  # type: ignore[import-not-found, unused-ignore]
    ReportState,
    tft_end_updating_os,
    tft_exception_handler,
    tft_init_controller,
    tft_init_processor,
    tft_register_exception_handler,
    tft_register_rename_handler,
    tft_register_save_ckpt_handler,
    tft_report_error,
    tft_set_optimizer_replica,
    tft_start_controller,
    tft_start_processor,
    tft_start_updating_os,
)

STEPS = 6
SAVE = Path(os.environ["JOB_SAVE"])
LOAD = Path(os.environ.get("JOB_LOAD") or SAVE)
ATTEMPT = os.environ.get("LASTGASP_ATTEMPT", "0")
WRONG = os.environ.get("JOB_WRONG", "")
RAISES = os.environ.get("JOB_RAISES", "") if ATTEMPT == "0" else ""


def save(step: int, save_info: list[dict[str, Any]], args: Any, ctx: Any) -> None:
    """The one rank that was chosen writes."""
    folder = SAVE / f"iter_{step:07d}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"weights": weights, "step": step}, folder / "model.pt")


def rename(step: int, args: Any) -> None:
    """It has its name."""
    (SAVE / f"iter_{step:07d}.tmp").rename(SAVE / f"iter_{step:07d}")


def load() -> int:
    """The newest dump; 0 where there is none."""
    found = max(LOAD.glob("iter_*/model.pt"), default=None)
    if found is None:
        return 0
    kept = torch.load(found, weights_only=True)
    weights.copy_(kept["weights"])
    return int(kept["step"])


def gone(pid: int) -> bool:
    """A process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
weights = torch.zeros(8)
if rank == 0:
    tft_init_controller(rank, world, False, False)
    tft_start_controller("127.0.0.1", 8000, False, "")
tft_init_processor(rank, world, False, False, "")
tft_start_processor("127.0.0.1", 8000)
dist.init_process_group("gloo")
tft_set_optimizer_replica(rank, [{"rank_list": [0, 1], "replica_cnt": 2, "replica_shift": 0}])
tft_register_save_ckpt_handler(save)
tft_register_rename_handler(rename)
pids: list[Any] = [None] * world
dist.all_gather_object(pids, os.getpid())
first = load()
tft_register_exception_handler("PRECISION ERROR", "RS_RETRY", lambda text: "PRECISION ERROR")


def train() -> None:
    """The loop."""
    for step in range(first, STEPS):
        total = torch.ones(8)
        if WRONG and (rank, step) == (0, 4):
            (SAVE.parent / "comes to step 5").touch()
        try:
            dist.all_reduce(total)
        except RuntimeError:
            if WRONG != "raise":
                tft_report_error(ReportState.RS_NORMAL.value)
            raise
        tft_start_updating_os()
        weights.add_(total)
        tft_end_updating_os(step + 1)
        if WRONG and (rank, step + 1) == (1, 4):
            waits = time.monotonic() + 60
            while not (SAVE.parent / "comes to step 5").exists() and time.monotonic() < waits:
                time.sleep(0.001)
            if WRONG == "report":
                tft_report_error(ReportState.RS_RETRY.value)
            raise RuntimeError("PRECISION ERROR")
        if f"{rank} {step + 1}" == RAISES:
            raise ValueError("on purpose")


(tft_exception_handler(train) if WRONG == "raise" else train)()
dist.destroy_process_group()
with (SAVE.parent / "ended").open("a") as ended:
    ended.write(f"{ATTEMPT} {rank} {first} {weights[0].item():g}\n")
deadline = time.monotonic() + 120
while rank == 0 and not gone(pids[1]) and time.monotonic() < deadline:  # an evaluation, on this rank alone
    time.sleep(0.01)
