"""`Session`, the one object of a custom training loop."""

from __future__ import annotations

import contextlib
import dis
import logging
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import length_hint
from types import FrameType, TracebackType
from typing import Any, ClassVar, Generic, TypedDict, TypeVar, Unpack

from lastgasp.config import GaspConfig, HangTimeout, Recovery, arena_of, asked_recovery, integer
from lastgasp.errors import ConfigError, UsageError
from lastgasp.pytorch.common_directory import common_directory
from lastgasp.pytorch.loop.carried_names import CarriedNames
from lastgasp.pytorch.loop.data_pass import DataPass
from lastgasp.pytorch.loop.drawn_ahead import DrawnAhead
from lastgasp.pytorch.loop.inexact import COUNTED, DREW
from lastgasp.pytorch.loop.numbering import NUMBERS, Promotions, number_of, numbered_anew
from lastgasp.pytorch.loop.run import Run
from lastgasp.pytorch.loop.state import TorchState
from lastgasp.startup_refusal import tell_launcher
from lastgasp.steps.settings import MarksConfig

log = logging.getLogger("lastgasp")

T = TypeVar("T")
_NAMES = 1.0
"""Seconds to wait at the end for what is told of the loop's names."""


class Options(TypedDict, total=False):
    """Settings with defaults; each except `every` and `max_steps` has an environment variable (`LASTGASP_KEEP`, ...).

    Attributes:
        every: steps between periodic checkpoints; 0 (default) makes none, so that only gasps are written.
        max_steps: `batches` and `epochs` end when so many steps are complete; default: they do not.
        keep: how many periodic checkpoints, and how many gasps, to keep; default 3.
        resume: "auto" (default) resumes from the newest checkpoint that verifies on all ranks; "never" ignores what
            existed before this job; a path starts from that checkpoint.
        hang_timeout: seconds without any progress after which ranks count as hung; "auto" (default) learns it.
        save_timeout: seconds that a save after a fault may take before another rank is tried; default 600.
        finish_timeout: seconds that a rank inside its update gets to finish it; default 10.
        sha256: also write SHA-256 digests into the manifests; default False.
        marks: what is marked in each step, for `lastgasp report`: True (default) for all but the collectives, False
            for nothing, or names out of step, forward, dataloader, save, comm ("all", "none").
        profiling_dir: where the marks' files go.
        profiling_limit_mb: MB that they may take; beyond it the oldest go; default 5000.
        recovery: inside of `lastgasp.pytorch.train`: how a fault may be answered without a restart. "auto" (default),
            "retry" (no rank is replaced), "replace" (no step is done again for an exception), "restart" (never), "save"
            (never, and the launcher does not restart the job either).
        arena: of a model sharded by fully_shard: which steps are copied into memory that outlives the rank. "auto"
            (default) takes each N-th step, so that copying costs 1 % at most; "every N"; "off". docs/sharded.md
    """

    every: int
    max_steps: int
    keep: int
    resume: str | os.PathLike[str]
    hang_timeout: HangTimeout
    save_timeout: float
    finish_timeout: float
    sha256: bool
    marks: bool | str
    profiling_dir: str | os.PathLike[str]
    profiling_limit_mb: int
    recovery: Recovery
    arena: str


class TwoSessions(UsageError):
    """A session is opened while another one is."""

    restart_helps = False


class Session:
    """Saves the current step when a rank dies, raises, hangs or is asked to stop; resumes from it.

        with Session.open("ckpts", state=TorchState(model, optimizer, scheduler)) as s:
            for epoch in s.epochs(90):
                for batch in s.batches(loader):
                    ...  # forward, backward, optimizer.step(), scheduler.step(), as before

    A step is one turn of the innermost loop over `batches` that changed parameters; it is complete when the loop asks
    for the next batch. docs/plain-loop.md says what a loop may do.

    All methods are for the training thread.
    """

    _now: ClassVar[weakref.ref[Session] | None] = None

    def __init__(self, run: Run, max_steps: int | None) -> None:
        """For `open`."""
        self._run, self._max = run, max_steps
        self._closed, self._restored, self._drew = False, b"", False
        self._ahead, self._carried = DrawnAhead(run), CarriedNames(self._tell_of_names)
        vars(self)["mark"] = run.engine.mark  # bypasses this class's method: a mark costs less than a call

    @classmethod
    def open(
        cls, dir: str | os.PathLike[str] | None = None, *, state: TorchState, **options: Unpack[Options]
    ) -> Session:
        """Connect, select the checkpoint to resume from, load it. All ranks call this, once their models are built.

        Args:
            dir: where checkpoints and incidents go, the same on all ranks; default `LASTGASP_DIR`.
            state: what is saved and restored.
            options: see `Options`.

        Raises:
            ConfigError: a value that is not allowed, a model whose shards cannot be saved, a directory that cannot be
                written.
            NoGoodCheckpoint: there are checkpoints, and none can be trusted.
            CheckpointMismatch: the checkpoint is of another model, optimizer or loop; nothing was loaded.
            ControlError: the controller refused this rank, or cannot be reached.
            UsageError: another session is open in this process.
        """
        tell_launcher()
        given: dict[str, Any] = dict(options)
        every = integer("every", given.pop("every", 0), 0, "Use 0 for gasps alone.")
        arena = arena_of(given.pop("arena", None))
        limit, asked = given.pop("max_steps", None), asked_recovery(given.pop("recovery", None))
        most = None if limit is None else integer("max_steps", limit, 1, "Leave it out for no limit.")
        marks = [given.pop(name, None) for name in ("marks", "profiling_dir", "profiling_limit_mb")]
        if not isinstance(state, TorchState):
            raise ConfigError("state", type(state).__name__, "a TorchState", "state=TorchState(model, optimizer, ...)")
        recovery: Recovery = asked or ("restart" if state.devices() else "auto")  # in place has not run on accelerators
        config = GaspConfig.resolve(dir, **given)
        other = cls._now() if cls._now is not None else None
        if other is not None and not other._closed:
            raise TwoSessions(f"another session is open in this process, in {other._run.config.directory}: one fault "
                              "would have to bring both to the same step. Leave its `with` block first, or give one "
                              "TorchState all models and optimizers")  # fmt: skip
        config = replace(config, directory=common_directory(config.directory))
        session = cls(Run(state, config, MarksConfig.resolve(*marks), every, (recovery, arena)), most)
        if (entry := session._run.entry) is not None:
            entry.end = lambda error: session.__exit__(type(error), error, None)
        cls._now = weakref.ref(session)
        return session

    # -- the position -------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._run.step

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, or begins with: `for epoch in range(s.epoch, 90)`, with one pass in each."""
        self._run.book.epochs_used = True
        return self._run.book.epoch

    @property
    def resumed(self) -> bool:
        """Whether a checkpoint was loaded."""
        return self._run.resumed is not None

    # -- the loop -----------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the remaining epochs, up to `count` of them since the job's first start.

        A resumed run begins with the epoch in which it was interrupted, also where only what follows its last batch
        is still to be done. Calls `set_epoch` of `TorchState.sampler`.
        """
        run = self._run
        epoch, interrupted = run.book.epoch, run.book.interrupted
        while True:
            self._check()
            if run.book.next_epoch(epoch):
                run.at_boundary()
            run.body_over()
            if epoch >= count or (self._finished() and not interrupted):
                return
            yield epoch
            epoch, interrupted = epoch + 1, False

    def batches(self, loader: Iterable[T], *, replay: bool = False) -> BatchIterable[T]:
        """`loader`, but each batch reports the position of the training, and a resumed run gets what is still due.

        Args:
            loader: a DataLoader or any iterable; if it can be iterated only once, a resumed run must pass an equal
                one.
            replay: a resumed run loads the consumed part of the pass again, and discards it. Makes random
                augmentation in the worker processes of a DataLoader exact; by default the consumed part is not loaded.
        """
        return BatchIterable(self, loader, replay)

    def enumerate(self, loader: Iterable[T], *, replay: bool = False) -> Numbered[T]:
        """`batches` with the number of the batch in its pass, which a resumed run continues."""
        return Numbered(self.batches(loader, replay=replay))

    def _finished(self) -> bool:
        return self._max is not None and self._run.step >= self._max

    def _look(self, run: Run) -> None:
        """A batch is asked for: whether the loop had drawn random numbers before the first one of a resumed pass."""
        if self._restored:
            self._drew, self._restored = run.recorder.snapshot_rng() != self._restored, b""
        elif self._drew and (run.book.by_hand or run.update.in_progress):
            self._drew = False
            if not run.book.by_hand:  # the step ends here, behind that, and not where the loop says
                run.engine.note(DREW)

    # -- by hand ------------------------------------------------------------------------------------------

    def updating(self) -> None:
        """Parameters are about to change. Needed only if no optimizer of `TorchState` changes them in its `step`.

        Raises:
            Released: a recovery took place; the update must not happen.
        """
        self._check()
        self._run.update.begin()

    def updated(self, step: int | None = None) -> bool:
        """A step is complete; for loops that do not use `batches`.

        Args:
            step: its number, greater than the previous one; default: the next one.

        Returns:
            Whether a step is complete: False if no parameters have changed since the previous one (a GradScaler
            skipped the update).

        Raises:
            UsageError: the number is not greater.
        """
        self._check()
        run = self._run
        if not run.update.in_progress:
            run.update.missing(run.step)
            return False
        number = run.step + 1 if step is None else step
        if number <= run.step:
            raise UsageError(f"updated(step={step}) goes backwards: step {run.step} is complete already")
        run.book.by_hand = True
        run.complete(number)
        self._look_at_names(sys._getframe().f_back)
        if not run.book.gave:
            run.unknown_loaders.step_over(run.state.extra.values(), run.step)
        self._ahead.step_over()
        return True

    def save(self) -> None:
        """Write a checkpoint of the step under way when it is complete, or of the last one; all ranks call it."""
        self._check()
        self._run.want_save()

    def mark(self, name: str) -> AbstractContextManager[None]:
        """A user-defined range in `lastgasp report`: `with s.mark("augment"):`."""
        return self._run.engine.mark(name)

    def alive(self) -> None:
        """Progress, for the hang watchdog, in work that neither trains nor evaluates a model of the state."""
        self._run.engine.progress("between")

    def _look_at_names(self, frame: FrameType | None) -> None:
        """Where the loop is: what it carries in names of its own is said, and a resume has lost it."""
        run = self._run
        if self._carried.looked:
            return
        self._carried.look(frame, [run.state.extra, *run.state.extra.values()], (run.step, run.book.epoch))

    def _tell_of_names(self, found: str) -> None:
        if self._run.resumed is not None:
            self._run.engine.note(found)
        elif self._run.rank == 0:
            log.info("%s", found)

    def _check(self) -> None:
        if self._closed:
            raise UsageError("this session is closed: use it inside its `with` block")

    # -- end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Training ended well. Idempotent; leaving the `with` block does it."""
        if not self._closed:
            self._carried.wait(_NAMES)
            self._run.body_over()
            self._run.life.finish()
            self._closed = True
            self._run.life.close(completed=True)

    def __enter__(self) -> Session:
        self._check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self.close()
            except BaseException as last:
                self._closed = True
                self._run.life.failed(last)
                raise
        elif not self._closed:
            self._closed = True
            self._carried.wait(_NAMES)
            self._run.life.failed(error)


class BatchIterable(Generic[T]):
    """What `Session.batches` returns; each iteration of it is a pass over the data."""

    def __init__(self, session: Session, loader: Iterable[T], replay: bool) -> None:
        self._session, self._loader, self._replay = session, loader, replay
        self._rest = -1

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"a {type(self._loader).__name__} has no length")
        return len(self._loader)

    def __iter__(self) -> BatchIterator[T]:
        session = self._session
        session._check()
        run = session._run
        if run.book.explicit and self._rest == run.book.epoch:
            run.engine.note(COUNTED)
        returning, since = run._returning, Promotions()
        one = run.begin_pass(self._loader, self._replay)
        if returning and not run._returning:
            session._restored = run.recorder.snapshot_rng()
        rest = one.resumed and one.consumed and one.parent is None and not one.over
        self._rest = run.book.epoch if rest else -1
        middle, start = one.resumed and one.consumed > 0, not run.book.gave and run.resumed is None
        looks = not one.over and (middle or start)
        return BatchIterator(session, one, since if looks else None)


class BatchIterator(Iterator[T]):
    """The iterator of one pass."""

    def __init__(self, session: Session, one: DataPass, since: Promotions | None) -> None:
        self._session, self._pass, self._since = session, one, since

    @property
    def number(self) -> int:
        """Number of the newest batch in its pass, from 0."""
        return self._pass.consumed - 1

    def __next__(self) -> T:
        self._session._check()
        run = self._session._run
        self._session._look(run)
        if self._since is not None:
            self._numbered(sys._getframe().f_back, self._since)
        self._session._look_at_names(sys._getframe().f_back)
        try:
            batch: T = run.next_batch(self._pass, self._session._finished)
        except StopIteration:
            run.unknown_loaders.pass_over(self, self._pass.loader)
            raise
        return batch

    def _numbered(self, frame: FrameType | None, since: Promotions) -> None:
        """Before the first batch: say it if the loop numbers its batches itself, and not as a resumed pass goes on."""
        self._since = None
        one, run = self._pass, self._session._run
        with contextlib.suppress(Exception):  # the user's loader, whose length may be anything
            number = number_of(self, frame, since)
            if number is None:
                return
            if not one.consumed:
                if run.rank == 0:
                    log.warning(NUMBERS)
            elif note := numbered_anew(number, one.consumed, length_hint(one.loader), self._session.step):
                run.engine.note(note)

    def __del__(self) -> None:
        """The iterator was dropped: after `break` or `return` the loop's body has ended, after an exception not."""
        one, session = self._pass, self._session
        one.broken = True
        if not (one.over or session._closed) and left_by_break(sys._getframe().f_back):
            session._run.pass_broken(one)


class Numbered(Generic[T]):
    """What `Session.enumerate` returns."""

    def __init__(self, batches: BatchIterable[T]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return _Pairs(iter(self._batches))


class _Pairs(Iterator[tuple[int, T]]):
    """Not a generator: `BatchIterator.__del__` looks at the frame that drops it."""

    def __init__(self, iterator: BatchIterator[T]) -> None:
        self._iterator = iterator

    def __next__(self) -> tuple[int, T]:
        batch = next(self._iterator)
        return self._iterator.number, batch


def left_by_break(frame: FrameType | None) -> bool:
    """Whether the frame is popping the iterator of a `for` loop that it leaves by `break` or `return`.

    An exception drops the iterator, too, but with the frame at the instruction that raised. A generator in between
    (tqdm is one) is destroyed with its iterator. If it cannot be determined (a variable holds the iterator), this is
    False, and the body counts as ended later: when the session is asked for the next pass or epoch.
    """
    if frame is None:  # the interpreter is ending
        return False
    code, at = frame.f_code.co_code, frame.f_lasti
    return 0 <= at < len(code) and dis.opname[code[at]] in ("POP_TOP", "POP_ITER")
