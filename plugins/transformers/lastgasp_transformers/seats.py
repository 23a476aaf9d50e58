"""Training with fewer ranks than the complete job has: who does whose part of a step, and with what.

Each rank of the complete job has a seat, the number that it began with. A seat has its shard of the data, as
accelerate cuts them, and random numbers of its own. A rank that is there does the micro-batches of one seat after
another, each as that seat's rank would: under its number, with its random state. So a step has the micro-batches of the
complete job, whoever does them, and all that Trainer counts stays; gradients differ by the order of their sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from lastgasp import adapter
from lastgasp.adapter import UsageError
from lastgasp.adapter import torch as shared
from lastgasp.adapter.torch import rng
from lastgasp_transformers.losses import Found, OfSeat, Own, found_in
from lastgasp_transformers.numbers import numbered
from lastgasp_transformers.script_alone import around_exchanges
from lastgasp_transformers.shares import filled

DRAWN = (
    "random numbers were drawn between steps, in a number that is not known (an evaluation that samples, a callback): "
    "those of the missing ranks go on without, so that they differ from those of a job without the fault"
)
NOT_TOGETHER = (
    "{what} within training_step, and all ranks must come to it equally often: where "
    "ranks are missing the others do more than one micro-batch each. Collect from all ranks in a callback, or leave "
    "out --min-ranks"
)
NOT_WEIGHED = (
    "training_step has made no backward pass by accelerator.backward, where a micro-batch gets its weight: such a "
    "training cannot go on with fewer ranks"
)
NOT_KNOWN = "where missing ranks stood in their data is not known: the job restarts with all of them"
_DRAWS = 16
"""Base seeds of data loaders that an evaluation draws, at most, to be found again."""


class Parts(list[Any]):
    """What the seats of this rank have of one micro-step of Trainer's, in their order."""


class Seat:
    """One that this rank has.

    Attributes:
        number: of the rank that it is of, in the complete job.
        data: where it stands in its shard.
        random: its random state, while it is not the process's own.
        buffers: of the model, as its micro-batches of the step so far have left them.
    """

    def __init__(self, number: int, data: shared.PrefetchedData) -> None:
        self.number, self.data, self.random = number, data, b""
        self.buffers: list[shared.BufferValue] = []


class Seats:
    """Those of one call of `Trainer.train`, where ranks are missing.

    Args:
        trainer: of this call.
        complete: ranks of the complete job.
        data: of the loader of this rank's first seat.
        session: the engine's.

    Attributes:
        shares: the seats of each rank.
        mine: this rank's.
        part: what a micro-batch counts of what it counts where DDP has all ranks.
    """

    def __init__(
        self, trainer: Any, place: adapter.Place, complete: int, data: shared.PrefetchedData, session: adapter.Session
    ) -> None:
        self._trainer, self._session = trainer, session
        self.complete, self.shares = complete, [[*one] for one in shared.owners(complete, place.world_size)]
        self.part = place.world_size / complete
        self._random = rng.RngRecorder([trainer.args.device])
        own = self.shares[place.rank]
        self.mine = [Seat(own[0], data)]
        self.mine += [Seat(number, shared.PrefetchedData(self._random)) for number in own[1:]]
        self._now, self._outside = self.mine[0], b""
        self._within = self._told = self._new_step = self._weighed = False
        self._positions: list[shared.PrefetchedPosition | None] = []
        self._before: tuple[Any, bool] = (0.0, False)

    @property
    def first(self) -> Seat:
        """The one whose random state the process has outside of micro-batches, as that seat's rank would."""
        return self.mine[0]

    def install(self, replace: Callable[[Any, str, Callable[..., Any]], object]) -> None:
        """Have Trainer go through them.

        Args:
            replace: puts a function around a method, until the end of this call of `train`.
        """
        for name in ("get_train_dataloader", "training_step", "compute_loss", "floating_point_ops",
                     "set_initial_training_values", "_get_num_items_in_batch",
                     "_track_num_input_tokens", "_save_rng_state"):  # fmt: skip
            replace(self._trainer, name, getattr(self, f"_around_{name.lstrip('_')}"))
        around_exchanges(replace, self._calls)

    # -- another seat -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _as(self, seat: Seat) -> Iterator[None]:
        """Be the rank of that seat: what is computed now is as it would compute it."""
        self._settle()
        self._outside = b""
        self._switch(seat)
        try:
            with numbered(seat.number, self.complete):
                yield
        finally:
            self._switch(self.first)
            self._outside = self._random.snapshot()

    def _switch(self, seat: Seat) -> None:
        if seat is self._now:
            return
        self._now.random = self._random.snapshot()
        rng.restore(rng.decode(seat.random), [self._trainer.args.device])
        self._now = seat

    def _settle(self) -> None:
        """What was drawn between micro-batches, the rank of each seat would have drawn."""
        others, before = self.mine[1:], self._outside
        if not others or not before or self._now is not self.first or (now := self._random.snapshot()) == before:
            return
        draws, self._outside = -1, now
        for seat in others:
            if seat.random == before:
                seat.random = now
                continue
            draws = _seeds_drawn(self._random, before, now) if draws < 0 else draws
            if draws:
                seat.random = _after_seeds(self._random, seat.random, draws)
            elif not self._told:
                self._told = True
                self._session.note(DRAWN)
        rng.restore(rng.decode(now), [self._trainer.args.device])

    # -- its data -----------------------------------------------------------------------------------------

    def _around_get_train_dataloader(self, original: Callable[[], Any]) -> Any:
        loaders = []
        for seat in self.mine:
            with numbered(seat.number, self.complete):  # before training begins: the random state is nobody's yet
                loaders.append(original())
        for seat, loader in zip(self.mine[1:], loaders[1:], strict=True):
            seat.data.inexact = self.first.data.inexact
            seat.data.follow(getattr(loader, "base_dataloader", None))
        return Loaders(self, loaders)

    def batches(self, loaders: Sequence[Any]) -> Iterator[Parts]:
        """One pass over the shards of this rank's seats."""
        passes, over = [iter(one) for one in loaders], object()
        while True:
            found = Parts()
            for seat, one in zip(self.mine, passes, strict=True):
                with self._as(seat):
                    found.append(next(one, over))
            if any(one is over for one in found):
                return
            yield found

    def _around_set_initial_training_values(self, original: Any, *args: Any, **options: Any) -> Any:
        with numbered(self.first.number, self.complete):
            return original(*args, **options)

    # -- a step -------------------------------------------------------------------------------------------

    def _around_get_num_items_in_batch(self, original: Any, samples: list[Any], device: Any) -> Any:
        """Of all micro-batches of the step together, or of each seat's where ranks count their own alone."""
        if not samples or not isinstance(samples[0], Parts):
            found = original(samples, device)  # of an evaluation: as of all ranks, whose number multiplies its loss
            several = found is not None and self._trainer.args.average_tokens_across_devices
            return found / self.part if several else found
        self._new_step = True
        if self._trainer.args.average_tokens_across_devices:
            return original([one for parts in samples for one in parts], device)
        return Parts(original([parts[n] for parts in samples], device) for n in range(len(self.mine)))

    def _around_training_step(self, original: Any, model: Any, inputs: Any, items: Any = None) -> Any:
        if not isinstance(inputs, Parts):
            return original(model, inputs, items)
        counts = items if isinstance(items, Parts) else [items] * len(inputs)
        self._begin_buffers()
        total: Any = 0.0
        for seat, batch, count in zip(self.mine, inputs, counts, strict=True):
            more = seat is not self.mine[-1]
            self._before, self._weighed = (total, more), False
            with self._as(seat), self._with_buffers(seat), self._alone(model, more):
                total = total + original(model, batch, count) * self.part
            if not self._weighed:
                raise UsageError(NOT_WEIGHED)
        self._before = 0.0, False
        shared.put_buffers_back(self.first.buffers)
        return total

    def _around_compute_loss(self, original: Any, *args: Any, **options: Any) -> Any:
        """In an evaluation, too, Trainer multiplies the loss of some models by the number of ranks."""
        with contextlib.nullcontext() if self._within else numbered(self.first.number, self.complete):
            return original(*args, **options)

    def weighed(self, loss: Any, before_backward: Callable[[Any], object]) -> Any:
        """A loss that is about to go backward, as what it counts of the step.

        Args:
            before_backward: is told all of this rank's, before the backward pass in which the ranks' gradients meet.
        """
        self._weighed, loss = True, loss * self.part
        before, more = self._before
        if not more:
            before_backward(before + loss)
        return loss

    @contextlib.contextmanager
    def _alone(self, model: Any, more: bool) -> Iterator[None]:
        self._within = True
        try:
            with self._trainer.accelerator.no_sync(model) if more else contextlib.nullcontext():
                yield
        finally:
            self._within = False

    def _calls(self, name: str) -> None:
        if self._within:
            raise UsageError(NOT_TOGETHER.format(what=f"torch.distributed.{name} was called"))

    def exchanged(self) -> None:
        """A micro-batch has exchanged something, whatever it has called for it.

        Raises:
            UsageError: that.
        """
        raise UsageError(NOT_TOGETHER.format(what="something was exchanged with other ranks"))

    def _begin_buffers(self) -> None:
        """Each seat begins the step with rank 0's, as with DDP, and goes on with those that it has left."""
        if not self._new_step:
            return
        self._new_step, model = False, self._trainer.model
        for buffer in model.buffers() if dist.get_world_size() > 1 else ():
            dist.broadcast(buffer.detach(), src=0)
        for seat in self.mine:
            seat.buffers = shared.buffer_values(model)

    @contextlib.contextmanager
    def _with_buffers(self, seat: Seat) -> Iterator[None]:
        if not seat.buffers:
            yield
            return
        shared.put_buffers_back(seat.buffers)
        yield
        seat.buffers = shared.buffer_values(self._trainer.model)

    def _around_floating_point_ops(self, original: Any, inputs: Any) -> Any:
        parts = inputs if isinstance(inputs, Parts) else [inputs]
        return sum(original(one) for one in parts)

    def _around_track_num_input_tokens(self, original: Any, inputs: Any) -> None:
        """All ranks exchange their numbers once, whatever the number of their micro-batches."""
        trainer = self._trainer
        if not isinstance(inputs, Parts) or trainer.args.include_num_input_tokens_seen == "no":
            original(inputs)
            return
        state, gather = trainer.state, trainer.accelerator.gather
        before = state.num_input_tokens_seen
        undo = adapter.replace_attribute(trainer.accelerator, "gather", lambda _: lambda number: number)
        try:
            for one in inputs:
                original(one)
        finally:
            undo()
        own = torch.tensor(state.num_input_tokens_seen - before, device=trainer.args.device, dtype=torch.int64)
        state.num_input_tokens_seen = before + int(gather(own).sum().item())

    # -- checkpoints --------------------------------------------------------------------------------------

    def _around_save_rng_state(self, original: Any, *args: Any) -> None:
        """One file for each seat."""
        for seat in self.mine:
            with self._as(seat):
                original(*args)

    def recorded(self, own: Own) -> Own:
        """With what this rank has of each seat."""
        self._settle()
        now = self._now
        own.seat, own.data = now.number, now.data.position
        own.others = {seat.number: OfSeat(seat.random, seat.data.position) for seat in self.mine if seat is not now}
        return own

    def complete_record(self, record: dict[str, Any]) -> None:
        """What was lost goes on as another's.

        Raises:
            UsageError: nothing is left of anybody.
        """
        if not any(record["small"].values()):
            raise UsageError(NOT_KNOWN)
        if (told := filled(record)) and self._session.place.rank == 0:
            self._session.note(told)

    def begin(self, record: dict[str, Any]) -> Found:
        """The process has the random state of its first seat: have those of the others. Returns what all have.

        Raises:
            UsageError: where a seat stood in its data is not known.
        """
        small = record["small"]
        found = [found_in(shared.extra_of(small[seat.number])) for seat in self.mine]
        if any(one.data is None or one.data.of_makers for one in found):
            raise UsageError(NOT_KNOWN)
        for seat in self.mine[1:]:
            seat.random = shared.random_of(small[seat.number])
        self._positions = [one.data for one in found]
        self._outside = self._random.snapshot()
        return Found(sum(one.loss for one in found) * self.part, sum(one.flos for one in found), found[0].data)

    def resume(self, batches: int, more: bool) -> None:
        """As `PrefetchedData.resume`, for the seats besides the first one."""
        for seat, position in zip(self.mine[1:], self._positions[1:], strict=True):
            assert position is not None
            seat.data.resume(position, batches, more)

    def agree(self, settings: list[Any]) -> None:
        """All ranks call it together: each seat is somebody's, and a step is the same step to all.

        Raises:
            UsageError: it is not; a script may compute something from the number of ranks.
        """
        own = msgspec.json.encode([self.complete, self.shares, settings])
        if any(one != own for one in self._session.gather("seats", own)):
            raise UsageError(
                "ranks were started with other settings, which the script may compute from their number: they cannot "
                "train with fewer ranks"
            )


class Loaders:
    """The shards of this rank's seats, as one loader. Whatever else is asked of it, the first seat's answers.

    Attributes:
        first: that one.
    """

    def __init__(self, seats: Seats, loaders: list[Any]) -> None:
        self._seats, self._loaders, self.first = seats, loaders, loaders[0]

    def __iter__(self) -> Iterator[Parts]:
        """Micro-steps."""
        return self._seats.batches(self._loaders)

    def __len__(self) -> int:
        """As many as the complete job has."""
        return len(self.first)

    def __getattr__(self, name: str) -> Any:
        if name == "first":  # a copy is being made
            raise AttributeError(name)
        return getattr(self.first, name)

    def set_epoch(self, epoch: int) -> None:
        """Of all."""
        for loader in self._loaders:
            loader.set_epoch(epoch)


def _seeds_drawn(random: rng.RngRecorder, before: bytes, now: bytes) -> int:
    """How many seeds of data loaders were drawn between two random states; 0 where it was something else."""
    rng.restore(rng.decode(before))
    for number in range(1, _DRAWS + 1):
        _draw_seed()
        if random.snapshot() == now:
            return number
    return 0


def _after_seeds(random: rng.RngRecorder, state: bytes, number: int) -> bytes:
    rng.restore(rng.decode(state))
    for _ in range(number):
        _draw_seed()
    return random.snapshot()


def _draw_seed() -> None:
    """As torch's DataLoader does for each pass."""
    torch.empty((), dtype=torch.int64).random_()
