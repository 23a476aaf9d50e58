"""train_tiny.py as two nodes of one rank each; the numbers are those of two ranks on one node."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from support import train_tiny


def trainer_of_two_nodes(**options: Any) -> Trainer:
    """The same trainer, its two devices on two nodes."""
    return Trainer(**options | {"devices": 1, "num_nodes": 2})


if __name__ == "__main__":
    vars(train_tiny).update(Trainer=trainer_of_two_nodes)
    train_tiny.main()
