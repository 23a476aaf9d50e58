"""DeepSpeed's engine, ZeRO stages 1 to 3: each rank's files of a checkpoint, from memory and without a collective.

A rank's part of the state is what it would write itself in `engine.save_checkpoint`: its partition of the optimizer,
and on rank 0 (stage 3: on each rank) the model's states. Plain `engine.load_checkpoint` reads what is written here.
Imports nothing of DeepSpeed: whoever has an engine has imported it.
"""

from __future__ import annotations

from lastgasp.pytorch.deepspeed.captured import Captured, Head, capture, parse, restore
from lastgasp.pytorch.deepspeed.engine import (
    EngineOptimizer,
    engine_of,
    files_of,
    recovery_scripts,
    unsupported,
)

__all__ = [
    "Captured",
    "EngineOptimizer",
    "Head",
    "capture",
    "engine_of",
    "files_of",
    "parse",
    "recovery_scripts",
    "restore",
    "unsupported",
]
