"""Exact losses of each rank: a callback that needs nothing but MindSpore, for jobs with and without lastgasp."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mindspore.train import Callback


class Losses(Callback):  # type: ignore[misc]
    """Appends a line per step to `rank-R.txt` in `LOSSES_DIR`: process, completed steps, the loss as hexadecimal.

    Completed steps are the optimizer's own `global_step`, so that the line says what the state is worth.
    """

    def on_train_step_end(self, run_context: Any) -> None:
        """Called by Model.train after each step."""
        if not os.environ.get("LOSSES_DIR"):
            return
        now = run_context.original_args()
        optimizer = now.optimizer if now.optimizer is not None else now.network.optimizer
        outputs = now.net_outputs[0] if isinstance(now.net_outputs, tuple | list) else now.net_outputs
        loss, step = float(outputs.asnumpy().reshape(-1)[0]), int(optimizer.global_step.asnumpy()[0])
        rank = os.environ.get("RANK_ID", "0")
        with Path(os.environ["LOSSES_DIR"], f"rank-{rank}.txt").open("a") as log:
            log.write(f"{os.getpid()} {step} {loss.hex()}\n")
