"""What keeping the user's values may cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Beyond any of them nothing is kept, with a reason.

    Attributes:
        entries: of containers and objects that are looked at in each step.
        nbytes: of tensors and arrays that are copied in each step.
        once: entries of long containers that are looked at once, when they are new.
        single: bytes of one tensor or array; a larger one is not copied but expected not to change.
        hashed: bytes of one such; a larger array is not looked at.
        long: entries from which a list or dict is expected to change at its end alone.
        share: of a step's time that looking may take; seconds: what it may always take.
        patience: steps in succession that may take longer.
    """

    entries: int = 20_000
    nbytes: int = 4 << 20
    once: int = 1_000_000
    single: int = 256 << 10
    hashed: int = 1 << 30
    long: int = 32
    share: float = 0.01
    seconds: float = 0.0005
    patience: int = 20


ONCE = Limits(entries=200_000, nbytes=64 << 20, single=16 << 20, long=1_000_000)
"""Where values are recorded before a training and not in each step: nearly all may change. A second at most."""


class TooMuch(Exception):
    """A limit was reached."""
