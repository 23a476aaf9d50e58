"""A job of Hugging Face's Trainer whose `train` can be entered again: `train_transformers` behind a gate."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from lastgasp_transformers import LastGasp
from support import again_faults, card
from support.again_faults import note
from support.train_transformers import SHAPES, OwnRandomNumbers, Tokens, arguments, model, result

STUCK = 5
"""Completed steps after which `--stuck` stays."""
GATE = 3
"""Completed steps after which the ranks wait for the file `go`: faults come behind it."""


class Diary(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Notes who trains, and holds the ranks at the gate."""

    def __init__(self, directory: Path, ours: LastGasp, stuck: str) -> None:
        self._directory, self._ours, self._stuck = directory, ours, stuck

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """`train` is entered."""
        note(self._directory, f"entered {os.getpid()} {state.global_step}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Faults come once the test says so."""
        deadline, run = time.monotonic() + 10 * again_faults.PATIENCE, self._ours.run
        while run is not None and state.global_step >= GATE and not (self._directory / "go").exists():
            assert time.monotonic() < deadline
            run.session.progress("data")
            time.sleep(0.01)
        if state.global_step == STUCK:
            again_faults.stay(self._stuck)


class LogsAlone(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """As the examples' `evaluate` for question answering, which logs where `args.should_save`."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A row."""
        if state.global_step in (1, 2):
            state.log_history.append({"exact_match": 1.0, "step": state.global_step})


def main() -> None:
    """Twelve steps: two epochs of six."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--shape", default="plain", choices=sorted(SHAPES))
    parser.add_argument("--first", action="store_true", help="rank 0 prepares data before the others")
    parser.add_argument("--name", action="store_true", help="rank 0 tells the others a name before `train`")
    parser.add_argument("--alone", action="store_true", help="rank 0 alone logs something")
    parser.add_argument("--apart", action="store_true", help="each process makes up its own output_dir")
    parser.add_argument("--stuck", default="", help="a callback of this rank does not return")
    parser.add_argument("--twice", action="store_true", help="it is the second training of its script")
    args = parser.parse_args()
    torch.set_num_threads(1)
    card.one_card()
    again_faults.install(args.dir, again_faults.OF_TRAINER)
    place = args.dir / f"run-{os.getpid()}" if args.apart else args.dir
    wanted, ours = arguments(str(place), args.shape), LastGasp()
    rows = 12 * wanted.world_size
    if args.name:
        dist.broadcast_object_list(["a name"])
    with wanted.main_process_first() if args.first else nullcontext():
        note(args.dir, f"prepared {os.getpid()}")
    data = Tokens(rows, augment=args.shape != "workers")
    callbacks: list[Any] = [OwnRandomNumbers(), Diary(args.dir, ours, args.stuck), ours]
    if args.alone and wanted.process_index == 0:
        callbacks.append(LogsAlone())
    if "metric_for_best_model" in SHAPES[args.shape]:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=3))
    if args.twice:
        short = arguments(str(args.dir / "first"), "plain")
        short.max_steps = 1
        Trainer(model(), short, train_dataset=data, eval_dataset=Tokens(8), callbacks=[LastGasp()]).train()
    trainer = Trainer(model(), wanted, train_dataset=data, eval_dataset=Tokens(8), callbacks=callbacks)
    done = trainer.train()
    note(args.dir, f"left {os.getpid()} {trainer.state.global_step}")
    if wanted.process_index == 0:
        torch.save(result(trainer, done.training_loss), args.dir / "final.pt")


if __name__ == "__main__":
    main()
