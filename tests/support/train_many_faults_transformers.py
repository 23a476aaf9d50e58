"""As `train_many_faults`, a job of Hugging Face's Trainer: evaluations, workers of a loader, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

from lastgasp_transformers import LastGasp
from support.train_many_faults import arguments as asked
from support.train_many_faults import pause, step_of
from support.train_transformers import LENGTH, VOCABULARY, OwnRandomNumbers, Tokens, arguments, result

WIDTH = 128
"""5 MB of parameters and moments, so that a copy that is kept would show."""


class Pause(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Waits for each fault, and writes down what is held."""

    def __init__(self, directory: Path, faults: int, after: int, ours: LastGasp) -> None:
        self._held, self._ours = (directory, faults, after), ours

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A step begins."""
        run: Any = self._ours.run
        pause(*self._held, state.global_step, lambda: run.session.progress("data"))


def main() -> None:
    """Train."""
    args = asked()
    torch.set_num_threads(1)
    wanted, ours = arguments(str(args.dir), "plain"), LastGasp()
    wanted.max_steps, wanted.dataloader_num_workers, wanted.save_total_limit = step_of(args.faults) + 2, 1, 2
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=2,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    trainer = Trainer(
        GPT2LMHeadModel(config), wanted, train_dataset=Tokens(40 * wanted.world_size), eval_dataset=Tokens(8),
        callbacks=[OwnRandomNumbers(), Pause(args.dir, args.faults, args.after, ours), ours],
    )  # fmt: skip
    done = trainer.train()
    if wanted.process_index == 0:
        torch.save(result(trainer, done.training_loss), args.dir / "final.pt")


if __name__ == "__main__":
    main()
