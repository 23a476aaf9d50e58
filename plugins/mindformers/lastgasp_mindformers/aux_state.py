"""The auxiliary state of a rank: random state, statistics that the forward pass changes, and the numbers of the step.

Captured at the end of each step, and again behind all callbacks, into a crash-safe buffer, which others on the host can
read after the rank was killed. Of the optimizer only single values are part of it (a learning rate, `global_step`),
since callbacks may change them before the next step; its weights and moments are read live at the gasp.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy
import xxhash

from lastgasp.adapter import CrashSafeBuffer

VERSION = 1
_ROOM = 1 << 14
_LARGEST = 1 << 20
"""Bytes; a larger parameter outside of the optimizer is a frozen weight, not a statistic (`frozen.Frozen`)."""
_ALWAYS, _IN_ALL = 1 << 20, 32 << 20
"""Bytes of the statistics, the smallest first: that are captured whether they change or not; of all that are."""
_WATCHED_STEPS = 3
"""Behind the first of them one beyond `_ALWAYS` must change, by the graph or a callback, to be captured any longer."""
RESET = ("accu_grads",)
"""Prefixes of parameters that are zero again at the end of each step."""
SCALE = "scale_sense"
"""The loss scale, by the name that each train network with loss scaling gives it."""
_SCALING = (SCALE, "current_iterator_step", "last_overflow_iterator_step")
"""The state of a dynamic loss scale: MindFormers saves all of it, and reads back only the scale."""


class Numbers(msgspec.Struct, frozen=True, array_like=True):
    """Where training stands, as MindSpore counts.

    Attributes:
        step: completed steps in all, over all restarts.
        epoch: number of the current one, from 1.
        within: the step in it, as CheckpointMonitor names files.
        loss_scale: as reported by the step; None if none is used, or the step reports none.
    """

    step: int
    epoch: int
    within: int
    loss_scale: float | None = None


class Statistic(msgspec.Struct, frozen=True, array_like=True):
    """One parameter that is not the optimizer's, such as a moving mean."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> Any:
        """As numpy has it; a copy."""
        return numpy.frombuffer(self.data, dtype=self.kind).reshape(self.shape).copy()


class AuxState(msgspec.Struct, frozen=True, array_like=True):
    """What one record of the crash-safe buffer holds."""

    version: int
    numbers: Numbers
    python: bytes
    numpy: tuple[str, bytes, int, int, float]
    generator: tuple[int, int]
    """Seed and offset of mindspore's default generator."""
    statistics: tuple[Statistic, ...] = ()
    data: str = ""
    """What the training data are (`data.described`); empty where that is not known."""
    epochs: int = 0
    """How many a plain training is to have in all."""
    still: bytes = b""
    """Digests of the statistics that are not captured any longer, since they do not change."""


_STATES = msgspec.msgpack.Decoder(AuxState)
_PYTHON = msgspec.msgpack.Decoder(tuple[int, tuple[int, ...], float | None])


@dataclass
class _Watched:
    name: str
    param: Any
    was: Statistic | None = None
    """As captured last."""
    changes: bool = False
    """It has changed since the first time."""

    def read(self) -> Statistic:
        """As it stands; the same object as long as it does not change."""
        array = self.param.asnumpy()
        if self.was is None or not _holds(self.was, array):
            self.changes = self.was is not None
            self.was = Statistic(self.name, array.dtype.str, array.shape, array.tobytes())
        return self.was


class AuxRecorder:
    """Captures the auxiliary state of this rank.

    Args:
        train_network: whose statistics count: all its small parameters that are not the optimizer's.

    Attributes:
        data: what the training data are, for people; set once that is known.
        epochs: how many the job is to train in all; 0 where that is not known.
        names: of the statistics, which may differ from rank to rank.
        frozen: by name, the parameters that are neither captured nor the optimizer's.
        still: by name, those of `names` that are not captured any longer, since they did not change in the first steps,
            and digests of them.
        accumulated: those that should be zero at the end of each step.
    """

    def __init__(self, train_network: Any) -> None:
        self.buffer = CrashSafeBuffer(_ROOM)
        self.data, self.epochs = "", 0
        statistics, values, others = _watched(train_network)
        self._watched = [*statistics, *values]
        self._droppable = frozenset(one.name for one in _beyond(statistics, _ALWAYS))
        self.still: dict[str, tuple[Any, bytes]] = {}
        self._still, self._steps = b"", 0
        self._captured: AuxState | None = None
        self.names = frozenset(watched.name for watched in statistics)
        self.accumulated = {one.name: one.param for one in others if one.name.startswith(RESET)}
        self.frozen = {one.name: one.param for one in others if one.name not in self.accumulated}

    def capture(self, numbers: Numbers, before: Callable[[bytes], None] = lambda data: None) -> None:
        """As of now. One thread at a time. `before`: gets it before anybody can read it."""
        self._drop(numbers)
        state = self._state(numbers)
        if state == self._captured:
            return  # the callbacks behind a step have changed and drawn nothing
        data = msgspec.msgpack.encode(state)
        if len(data) > self.buffer.capacity:
            self.buffer.grow(2 * len(data))
        before(data)
        self.buffer.begin(numbers.step, True)[: len(data)] = data
        self.buffer.end(len(data))
        self._captured = state

    def encoded(self, numbers: Numbers) -> bytes:
        """The auxiliary state as it stands."""
        return msgspec.msgpack.encode(self._state(numbers))

    def _drop(self, numbers: Numbers) -> None:
        """From now on the large ones that have not changed are read when they are saved, as frozen weights are."""
        if not self._droppable or self._captured is None or numbers.step == self._captured.numbers.step:
            return
        self._steps += 1
        watched = [one for one in self._watched if one.name in self._droppable]
        if self._steps == 2:
            for one in watched:
                one.changes = False  # in the first step MindSpore may have broadcast them
        if self._steps <= _WATCHED_STEPS:
            return
        for one in watched:
            now = one.read()
            if not one.changes:
                self._watched.remove(one)
                self.still[one.name] = one.param, xxhash.xxh3_128_digest(now.data)
        self._droppable, self._still = frozenset(), b"".join(digest for _, digest in self.still.values())

    def _state(self, numbers: Numbers) -> AuxState:
        kind, key, position, has_gauss, gauss = _numpy_state()
        return AuxState(
            version=VERSION,
            numbers=numbers,
            python=msgspec.msgpack.encode(random.getstate()),
            numpy=(str(kind), key.tobytes(), int(position), int(has_gauss), float(gauss)),
            generator=_generator(),
            statistics=tuple(watched.read() for watched in self._watched),
            data=self.data,
            epochs=self.epochs,
            still=self._still,
        )

    def restore_scaling(self, state: AuxState) -> None:
        """Restore the loss scale and its age from `state`, if it is dynamic in both."""
        told = {statistic.name: statistic for statistic in state.statistics if _is_scaling(statistic.name)}
        mine = {watched.name: watched.param for watched in self._watched if _is_scaling(watched.name)}
        if len(mine) < len(_SCALING) or told.keys() != mine.keys():
            return  # fixed here or there
        for name, param in mine.items():
            param.set_data(_as_it(param, told[name].array()))

    def put_back(self, step: int) -> list[str]:
        """Undo what callbacks have changed and drawn since `step` was captured; returns the parameters' names."""
        from mindspore import ops

        state = decode(self.read(step))
        restore_random(state)
        changed = [
            (watched.param, was)
            for watched, was in zip(self._watched, state.statistics, strict=True)
            if not _holds(was, watched.param.asnumpy())
        ]
        for param, was in changed:
            ops.assign(param, _as_it(param, was.array()))  # a compiled graph may not see `set_data`
        return [was.name for _, was in changed]

    def read(self, step: int) -> bytes:
        """The encoded state of `step`; empty if it is no longer known. From any thread."""
        return CrashSafeBuffer.read(self.buffer.fd, step) or b""

    def close(self) -> None:
        """Close the crash-safe buffer. Idempotent."""
        self.buffer.close()


def decode(data: bytes) -> AuxState:
    """What `AuxRecorder` has captured.

    Raises:
        ValueError: not an auxiliary state of a version that this code knows.
    """
    try:
        state = _STATES.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not an auxiliary state of MindSpore: {error}") from error
    if state.version != VERSION:
        raise ValueError(f"an auxiliary state of version {state.version}, expected {VERSION}")
    return state


def restore_random(state: AuxState) -> None:
    """Set this process's random state; the statistics are in the checkpoint."""
    version, internal, gauss = _PYTHON.decode(state.python)
    random.setstate((version, internal, gauss))
    kind, key, position, has_gauss, cached = state.numpy
    numpy.random.set_state((kind, numpy.frombuffer(key, dtype=numpy.uint32), position, has_gauss, cached))
    generator = _default_generator()
    seed, offset = state.generator
    generator._seed.set_data(_as_it(generator._seed, seed))
    generator._offset.set_data(_as_it(generator._offset, offset))


def loss_scale(numbers: Numbers, statistics: Mapping[str, Any]) -> float | None:
    """The loss scale after a step: from its captured statistics, else as reported by the step; None without one."""
    found = [value for name, value in statistics.items() if name.rpartition(".")[2] == SCALE]
    return float(found[0].reshape(-1)[0]) if len(found) == 1 else numbers.loss_scale


def reported_scale(outputs: Any) -> float | None:
    """The third output of a train network with loss scaling, as CheckpointMonitor takes it (mindformers.md §5).

    The network of a user may return something else there.
    """
    if not isinstance(outputs, tuple | list) or len(outputs) < 3:
        return None
    value = outputs[2]
    try:
        return float(value.asnumpy()) if hasattr(value, "asnumpy") else float(value)
    except (TypeError, ValueError):
        return None


def _numpy_state() -> tuple[Any, Any, Any, Any, Any]:
    state: Any = numpy.random.get_state()
    kind, key, position, has_gauss, gauss = state
    return kind, key, position, has_gauss, gauss


def _default_generator() -> Any:
    from mindspore.common import generator

    return generator.default_generator


def _generator() -> tuple[int, int]:
    generator = _default_generator()
    return int(generator._seed.asnumpy()), int(generator._offset.asnumpy())


def _as_it(like: Any, value: Any) -> Any:
    from mindspore import Tensor

    return Tensor(value, like.dtype).reshape(like.shape)


def _is_scaling(name: str) -> bool:
    return name.rpartition(".")[2] in _SCALING


def _watched(train_network: Any) -> tuple[tuple[_Watched, ...], tuple[_Watched, ...], tuple[_Watched, ...]]:
    """Statistics, single values of the optimizer, and what is neither captured nor the optimizer's."""
    from mindspore import nn

    optimizers = [cell for _, cell in train_network.cells_and_names() if isinstance(cell, nn.Optimizer)]
    weights = {id(param) for optimizer in optimizers for param in optimizer.parameters}
    theirs = {id(param) for optimizer in optimizers for param in optimizer.get_parameters()} - weights
    # Under their own names, as checkpoints have them, not under the path of cells that leads to them.
    named = {param.name: param for _, param in train_network.parameters_and_names()}
    every = [_Watched(name, param) for name, param in named.items() if id(param) not in weights]
    own = [one for one in every if id(one.param) not in theirs]
    values = tuple(one for one in every if id(one.param) in theirs and _size(one.param) == 1 and _counts(one))
    too_many = {one.name for one in _beyond(filter(_counts, own), _IN_ALL)}
    captured = tuple(one for one in own if _counts(one) and one.name not in too_many)
    return captured, values, tuple(one for one in own if not _counts(one) or one.name in too_many)


def _beyond(watched: Iterable[_Watched], room: int) -> list[_Watched]:
    """Those that the smaller ones leave no room for."""
    by_size = sorted(watched, key=lambda one: (_bytes(one.param), one.name))
    ends = itertools.accumulate(_bytes(one.param) for one in by_size)
    return [one for one, end in zip(by_size, ends, strict=True) if end > room]


def _size(param: Any) -> int:
    return int(numpy.prod(param.shape))


def _bytes(param: Any) -> int:
    return _size(param) * int(param.itemsize)


def _counts(watched: _Watched) -> bool:
    small = _bytes(watched.param) <= _LARGEST
    return small and not watched.name.startswith(RESET) and "BFloat16" not in str(watched.param.dtype)


def _holds(statistic: Statistic, array: Any) -> bool:
    """Whether these are its bytes, NaN or not."""
    if statistic.kind != array.dtype.str or tuple(statistic.shape) != array.shape:
        return False
    contiguous = array if array.flags.c_contiguous else array.copy()
    mine = numpy.frombuffer(statistic.data, numpy.uint8)
    return bool(numpy.array_equal(mine, contiguous.reshape(-1).view(numpy.uint8)))
