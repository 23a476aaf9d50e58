"""train_tiny.py as two nodes of one rank each; the numbers are those of two ranks on one node."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Trainer, seed_everything

from support import train_tiny


def trainer_of_two_nodes(**options: Any) -> Trainer:
    """The same trainer, its two devices on two nodes."""
    return Trainer(**options | {"devices": 1, "num_nodes": 2})


def seed_by_rank(seed: int) -> int:
    """As train_tiny does by LOCAL_RANK, which is 0 on both nodes."""
    return seed_everything(seed + 1000 * int(os.environ["RANK"]))


if __name__ == "__main__":
    vars(train_tiny).update(Trainer=trainer_of_two_nodes, seed_everything=seed_by_rank)
    train_tiny.main()
