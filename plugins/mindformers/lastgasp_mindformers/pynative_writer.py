"""How checkpoints of the pynative Trainer are written: `iteration_*` directories, as its own callback writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lastgasp_mindformers.aux_state import Numbers
from lastgasp_mindformers.native import write_iteration
from lastgasp_mindformers.targets import Target, iteration_target


class PynativeWriter:
    """For a job of one process (`source.Writer`).

    Args:
        trainer: whose model and optimizer are saved; directory: where `iteration_*` are.
    """

    def __init__(self, trainer: Any, directory: Path) -> None:
        self._trainer, self.directory = trainer, directory

    def target(self, numbers: Numbers, ranks: Iterable[int]) -> Target:
        """The path of the checkpoint of a step."""
        return iteration_target(numbers.step, self._trainer.config.checkpoint.prefix, ("model", "opt"))

    def write(self, folder: Path, files: Sequence[str], numbers: Numbers, statistics: Mapping[str, Any]) -> None:
        """The files of MindFormers' own `save_checkpoint`, which has barriers and removes before it writes."""
        trainer = self._trainer
        model = trainer.model[0] if isinstance(trainer.model, list | tuple) else trainer.model
        content = {
            "epoch_num": int(trainer.state.epoch) or 1,
            "step_num": int(trainer.state.max_steps),
            "global_step": numbers.step,
            "loss_scale": 1.0,
            "global_batch_size": int(trainer.global_batch_size),
            "ckpt_status": None,
        }
        write_iteration(folder, files, (model, trainer.optimizer), statistics, content)
