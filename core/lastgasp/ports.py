"""The ports: small protocols whose docstrings are the contracts.

Backends and adapters implement them, the flows call them. None has more than six methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lastgasp.arena import Arena


class StepLeft(RuntimeError):
    """`RecoveryBackend.step_completed`: the step is complete, and all ranks are to leave the training behind it."""


@runtime_checkable
class Layout(Protocol):
    """Where the files of one framework's checkpoints lie.

    Called by `checkpoint` on any rank and by the CLI, in any order, never concurrently on one object.
    All methods only read: nothing on disk changes. A path that vanishes during the call is left out and raises no
    error.
    """

    name: str

    def discover(self, directory: Path) -> Iterable[Path]:
        """Every path in `directory` that looks like a checkpoint, finished or not, in any order.

        Temporary and quarantined checkpoints are excluded.
        """

    def files(self, checkpoint: Path) -> Mapping[str, Path]:
        """The data files of `checkpoint`: POSIX path relative to the checkpoint's parent -> absolute path."""

    def parts(self, checkpoint: Path) -> list[Path]:
        """The existing paths of `checkpoint`, each movable by one rename: itself, or each of its scattered files."""

    def owns(self, checkpoint: Path, relative: str) -> bool:
        """Whether a path relative to the checkpoint's parent belongs to `checkpoint`, whether it exists or not.

        The checkpoint's own name does not if its files are scattered: no file has that name then.
        """

    def manifest_path(self, checkpoint: Path) -> Path:
        """The path of the manifest of `checkpoint`: beside it, never inside."""

    def step(self, checkpoint: Path) -> int | None:
        """The step in its name (completed optimizer updates), or None."""


class Gather(Protocol):
    """An all-gather of small byte strings among all ranks of a job, with a deadline.

    Called on every rank, in the same order, with the same tag. After return every rank holds the same
    list, indexed by rank. Raises DeadlineExceeded on all remaining ranks when one does not answer.
    """

    def __call__(self, tag: str, payload: bytes) -> list[bytes]: ...


class StateSource(Protocol):
    """The engine's access to the state that an adapter saves.

    The engine calls from its own thread while the main thread is stuck in a collective, waits at the update
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
        """Return the auxiliary state of this rank (random state, data position) at the end of `step`."""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> SaveResult:
        """Write the state of `step` durably to temporary files; do not publish them.

        `aux` maps ranks to their auxiliary states, as far as available. May raise OSError (disk) or
        NotSaveable (the state is not that of `step`).
        """

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str | None:
        """Make the saved checkpoint visible, atomically and durably, manifest last.

        Called on one saver, after all of them have saved; `parts` holds each saver's `SaveResult.part`. If ranks that
        were cut off have already committed this step in this attempt, their checkpoint is kept: a committed
        checkpoint is never replaced.

        Returns:
            A note for the incident, one line; None or "" if there is nothing to note.
        """

    def discard(self, result: SaveResult) -> None:
        """Remove the temporary files of a save that will not be published. Never raises."""


def own_source(source: StateSource) -> object:
    """Unwrap a deferred source (`inner`), to check what else the adapter's own source can do."""
    return getattr(source, "inner", source)


@runtime_checkable
class Contributor(Protocol):
    """What a StateSource can also have: its auxiliary state can be added to a checkpoint that others committed."""

    def contribute(self, step: int, path: str) -> str:
        """Store this rank's auxiliary state of `step` beside the checkpoint of that step at `path`.

        Called on a thread of the engine, in place of `save` and `publish`.

        Returns:
            A note for the incident, one line; empty if there was nothing to add.

        Raises:
            OSError: the disk refused.
        """


@runtime_checkable
class CarriesValues(Protocol):
    """What a StateSource can also have: more than its auxiliary state, given by live ranks alone, after a fault."""

    def values(self, step: int) -> bytes | None:
        """Return what belongs to this rank's state at the end of `step`; it reaches `save` behind the auxiliary state
        (`trailer.split_trailer`).

        Called often, and must not wait: None while it is being made.
        """


@dataclass(frozen=True)
class Wanted:
    """Which shards a rank is asked to write.

    Attributes:
        own: its own, from its live state.
        arenas: rank -> the payload of that rank's arena.
        common: the rank whose copy is saved of what all ranks have alike.
        verify: returns once the payloads are known to be what was copied, and raises where they are not. It goes on
            beside the caller, who unpickles nothing of them before it has called this. What is saved counts only if
            they were, whether it was called or not.
    """

    own: bool
    arenas: Mapping[int, memoryview]
    common: int
    verify: Callable[[], None] = lambda: None


@runtime_checkable
class ShardSource(Protocol):
    """What a StateSource can also have: shards that only one rank holds, and an arena for them."""

    @property
    def arena(self) -> Arena | None:
        """This rank's arena; None where it has none."""

    def save_shards(self, step: int, aux: Mapping[int, bytes], reason: str, wanted: Wanted) -> SaveResult:
        """As `StateSource.save`, for these shards.

        Called on each rank that writes any; the part of its result names what it wrote.
        """


@runtime_checkable
class SavesTogether(Protocol):
    """What a StateSource can also have: its savers write one checkpoint in collectives, so each must know the others.

    They are ordered to save at the same time, each on a thread of the engine. Where one of them is lost meanwhile the
    others are ordered again, with another one in its place; the first call must end with an error then.
    """

    @property
    def together(self) -> tuple[tuple[int, ...], ...]:
        """Groups of shards, by number in `Place.replicas`, whose savers this rank may save with. Read at begin."""

    def save_together(self, step: int, savers: tuple[tuple[int, ...], ...], reason: str) -> SaveResult:
        """As `StateSource.save`, which a rank without a controller is asked for. `savers`: of each group of `together`,
        one rank a shard; this rank takes part in those that name it."""


@runtime_checkable
class InPlace(Protocol):
    """What a StateSource can also have: its training can continue in the same process after a device fault.

    Only MindIO uses it (retry, recover), on its message thread, one call at a time, in this order: `stop`, `clean`,
    then `rebuild` if a rank was restarted, `repair` on the ranks that send and receive state, `rollback` on all. The
    training thread has left its step with an error or is stuck in it. Any exception ends the repair, and a dump or
    the end of the job follows.

    Attributes:
        from_files: all begin with a checkpoint of the step, which is written, by `StateSource.save` and `publish` as
            after a fault, before `rollback` is called on any rank that has a part in it. Otherwise what `rollback`
            keeps is what they begin with.
    """

    from_files: bool

    def stop(self) -> None:
        """Abort the device's work, so that the training thread leaves its collective with an error."""

    def clean(self, memory_error: bool) -> int:
        """Clear the device's state. Return 0: it is good, 1: it is not, 2: memory is good without a repair."""

    def rebuild(self, ranks: list[int]) -> None:
        """Rebuild the communication groups; `ranks` are those that were restarted."""

    def repair(self, step: int, pairs: Mapping[str, object], rebuild: bool) -> None:
        """Send or receive the state of `step`: `src`, `dst`, `type`, `repair_type`, `rank_list` as passed by MindIO."""

    def rollback(self, step: int) -> None:
        """Reset loop, data and scheduler to `step`; the training function is then entered again."""

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""


@runtime_checkable
class GoesOnWithFewer(InPlace, Protocol):
    """An InPlace whose training can continue with fewer ranks, and with all of them again (MindIO: elastic-training).

    `resize` is called after `stop` and `clean` in place of all others, on the ranks that are there; where missing ones
    are to be there again, after `takes_in`.
    """

    no_fewer: str
    """Why it cannot, in this training; empty if it can."""

    def takes_in(self, ranks: tuple[int, ...]) -> None:
        """These ranks, by the numbers of the complete job, have new processes: agree with them where all meet.

        Raises:
            NotSaveable: as `resize`.
        """

    def resize(self, incarnation: int, step: int, members: tuple[int, ...], gives: bool) -> None:
        """Keep `step`, which all of `members` begin with; the training function is then entered again.

        Args:
            incarnation: the number of the recovery, greater than that of any before.
            members: ranks, by the numbers so far, in the order of the new ones; -1 for a new process, which takes the
                step from one that is there.
            gives: this rank is one that gives its step to a new process.

        Raises:
            NotSaveable: it cannot; nothing has changed, and a dump can follow.
        """


def in_place_of(source: StateSource) -> InPlace | None:
    """What continues this source's training in the same process: the adapter's own source, or what it has set."""
    own = own_source(source)
    found = own if isinstance(own, InPlace) else getattr(source, "in_place", None)
    return found if isinstance(found, InPlace) else None


@dataclass(frozen=True)
class Repaired:
    """A fault was repaired, and the processes of all ranks that were not lost go on.

    Attributes:
        number: how often that has happened in this process, from 1.
        step: the completed step that all begin with.
        source, takers: this rank gives its state of that step to those ranks, or is one of them and takes it from that
            rank; -1 and empty for all others.
        lost: ranks that were lost and have new processes.
        members: the ranks that go on, in the order of their new numbers, where others are missing from now on, or with
            -1 for each that was missing and has a new process; then `source`, `takers` and `lost` go by the new
            numbers. Empty where all keep theirs.
    """

    number: int
    step: int
    source: int = -1
    takers: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    members: tuple[int, ...] = ()


@runtime_checkable
class Repairs(Protocol):
    """What a RecoveryBackend can also have: it repairs faults while processes go on (MindIO: retry and recover)."""

    def goes_on(self, kind: str, cause: str) -> Repaired | None:
        """Training ended with an exception on this rank (arguments as for `RecoveryBackend.fault`): wait for a repair.

        Called on the training thread in place of `fault`, which follows where the answer is None: then this rank does
        not go on. Otherwise the training is entered again, with `training_started` at its start.
        """

    def protect(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the training function, which is then entered again, with the same arguments, after each such repair.

        Called on the training thread, after `training_started`.
        """

    def regroup(self, replicas: tuple[tuple[int, ...], ...]) -> None:
        """The actual holders of each shard, where some ranks are not the replicas that they should be.

        Called on the training thread, before `training_started`.
        """

    def renumber(self, rank: int, world_size: int, replicas: tuple[tuple[int, ...], ...]) -> None:
        """The job goes on with other ranks (`Repaired.members`), among which this one has that number.

        Called on the training thread, before `training_started` of the next entry.
        """


class RecoveryBackend(Protocol):
    """Detects the loss of a rank, decides which step is saved and by which ranks, and has it saved.

    One per rank, made and held by the Session; the embedded engine is one, MindIO the other. They share the rank's
    `RankStatus` (`gasp.rank_status`), which the training thread writes and the backend closes and releases, and its
    StateSource, whose methods they call from threads of their own. All methods below are called on the training
    thread, in this order: `training_started` once; per step `before_update`, then `step_completed`; and one of
    `fault`, `goodbye` or nothing; `close` last.

    An ending is reported in `status.outcome`, and by calling what the Session passed for that, on any thread.
    """

    name: str
    grace: float
    """Seconds after an ending until the backend ends the process; inf if it does not."""

    def training_started(self) -> None:
        """Start protecting: training begins at `status.step`; the device is chosen and the process group is up.

        Called on every rank, on the main thread, and may wait for the other ranks. After return the death of this
        rank costs no step. Raises ConfigError or ControlError where that cannot be promised.
        """

    def before_update(self) -> None:
        """The parameters are about to change: only local work follows until `step_completed`.

        Waits during a recovery. Raises Released once it is over, or RuntimeError ("FORCE STOP") if the backend wants
        the training loop to end at once; the update must not happen then. A second call before
        `step_completed` is a further optimizer of the same step, and does nothing.
        """

    def step_completed(self, step: int) -> None:
        """`step` is complete and captured. A step may have had no update at all.

        Raises StepLeft, or what `before_update` may raise.
        """

    def fault(self, kind: str, cause: str) -> None:
        """Training ended with an exception on this rank (`events.FaultKind`, one line for people).

        Waits for the end of the recovery, for no longer than the save's limits. After return `status.outcome` is set.
        Never raises. With kind `peer` this rank's state is consistent, and it stays a holder.
        """

    def goodbye(self) -> None:
        """Training ended well: from now on this rank's end is not a fault. Idempotent; never raises."""

    def close(self) -> None:
        """Release threads and connections, in bounded time. Idempotent; never raises. Without a `goodbye` before it,
        the other ranks treat the end of this process as a fault."""


class SaveResult(Protocol):
    """What a save wrote."""

    @property
    def path(self) -> str:
        """The path that the checkpoint will have once it is published."""

    @property
    def nbytes(self) -> int:
        """Bytes written."""

    @property
    def first_byte_ns(self) -> int:
        """Wall-clock time of the first byte, ns since the epoch."""

    @property
    def part(self) -> bytes:
        """What the publishing rank must know about this rank's files; opaque to the engine."""
