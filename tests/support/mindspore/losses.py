"""Exact losses of each rank: a callback that needs nothing but MindSpore, for jobs with and without lastgasp."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mindspore.train import Callback


class Losses(Callback):  # type: ignore[misc]
    """Appends a line per step to `rank-R.txt` in `LOSSES_DIR`: process, completed steps, the loss as hexadecimal.

    Completed steps are the optimizer's own `global_step`, so that the line says what the state is worth. Where the loss
    is scaled by more than 1, the scale behind the step follows the loss. The scheduler's process writes none: msrun has
    it run the script, too, which trains there as well if it does not call `init`, as one process need not.
    """

    def on_train_step_end(self, run_context: Any) -> None:
        """Called by Model.train after each step."""
        if not os.environ.get("LOSSES_DIR") or os.environ.get("MS_ROLE") == "MS_SCHED":
            return
        now = run_context.original_args()
        optimizer = now.optimizer if now.optimizer is not None else now.train_network.optimizer
        outputs = now.net_outputs[0] if isinstance(now.net_outputs, tuple | list) else now.net_outputs
        loss, step = float(outputs.asnumpy().reshape(-1)[0]), int(optimizer.global_step.asnumpy()[0])
        rank = os.environ.get("RANK_ID", "0")
        with Path(os.environ["LOSSES_DIR"], f"rank-{rank}.txt").open("a") as log:
            log.write(f"{os.getpid()} {step} {loss.hex()}{_scale(now.train_network)}\n")


def _scale(network: Any) -> str:
    scale = getattr(network, "scale_sense", None)
    value = float(scale.asnumpy().reshape(-1)[0]) if scale is not None else 1.0
    return f"*{value:g}" if value != 1 else ""
