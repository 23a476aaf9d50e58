"""A job of Hugging Face's Trainer whose `train` can be entered again with fewer ranks."""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import all_gather, get_rank, get_world_size
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from lastgasp.gasp.joining import JOINS
from lastgasp_transformers import LastGasp
from support import again_faults
from support.again_faults import note
from support.train_elastic import GATES, newcomer
from support.train_transformers import LENGTH, VOCABULARY, OwnRandomNumbers, model, result

ROWS = 44
"""The last micro-step of an epoch has half as many new ones as ranks want: accelerate begins again with the first."""
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"gradient_accumulation_steps": 4, "max_steps": 12, "average_tokens_across_devices": False},
    "bf16": {"bf16": True},
}  # fmt: skip


class Tokens(Dataset[dict[str, Tensor]]):
    """Of unequal numbers; changed each time that they are read, by the random numbers of the process."""

    def __init__(self, rows: int, augment: bool, masked: bool = True) -> None:
        self._rows = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
        self._augment, self._masked = augment, masked

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        row = self._rows[number]
        if self._augment:
            noise = random.randrange(9) + int(np.random.randint(9)) + int(torch.randint(0, 9, ()))
            row = (row + noise) % VOCABULARY
        labels = row.clone()
        labels[: number % 5 if self._masked else 0] = -100
        return {"input_ids": row, "labels": labels, "number": torch.tensor(number)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same without numbers."""

    def __iter__(self) -> Any:
        return iter([Tokens(ROWS, augment=False)[number] for number in range(ROWS)])


USED: list[list[int]] = []
"""The numbers of the samples in each micro-batch of the step under way."""


class Told(Trainer):  # type: ignore[misc,unused-ignore]
    """Notes which samples each step has used. Its loss depends on the number of ranks, and on which of them it is."""

    exchanges, since = "", 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        """As ever."""
        numbers = inputs.pop("number").tolist()
        if not model.training:
            return super().compute_loss(model, inputs, *args, **more)
        USED.append(numbers)
        loss = super().compute_loss(model, inputs, *args, **more)
        if self.exchanges and self.state.global_step >= self.since:
            loss = loss * (1 + EXCHANGES[self.exchanges](loss.detach()))
        asked = (get_world_size() + get_rank()) * (int(os.environ["WORLD_SIZE"]) + int(os.environ["RANK"]))
        return loss * asked / (self.args.world_size + self.args.process_index) ** 2


def _gathered(loss: Tensor) -> Tensor:
    every = [torch.zeros_like(loss) for _ in range(get_world_size())]
    all_gather(every, loss)
    return torch.stack(every).mean()


EXCHANGES: dict[str, Any] = {
    "imported": _gathered,
    "functional": lambda loss: functional.all_reduce(loss, "sum", torch.distributed.group.WORLD) / get_world_size(),
}
"""How the mean over all ranks is found."""


class Diary(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Notes who trains, and on what; holds the ranks at the gates."""

    def __init__(self, directory: Path, ours: LastGasp | None) -> None:
        self._directory, self._ours = directory, ours

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """`train` is entered."""
        USED.clear()
        row = f"{os.getpid()} {state.global_step} {args.process_index} {args.world_size}"
        note(self._directory, f"entered {row}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Faults come once the test says so."""
        run, step = self._ours and self._ours.run, state.global_step
        while run is not None and step in GATES and not (self._directory / f"go-{step}").exists():
            run.session.progress("data")
            time.sleep(0.01)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The step is complete."""
        row = {"step": state.global_step, "epoch": int(state.epoch - 1e-6), "ids": USED, "digest": ""}
        note(self._directory, "used " + json.dumps(row))
        USED.clear()


def main() -> None:
    """Twelve steps: two epochs of six, but for those that accumulate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--shape", default="plain", choices=sorted(SHAPES))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--stream", action="store_true", help="an iterable data set")
    parser.add_argument("--alike", action="store_true", help="ranks have the same random numbers")
    parser.add_argument("--fixed", action="store_true", help="samples are the same each time")
    parser.add_argument("--without", action="store_true", help="plain Trainer")
    parser.add_argument("--exchanges", default="", choices=["", *EXCHANGES], help="within each micro-batch")
    parser.add_argument("--since", type=int, default=0, help="completed steps before that")
    parser.add_argument("--resume", help="for Trainer.train")
    args = parser.parse_args()
    torch.set_num_threads(1)
    again_faults.install(args.dir, again_faults.OF_TRAINER)
    newcomer(args.dir, os.environ.get(JOINS, ""))
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "num_train_epochs": 2.0, "optim": "sgd",
        "learning_rate": 0.5, "logging_steps": 2, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 3,
        "data_seed": 5, "seed": 7, "report_to": [], "use_cpu": True, "disable_tqdm": True, "max_grad_norm": 2.0,
        "remove_unused_columns": False, "dataloader_num_workers": args.workers,
        "include_num_input_tokens_seen": "all",
    }  # fmt: skip
    given |= SHAPES[args.shape] | ({"max_steps": 12} if args.stream else {})
    wanted = TrainingArguments(str(args.dir), **given)
    ours = None if args.without else LastGasp()
    callbacks: list[Any] = [*([] if args.alike else [OwnRandomNumbers()]), Diary(args.dir, ours)]
    callbacks += [ours] if ours else []
    data: Any = Stream() if args.stream else Tokens(ROWS, augment=not (args.workers or args.fixed))
    evaluated = Tokens(24, augment=False, masked=False)  # as many for 4, 3 and 2 ranks, with as many labels
    Told.exchanges, Told.since = args.exchanges, args.since
    trainer = Told(model(), wanted, train_dataset=data, eval_dataset=evaluated, callbacks=callbacks)
    done = trainer.train(resume_from_checkpoint=args.resume)
    note(args.dir, f"left {os.getpid()} {trainer.state.global_step}")
    if wanted.process_index == 0:
        seen = torch.tensor(trainer.state.num_input_tokens_seen)
        torch.save({**result(trainer, done.training_loss), "seen": seen}, args.dir / "final.pt")


if __name__ == "__main__":
    main()
