"""`deepspeed_same.py A B`: names the files in which two checkpoints of DeepSpeed differ; needs DeepSpeed's classes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def main() -> None:
    """One line for each."""
    ours, theirs = map(Path, sys.argv[1:])
    for name in sorted({path.name for folder in (ours, theirs) for path in folder.iterdir()}):
        if not all((folder / name).exists() for folder in (ours, theirs)):
            print(name, "is missing")
        elif leaves(_read(ours / name)) != leaves(_read(theirs / name)):
            print(name)


def leaves(value: Any) -> Any:
    """Anything nested, comparable bit by bit; objects by what is in them."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), bytes(flat.numpy())
    if isinstance(value, dict):
        return {key: leaves(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [leaves(item) for item in value]
    return leaves(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else repr(value)


def _read(path: Path) -> Any:
    return torch.load(path, weights_only=False)


if __name__ == "__main__":
    main()
