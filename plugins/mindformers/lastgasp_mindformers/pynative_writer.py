"""How checkpoints of the pynative Trainer are written: `iteration_*` directories, as its own callback writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mindspore

from lastgasp_mindformers.small import Numbers
from lastgasp_mindformers.targets import Target, iteration_target


class PynativeWriter:
    """For a job of one process (`source.Writer`).

    Args:
        trainer: whose model and optimizer are saved; directory: where `iteration_*` are.
    """

    def __init__(self, trainer: Any, directory: Path) -> None:
        self._trainer, self.directory = trainer, directory

    def target(self, numbers: Numbers, ranks: Iterable[int]) -> Target:
        """Where the checkpoint of a step stands."""
        return iteration_target(numbers.step, self._trainer.config.checkpoint.prefix, ("model", "opt"))

    def write(self, folder: Path, files: Sequence[str], numbers: Numbers, statistics: Mapping[str, Any]) -> None:
        """The files of MindFormers' own `save_checkpoint`, which has barriers and removes before it writes."""
        trainer = self._trainer
        model = trainer.model[0] if isinstance(trainer.model, list | tuple) else trainer.model
        weights = {param.name for param in model.get_parameters()}
        told = {name: mindspore.Tensor(value) for name, value in statistics.items() if name in weights}

        def live(name: str) -> bool:
            return name not in told

        def others(name: str) -> bool:
            return name not in weights

        save, common = mindspore.save_checkpoint, files[-1]
        save(model, str(folder / files[0]), append_dict=told, choice_func=live, format="safetensors")
        save(trainer.optimizer, str(folder / files[1]), choice_func=others, format="safetensors")
        content = {
            "epoch_num": int(trainer.state.epoch) or 1,
            "step_num": int(trainer.state.max_steps),
            "global_step": numbers.step,
            "loss_scale": 1.0,
            "global_batch_size": int(trainer.global_batch_size),
            "ckpt_status": None,
        }
        (folder / common).write_text(json.dumps(content, indent=4))
