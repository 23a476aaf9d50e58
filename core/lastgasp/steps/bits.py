"""The five kinds of marks that can be switched one by one, and their names in each place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

STEP, FORWARD, DATALOADER, SAVE, COMM = 1, 2, 4, 8, 16
ALL = STEP | FORWARD | DATALOADER | SAVE | COMM
DEFAULT_ON = ALL & ~COMM
"""Everything except the collectives; the default of a job."""

SHORT: Mapping[str, int] = {"step": STEP, "forward": FORWARD, "dataloader": DATALOADER, "save": SAVE, "comm": COMM}
"""Names on the command line and in tables."""

TASKD: Mapping[str, int] = {
    "CommunicationOperator": COMM,
    "Step": STEP,
    "SaveCheckpoint": SAVE,
    "FP": FORWARD,
    "DataLoader": DATALOADER,
}
"""Keys of TaskD's switch file, in its order (docs/facts/taskd.md §6)."""

BIT_OF_MARK: Mapping[str, int] = {
    "step": STEP,
    "forward": FORWARD,
    "backward": FORWARD,
    "optimizer": FORWARD,
    "dataloader": DATALOADER,
    "save_checkpoint": SAVE,
}
"""Which bit switches a mark of the domain `default`; a user-defined name is switched with STEP."""


def describe(mask: int) -> str:
    """`step forward`, in the order of `SHORT`; `none` when all are off."""
    return " ".join(name for name, bit in SHORT.items() if mask & bit) or "none"


def mask_of(names: Iterable[str]) -> int:
    """The bits of short names.

    Raises:
        KeyError: an unknown name.
    """
    mask = 0
    for name in names:
        mask |= SHORT[name]
    return mask
