"""A tiny LLaMA through the real MindFormers Trainer: what a user's script does, on a CPU.

`python train_llama.py YAML`. No line of lastgasp stands here; `LOSSES_DIR` has each rank write its exact losses.
"""

from __future__ import annotations

import os
import sys


def main(yaml: str) -> None:
    """Train as the YAML says."""
    from mindformers import MindFormerConfig, Trainer
    from mindformers.core.context import build_context

    from support.mindspore import cpu
    from support.mindspore.losses import Losses

    cpu.apply()
    config = MindFormerConfig(yaml)
    build_context(config)
    getattr(Trainer(args=config, task="text_generation", callbacks=[Losses()]), config.run_mode)()


if __name__ == "__main__":
    if os.environ.get("MS_ROLE") == "MS_SCHED":  # msrun's own process: it needs no MindFormers, and ends in init
        from mindspore.communication import init

        init()
    else:
        main(sys.argv[1])
