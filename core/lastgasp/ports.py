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

    def parts(self, checkpoint: Path) -> list[Path]:
        """What stands of `checkpoint`, as paths that one rename each moves: itself, or each of its scattered files."""

    def owns(self, checkpoint: Path, relative: str) -> bool:
        """Whether a path relative to the checkpoint's parent belongs to `checkpoint`, there or not.

        Its own name does not where its files are scattered: nothing has that name then.
        """

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
    def buffer_fd(self) -> int:
        """File descriptor of the crash-safe buffer that others on this host may open, or -1."""

    def capture(self, step: int) -> bytes:
        """The auxiliary state of this rank (random state, data position) as it stood at the end of `step`."""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> SaveResult:
        """Write the state of `step` durably to temporary files; do not publish them.

        `aux` maps each rank to its auxiliary state, where it could be had. May raise OSError (disk) or
        NotSaveable (the state is not that of `step`).
        """

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str | None:
        """Make the saved checkpoint visible, atomically and durably, manifest last.

        Called on one saver, after all of them have saved; `parts` holds what each of them passed on. Where ranks that
        were cut off have committed this step of this attempt before, theirs is kept: a committed checkpoint is never
        replaced.

        Returns:
            What people must know about it, one line for the incident; None or "" where there is nothing.
        """

    def discard(self, result: SaveResult) -> None:
        """Remove the temporary files of a save that will not be published. Never raises."""


def own_source(source: StateSource) -> object:
    """The adapter's own source, to ask what else it can do; of one that is filled in later (`inner`) what is in it."""
    return getattr(source, "inner", source)


@runtime_checkable
class Contributor(Protocol):
    """What a StateSource can also have: its auxiliary state can be added to a checkpoint that others committed."""

    def contribute(self, step: int, path: str) -> str:
        """Put this rank's auxiliary state of `step` beside the checkpoint at `path`, which is of that step.

        Called on a thread of the engine, in place of `save` and `publish`.

        Returns:
            What people must know about it, one line; empty where there is nothing to add.

        Raises:
            OSError: the disk refused.
        """


@runtime_checkable
class InPlace(Protocol):
    """What a StateSource has besides, where its training can go on in the same process after a fault of a device.

    Only MindIO asks for it (retry, recover), on its message thread, one call at a time, in this order: `stop`,
    `clean`, then `rebuild` where a rank was started anew, `repair` on the ranks that give and take state, `rollback`
    on all. The training thread has left its step with an error or is stuck in it. Any exception ends the attempt,
    and a dump or the end of the job follows.
    """

    def stop(self) -> None:
        """Abort what the device does, so that the training thread leaves its collective with an error."""

    def clean(self, memory_error: bool) -> int:
        """Clear what is left on the device. 0: it is good, 1: it is not, 2: memory is good without a repair."""

    def rebuild(self, ranks: list[int]) -> None:
        """Make the communication groups anew; `ranks` are those that were started anew."""

    def repair(self, step: int, pairs: Mapping[str, object], rebuild: bool) -> None:
        """Send or take the state of `step`: `src`, `dst`, `type`, `repair_type`, `rank_list` as MindIO gives them."""

    def rollback(self, step: int) -> None:
        """Put loop, data and scheduler back to `step`; the training function is entered again after that."""

    def synchronize(self) -> None:
        """Wait until the device has done what was queued."""


class RecoveryBackend(Protocol):
    """Who notices that a rank is lost, decides which step is saved and by whom, and has it saved.

    One per rank, made and held by the Session; the embedded engine is one, MindIO the other. They share the rank's
    `RankStatus` (`gasp.rank_status`), which the training thread writes and the backend closes and releases, and its
    StateSource, whose methods they call from threads of their own. All methods below are called on the training
    thread, in this order: `training_started` once; per step `before_update`, then `step_completed`; and one of
    `fault`, `goodbye` or nothing; `close` last.

    An ending is told in `status.outcome`, and by a call of what the Session gave for that, on any thread.
    """

    name: str
    grace: float
    """Seconds that a process has after an ending until the backend ends it; inf where it does not."""

    def training_started(self) -> None:
        """Training begins at `status.step`; the device is chosen and the process group is up.

        Called on every rank, on the main thread, and may wait for the other ranks. After return the death of this
        rank costs no step. Raises ConfigError or ControlError where that cannot be promised.
        """

    def before_update(self) -> None:
        """The next thing is a change of parameters: local work only, until `step_completed`.

        Waits while a recovery is on. Raises Released once it is over, or RuntimeError ("FORCE STOP") where the
        backend wants the training loop to be left at once; the update must not happen then. A second call before
        `step_completed` is a further optimizer of the same step, and does nothing.
        """

    def step_completed(self, step: int) -> None:
        """`step` is complete and captured. A step may have had no update at all."""

    def fault(self, kind: str, cause: str) -> None:
        """Training ended with an exception on this rank (`events.FaultKind`, one line for people).

        Waits for the end of the recovery, for no longer than the save's limits. After return `status.outcome` is set.
        Never raises. With kind `peer` this rank is whole, and stays a holder.
        """

    def goodbye(self) -> None:
        """Training ended well: from now on this rank's end is no fault. Idempotent; never raises."""

    def close(self) -> None:
        """Release threads and connections, in bounded time. Idempotent; never raises; without `goodbye` before it,
        the others take what follows for what it is: the end of a process."""


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
