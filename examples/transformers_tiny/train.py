"""A tiny GPT-2 that learns to count, under Hugging Face's Trainer: made from a configuration, nothing is downloaded."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lastgasp_transformers import LastGasp

NUMBERS, LENGTH = 32, 12


class Counting(Dataset[dict[str, Tensor]]):
    """Rows of numbers that follow each other, from a random one on."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (int(torch.randint(NUMBERS, ())) + torch.arange(LENGTH)) % NUMBERS
        return {"input_ids": row, "labels": row}


def main() -> None:
    """Train; rank 0 writes the final weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="out/ckpts")
    parser.add_argument("--final", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=NUMBERS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
                                       bos_token_id=0, eos_token_id=0))  # fmt: skip
    arguments = TrainingArguments(
        args.dir, max_steps=args.steps, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=10,
        save_steps=20, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Counting(), callbacks=[LastGasp()])
    trainer.train()
    if args.final and arguments.process_index == 0:
        torch.save(model.state_dict(), args.final)


if __name__ == "__main__":
    main()
