"""What differs between two files that Megatron can load: `python compare.py ONE OTHER` prints a line for each.

A program of its own, because the files name classes of Megatron's, which only its own process can import.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Paths of unequal values, of missing and of superfluous keys."""
    if isinstance(one, Namespace) and isinstance(other, Namespace):
        one, other = vars(one), vars(other)
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys(), key=str):
            if key not in one or key not in other:
                yield f"{where}/{key}: only in {'the second' if key not in one else 'the first'}"
            else:
                yield from differences(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, f"{where}/{index}")
    elif not _same(one, other):
        yield f"{where}: {_brief(one)} and {_brief(other)}"


def _same(one: Any, other: Any) -> bool:
    import numpy as np
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and bool(np.array_equal(one, other))
    return type(one) is type(other) and bool(one == other)


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}{tuple(shape)}" if shape is not None else repr(value)[:60]


def main() -> None:
    """Load both as Megatron does."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from support.megatron import cpu

    cpu.apply()
    import torch

    one, other = (torch.load(path, map_location="cpu", weights_only=False) for path in sys.argv[1:3])
    for line in differences(one, other):
        print(line)


if __name__ == "__main__":
    main()
