"""The seams. Small protocols; each docstring is the contract.

Backends and adapters implement these; the flows call them. None has more than six methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Layout(Protocol):
    """Where the files of one framework's checkpoints lie.

    Called by `checkpoint` on any rank and by the CLI, in any order, never concurrently on one object.
    All methods are pure look-ups: after return nothing on disk has changed. A path that vanished during
    the call is left out, not raised.
    """

    name: str

    def discover(self, directory: Path) -> Iterable[Path]:
        """Every path in `directory` that looks like a checkpoint, finished or not, in any order.

        Temporaries and quarantined checkpoints are not among them.
        """

    def files(self, checkpoint: Path) -> Mapping[str, Path]:
        """The data files of `checkpoint`: POSIX path relative to the checkpoint's parent -> absolute path."""

    def manifest_path(self, checkpoint: Path) -> Path:
        """Where the manifest of `checkpoint` stands: beside it, never inside."""

    def step(self, checkpoint: Path) -> int | None:
        """The step that the name tells (completed optimizer updates), or None."""


class Gather(Protocol):
    """An all-gather of small byte strings among all ranks of a job, with a deadline.

    Called on every rank, in the same order, with the same tag. After return every rank holds the same
    list, indexed by rank. Raises DeadlineExceeded on every rank that is left when one does not answer.
    """

    def __call__(self, tag: str, payload: bytes) -> list[bytes]: ...


class StateSource(Protocol):
    """What an adapter tells the engine about the state that it would save.

    The engine calls from its own thread while the main thread is parked in a collective, behind the update
    gate, or has raised. None of the methods may enter a collective or take a lock that the main thread may
    hold.
    """

    @property
    def rank(self) -> int:
        """The global rank."""

    @property
    def box(self) -> int:
        """File descriptor of the black box that others on this host may open, or -1."""

    def capture(self, step: int) -> bytes:
        """The small state of this rank (random state, data position) as it stood at the end of `step`."""

    def save(self, step: int, small: Mapping[int, bytes], reason: str) -> SaveResult:
        """Write the state of `step` durably to temporary files; do not publish them.

        `small` maps each rank to its small state, where it could be had. May raise OSError (disk) or
        NotSaveable (the state is not that of `step`).
        """

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> None:
        """Make the saved checkpoint visible, atomically and durably, manifest last.

        Called on one saver, after all of them have saved; `parts` holds what each of them passed on.
        """

    def discard(self, result: SaveResult) -> None:
        """Remove the temporary files of a save that will not be published. Never raises."""


class SaveResult(Protocol):
    """What a save wrote."""

    @property
    def path(self) -> str:
        """Where the checkpoint will stand once published."""

    @property
    def nbytes(self) -> int:
        """Bytes written."""

    @property
    def first_byte_ns(self) -> int:
        """Wall-clock time of the first byte, ns since the epoch."""

    @property
    def part(self) -> bytes:
        """What the rank that publishes must know of this rank's files; opaque to the engine."""
