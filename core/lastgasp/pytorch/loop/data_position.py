"""Passes over data: the loop's position in them, and how a resumed loop returns to it.

A *pass* is one iteration of a loader by `session.batches`. The position of a rank is its epoch and, for each pass of
this epoch that counts, how many batches it has given. A completed earlier pass of the epoch gives nothing when the
epoch is run again; one whose loop body contains the later pass (nested loops) gives its current batch once more.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from lastgasp.errors import CheckpointError, UsageError
from lastgasp.pytorch import rng
from lastgasp.pytorch.loop import other_workers
from lastgasp.pytorch.loop.data_pass import DataPass, weakly
from lastgasp.pytorch.loop.position_record import Fixed, Position, Row, decode, encode, started
from lastgasp.pytorch.position import (
    DESCRIBED,
    MAP,
    STATEFUL,
    PassStart,
    is_compared,
    iterate,
    position_of,
    untrack_sampler,
)
from lastgasp.pytorch.position.skipping import SkipProgress

log = logging.getLogger("lastgasp")


class DataPosition:
    """All passes of a run.

    Args:
        recorder: captures random state.
        sampler: the user's, from `TorchState`.

    Attributes:
        by_hand: the loop itself reports where its steps end; completed passes are then not part of the position.
        epochs_used: the loop uses the number of the epoch, or its sampler does.
    """

    def __init__(self, recorder: rng.RngRecorder, sampler: Any) -> None:
        self._recorder, self._sampler = recorder, sampler
        self.epoch, self.explicit, self.by_hand = 0, False, False
        self.epochs_used = hasattr(sampler, "set_epoch")
        self._done = 0
        self._passes: list[DataPass] = []
        self._begun = False
        self._tracked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._live: dict[int, tuple[Callable[[], Any] | None, bytes]] = {}
        self._pending: tuple[Position, list[Fixed]] | None = None
        self._static, self._dirty = b"\x90", True
        self._fetches, self._epochs, self._ranks = 0, False, (1, 1)

    # -- position -----------------------------------------------------------------------------------------

    def record(self, stale: bool = False, extra: bytes = b"") -> bytes:
        """The encoded position at the end of a step: the body of the innermost pass is over.

        Args:
            stale, extra: see `Position`.
        """
        innermost = next((p for p in reversed(self._passes) if not (p.over or p.set_aside)), None)
        asking = next((p for p in reversed(self._passes) if p.asking), innermost)
        outer = _parents(asking)
        counted = [p for p in self._passes
                   if not p.set_aside and asking not in _parents(p) and not (p.over and self.by_hand)]  # fmt: skip
        while innermost is not None and counted and counted[-1].over:  # it began and ended while that one goes on
            counted.pop()
        if self._dirty or counted != self._passes or any(p.position.changed for p in counted):
            self._static = msgspec.msgpack.encode([p.fixed() for p in counted])
            self._dirty = counted != self._passes
        rows = [Row(kind=p.kind, consumed=p.consumed, outer=p in outer, over=p.over, state=p.state(),
                    ahead=b"" if p in outer else p.ahead()) for p in counted]  # fmt: skip
        own = Position(
            epoch=self.epoch,
            done=0 if self.by_hand else self._done,
            explicit=self.explicit,
            rows=rows,
            stale=stale,
            extra=extra,
            ends={number: state for number, (_, state) in self._live.items() if state},
        )
        return encode(own, self._static)

    def resume(self, data: bytes, epoch: int, ranks: tuple[int, int] = (1, 1)) -> None:
        """Begin at the position in `data`, or with `epoch` if that is empty; `ranks`: as `DataPass.ranks`."""
        self._ranks = ranks
        self._pending = decode(data) if data else (Position(epoch=epoch), [])
        self.epoch, self.explicit = self._pending[0].epoch, self._pending[0].explicit
        self._live = {number: (None, state) for number, state in self._pending[0].ends.items()}

    @property
    def gave(self) -> bool:
        """A pass has given a batch in this run."""
        return self._fetches > 0

    @property
    def nowhere(self) -> bool:
        """A resumed run has no position in any data to return to."""
        pending = self._pending
        return pending is not None and not (pending[0].rows or pending[0].done or pending[0].explicit)

    @property
    def interrupted(self) -> bool:
        """A resumed run has not reached its position yet, in the middle or at the end of an epoch of `next_epoch`."""
        pending = self._pending
        return pending is not None and pending[0].explicit and bool(pending[0].rows or pending[0].done)

    def forget(self) -> bool:
        """A resumed run will not return to its position. Returns whether that was in the middle of a pass."""
        pending, self._pending = self._pending, None
        return pending is not None and any(not row.over for row in pending[0].rows)

    # -- epochs -------------------------------------------------------------------------------------------

    def next_epoch(self, epoch: int) -> bool:
        """`session.epochs` moves on to `epoch`; whether a resumed run is now where it was."""
        other_workers.epoch_begins()
        self.explicit, self.epoch = True, epoch
        alive = [one for one in self._passes if not (one.over or one.broken)]
        self._clear()
        for one in alive:
            one.set_aside, one.parent = not one.persists, None
        self._passes, self._epochs = alive, True
        pending = self._pending
        if pending is None or not pending[0].explicit or pending[0].rows or pending[0].done:
            return False
        self._pending = None
        return True

    def _clear(self) -> None:
        self._passes, self._done, self._dirty = [], 0, True

    # -- passes -------------------------------------------------------------------------------------------

    def before_begin(self) -> bool:
        """A pass is about to begin.

        Returns:
            Whether everything before it is completed, so that the position is the beginning of this pass.
        """
        for one in self._passes:
            if one.broken:
                self.end(one)
        if self.explicit or not self._begun or not all(one.over for one in self._passes) or self._awaits():
            return False
        self.epoch += 1
        self._clear()
        return True

    def nested(self) -> bool:
        """Whether the loop is in the body of a pass."""
        return any(one.in_body for one in self._passes)

    def begin(self, loader: Any, replay: bool = False) -> tuple[DataPass, bool]:
        """A pass begins, after `before_begin`.

        Args:
            replay: a resumed run loads the consumed part again, for the random numbers of its worker processes.

        Returns:
            The pass, and whether a resumed run is now where it was.

        Raises:
            UsageError: it is nested in a pass over a loader that cannot give a batch again.
        """
        self._begun = True
        parent = next((p for p in reversed(self._passes) if p.in_body), None)
        if self._pending is not None and parent is not None and not parent.outer:
            parent = None  # this one did not begin in its body in the earlier run
        before = self._beside(loader, parent)
        parent = None if before is not None else parent
        if parent is not None:
            if parent.kind == STATEFUL:
                raise UsageError("a loop over s.batches() inside the body of another one whose loader has a state of "
                                 "its own (state_dict): iterate the outer one without s.batches()")  # fmt: skip
            parent.again = parent.fetch
        one = DataPass(loader, position_of(loader, self._recorder, replay), parent)
        one.persists = not self._epochs or any(p.persists and p.loader is loader for p in self._passes)
        number = self._place(one, before)
        self._dirty = True
        if one.kind == MAP:
            self._tracked[id(loader)] = loader
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        self._count(one, number)
        if self._pending is not None and before is None:
            return one, self._begin_resumed(one, number, *self._pending)
        self._begin_anew(one)
        return one, False

    def _awaits(self) -> bool:
        """A resumed run has not begun all the passes yet that went on beside each other."""
        if self._pending is None:
            return False
        position = self._pending[0]
        begun = self._done + len(self._passes) - position.done
        return any(not row.over for row in position.rows[max(0, begun) :])

    def _beside(self, loader: Any, parent: DataPass | None) -> DataPass | None:
        """The pass over `loader` that has ended while another one, or an epoch, goes on, and that the new one replaces.

        Loops that draw from two loaders in each step begin the shorter one again, which is no loop inside of another.
        """
        ended = next((p for p in self._passes if p.loader is loader and p.over), None)
        if ended is None or (self._awaits() and ended.first != -2) or (self.explicit and ended.persists):
            return ended
        if parent is None and all(p.over for p in self._passes):
            return None
        return ended if parent is None or (ended.parent is not parent and ended.last > parent.first) else None

    def _place(self, one: DataPass, before: DataPass | None) -> int:
        """Put a pass where it belongs, in the place of `before` if there is such a one. Returns its number."""
        self._passes = [p for p in self._passes if not (p.set_aside and p.parent is one.parent)]
        if before is not None:
            at = self._passes.index(before)
            self._passes[at], one.first = one, before.first
            return self._done + at
        while self._passes and self._passes[0].over and all(p.over for p in self._passes):
            self._passes.pop(0)
            self._done += 1
        self._passes.append(one)
        return self._done + len(self._passes) - 1

    def _count(self, one: DataPass, number: int) -> None:
        """Let a loader know the passes of the earlier run, unless it has begun one in this run."""
        known, state = self._live.get(number, (_nothing, b""))
        if known is None:
            used = any(other is not None and other() is one.loader for other, _ in self._live.values())
            if state and not used and not self._continues(number):
                one.position.resume(PassStart(), state, 0, over=True)
            self._live[number] = weakly(one.loader), state

    def _continues(self, number: int) -> bool:
        """The checkpoint was taken in the middle of the pass that begins now."""
        position = self._pending[0] if self._pending is not None else Position()
        at = number - position.done
        return 0 <= at < len(position.rows) and not position.rows[at].over

    def _begin_resumed(self, one: DataPass, number: int, position: Position, fixed: list[Fixed]) -> bool:
        last = position.done + len(position.rows) - 1
        if number < position.done:
            one.over, one.first, one.last = True, -2, -2
        elif number <= last:
            self._again(one, position.rows[number - position.done], fixed[number - position.done])
        if number < last:
            return False
        self._pending = None
        if number > last:  # the position is the beginning of this pass
            self._begin_anew(one)
        return True

    def _begin_anew(self, one: DataPass) -> None:
        if one.over:
            return
        if self._sampler is not None and hasattr(self._sampler, "load_state_dict"):
            one.sampler = pickle.dumps(self._sampler.state_dict())
        one.position.begin()
        one.inner = iterate(one.loader)

    def _again(self, one: DataPass, row: Row, fixed: Fixed) -> None:
        """Move to the position in `row`."""
        if row.kind != one.kind:
            raise CheckpointError(
                f"the checkpoint was saved in a pass over {DESCRIBED.get(row.kind, row.kind)}, and this run passes "
                f"over {DESCRIBED.get(one.kind, one.kind)} there: where it stood in the data cannot be found. Give "
                "the loaders that were used before, in the same order."
            )
        one.consumed, one.over, one.sampler, one.again = row.consumed - row.outer, row.over, fixed.sampler, fixed.fetch
        one.first, one.outer = -2 if one.over else -1, row.outer
        one.last = one.first
        if one.over:
            return
        if fixed.sampler:
            self._sampler.load_state_dict(pickle.loads(fixed.sampler))
        # the state is that after the newest batch, which an outer pass gives a second time
        one.resumed, one.loaded, one.ranks = True, b"" if row.outer else row.state, self._ranks
        due = one.position.resume(started(fixed), one.loaded, one.consumed)
        one.empty = due is None
        one.inner = iter(()) if one.empty else iterate(one.loader)
        self._throw_away(one, due or 0, row.ahead)
        one.position.settle(one.in_turn)
        one.fetch, one.in_turn = row.ahead, one.in_turn and not row.ahead
        if row.outer and fixed.fetch:
            rng.restore(rng.decode(fixed.fetch))

    def _throw_away(self, one: DataPass, count: int, ahead: bytes) -> None:
        assert one.inner is not None
        if count:
            one.position.first()
        with SkipProgress(count, self._recorder) as progress:
            for done in progress:
                if ahead and done == count - 1:
                    rng.restore(rng.decode(ahead))
                batch = next(one.inner, _END)
                if batch is _END:
                    log.warning(
                        "the data are shorter than before: %d batches were trained on in this pass, and the loader "
                        "ended after %d. Has the data set changed?",
                        count,
                        done,
                    )
                    break
                if is_compared(done + 1):
                    one.position.seen(batch, done + 1)
        one.in_turn = progress.in_turn

    def ask(self, one: DataPass) -> bool:
        """The loop asks this pass for a batch: its body has ended, and with it every pass that began inside.

        Returns:
            Whether it goes on although it had seemed to be inside of what has gone on before: the position that was
            recorded last lacks it.
        """
        one.asking, late = True, one.set_aside and (one.parent is not None or not one.persists)
        if one.set_aside:
            one.persists = one.persists or one.parent is None
            one.set_aside, one.parent, self._dirty = False, None, True
            if one not in self._passes:
                self._passes.append(one)
        if self._passes[-1:] != [one] and any(p.parent is one and not p.set_aside for p in self._passes):
            for each in self._passes:
                each.set_aside = each.set_aside or (each.parent is one and not (each.over or each.broken))
            self._passes = [p for p in self._passes if p.set_aside or one not in _parents(p)]
            one.again, self._dirty = b"", True
        return late

    def fetch(self, one: DataPass) -> Any:
        """The next batch.

        Raises:
            StopIteration: there is none.
        """
        if one.over or one.inner is None:
            raise StopIteration
        one.fetch = self._recorder.snapshot()
        if not one.consumed:
            one.position.first()
        one.loaded = one.loaded if one.empty else b""
        try:
            batch = next(one.inner)
        except StopIteration:
            self.end(one)
            raise
        one.consumed += 1
        if is_compared(one.consumed):
            one.position.seen(batch, one.consumed)
        self._fetches += 1
        one.first, one.last = one.first or self._fetches, self._fetches
        return batch

    def end(self, one: DataPass) -> None:
        """A pass is exhausted, or was broken off. Idempotent."""
        if one.over:
            return
        one.over = True
        if one.position.live and one in self._passes:
            state = one.loaded or one.position.state()
            if one.resumed:  # some loaders would continue with what they were given, if they have not given all of it
                one.position.resume(one.position.start, state, one.consumed, over=True)
            number = self._done + self._passes.index(one)
            known, _ = self._live.get(number, (None, b""))
            # a loop that creates its loader for each pass begins each of them without a state
            again = number not in self._live or (known is not None and known() is one.loader)
            self._live[number] = weakly(one.loader), state if again else b""

    def close(self) -> None:
        """Remove everything from the loaders. Idempotent."""
        for loader in list(self._tracked.values()):
            untrack_sampler(loader)
        self._tracked.clear()
        self._live.clear()
        for one in self._passes:
            one.inner = None  # this also ends the loader's worker processes


_END = object()


def _nothing() -> None:
    """No loader."""


def _parents(one: DataPass | None) -> list[DataPass]:
    found = []
    while one is not None and one.parent is not None:
        one = one.parent
        found.append(one)
    return found
