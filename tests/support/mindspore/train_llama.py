"""A tiny LLaMA through the real MindFormers Trainer: what a user's script does, on a CPU.

`python train_llama.py YAML`. No line of lastgasp stands here; `LOSSES_DIR` has each rank write its exact losses. Each
batch of an evaluation takes `SLOW_EVALUATION` seconds longer.
"""

from __future__ import annotations

import gc
import os
import sys
import time


def main(yaml: str) -> None:
    """Train as the YAML says."""
    gc.disable()  # until everything is imported: a quarter of the time of a start
    from mindformers import MindFormerConfig, Trainer
    from mindformers.core.context import build_context

    from support.mindspore import cpu
    from support.mindspore.losses import Losses

    gc.freeze()
    gc.enable()
    cpu.apply()
    from support.mindspore import own_moments  # noqa: F401  # registers its optimizer
    if seconds := float(os.environ.get("SLOW_EVALUATION", "0")):
        slow_evaluation(seconds)
    config = MindFormerConfig(yaml)
    build_context(config)
    getattr(Trainer(args=config, task="text_generation", callbacks=[Losses()]), config.run_mode)()


def slow_evaluation(seconds: float) -> None:
    """What MindSpore does behind each batch of one takes longer."""
    from mindspore.train import Model

    update = Model._update_metrics

    def updated(self: Model, outputs: object) -> None:
        time.sleep(seconds)
        update(self, outputs)

    Model._update_metrics = updated


if __name__ == "__main__":
    if os.environ.get("MS_ROLE") == "MS_SCHED":  # msrun's own process: it needs no MindFormers, and ends in init
        from mindspore.communication import init

        init()
    else:
        main(sys.argv[1])
