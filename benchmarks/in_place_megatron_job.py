"""The GPT of the Megatron tests behind a gate: faults come once the warm process is ready (`train_gpt.HOLD_AT`).

Each rank writes the wall time of each completed iteration to `steps-RANK` in `TIMES_DIR`.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
gc.disable()  # until everything is imported: a third of the time of a start
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
from support.megatron import cpu  # noqa: E402

cpu.apply()

from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import get_args, pretrain, training  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

from support.megatron import train_gpt  # noqa: E402

gc.freeze()
gc.enable()


def noted(train_step: Any, times: int) -> Any:
    """`train_step`, whose returns are noted."""

    def step(*args: Any, **options: Any) -> Any:
        done = train_step(*args, **options)
        os.write(times, f"{time.time_ns()} {get_args().curr_iteration + 1}\n".encode())
        return done

    return step


def main() -> None:
    """As `train_gpt.py`."""
    path = Path(os.environ["TIMES_DIR"]) / f"steps-{os.environ['RANK']}"
    training.train_step = noted(training.train_step, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644))
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, train_gpt.datasets, ModelType.encoder_or_decoder, train_gpt.forward_step)


if __name__ == "__main__":
    main()
