"""A tiny GPT-2 under Hugging Face's Trainer, with everything that makes resuming hard; nothing is downloaded."""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

sys.path.append(str(Path(__file__).parents[1]))  # as a script of its own
from support import card

VOCABULARY, LENGTH = 50, 8


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens; changed by four random generators each time that they are read, if `augment` says so."""

    def __init__(self, rows: int, augment: bool = False) -> None:
        self._rows = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
        self._augment, self._own = augment, np.random.default_rng(2)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index]
        if self._augment:
            noise = random.randrange(9) + int(np.random.randint(9)) + int(self._own.integers(9))
            row = (row + noise + int(torch.randint(0, 9, ()))) % VOCABULARY
        return {"input_ids": row, "labels": row}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same without length or order of choice."""

    def __init__(self, rows: int) -> None:
        self._tokens = Tokens(rows)

    def __iter__(self) -> Any:
        return iter([self._tokens[i] for i in range(len(self._tokens))])


class OwnRandomNumbers(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """As users' callbacks do: each rank has random numbers of its own from the beginning of training on."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Seed."""
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(99 + args.process_index)


class Counting(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Keeps a number in plain Python."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """One more."""
        self.steps += 1


class Counter(Trainer):  # type: ignore[misc,unused-ignore]
    """What it keeps changes the loss; so does a buffer of its model that no checkpoint has."""

    def __init__(self, model: Any, *args: Any, **more: Any) -> None:
        model.register_buffer("passing", torch.zeros(()), persistent=False)
        super().__init__(model, *args, **more)
        self.losses: list[float] = []

    def compute_loss(self, model: Any, *args: Any, **more: Any) -> Any:
        """Weighed by how many there were."""
        loss: Any = super().compute_loss(model, *args, **more)
        if model.training:
            self.losses.append(loss.item())
            self.model.passing += 1
        return loss * (1 + 0.01 * len(self.losses) + 0.01 * self.model.passing)


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss"},
    "accumulating": {"gradient_accumulation_steps": 2, "num_train_epochs": 4.0, "save_strategy": "epoch"},
    "epochs": {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch",
               "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2,
               "lr_scheduler_type": "reduce_lr_on_plateau"},
    "unseeded": {"accelerator_config": {"use_seedable_sampler": False}},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "stream": {"max_steps": 9},
    "bf16": {"bf16": True, "max_steps": 8},
    "workers": {"dataloader_num_workers": 2},
    "counting": {},
    "noisy": {"neftune_noise_alpha": 5.0},
}  # fmt: skip
"""What each shape asks of the Trainer besides."""


def arguments(directory: str, shape: str) -> TrainingArguments:
    """Twelve steps: two epochs of six."""
    given: dict[str, Any] = {"per_device_train_batch_size": 2, "num_train_epochs": 2.0, "learning_rate": 1e-2,
                             "logging_steps": 3, "save_steps": 4, "data_seed": 5, "seed": 7, "report_to": [],
                             "use_cpu": card.KIND != "cuda", "disable_tqdm": True}  # fmt: skip
    return TrainingArguments(directory, **(given | SHAPES[shape]))


def model() -> GPT2LMHeadModel:
    """Two layers, with dropout."""
    torch.manual_seed(7)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
                                      bos_token_id=0, eos_token_id=0))  # fmt: skip


def result(trainer: Trainer, loss: float) -> dict[str, Tensor]:
    """Everything that two runs of one training have in common: weights, and what was logged but for times."""
    rows = [{k: v for k, v in row.items() if "runtime" not in k and "per_second" not in k and k != "total_flos"}
            for row in trainer.state.log_history]  # fmt: skip
    logged = [torch.tensor([row[key] for key in sorted(row)], dtype=torch.float64) for row in rows]
    weights: Any = trainer.model
    return {**weights.state_dict(), "logged": torch.cat(logged), "loss": torch.tensor(loss, dtype=torch.float64)}


def main() -> None:
    """Train; rank 0 writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--shape", default="plain", choices=sorted(SHAPES))
    parser.add_argument("--without", action="store_true", help="plain Trainer, which resumes by itself")
    parser.add_argument("--resume", help="for Trainer.train")
    args = parser.parse_args()
    torch.set_num_threads(1)
    card.one_card()
    wanted = arguments(args.dir, args.shape)
    callbacks: list[Any] = [OwnRandomNumbers()]
    if "metric_for_best_model" in SHAPES[args.shape]:
        callbacks.append(EarlyStoppingCallback(early_stopping_patience=3))
    if args.shape == "counting":
        callbacks.append(Counting())
    if not args.without:
        from lastgasp_transformers import LastGasp

        callbacks.append(LastGasp())
    rows = 12 * wanted.world_size
    data: Any = Stream(rows) if args.shape == "stream" else Tokens(rows, augment=args.shape != "workers")
    kind = Counter if args.shape == "counting" else Trainer
    trainer = kind(model(), wanted, train_dataset=data, eval_dataset=Tokens(8), callbacks=callbacks)
    done = trainer.train(resume_from_checkpoint=args.resume)
    if args.final and wanted.process_index == 0:
        torch.save(result(trainer, done.training_loss), args.final)


if __name__ == "__main__":
    main()
