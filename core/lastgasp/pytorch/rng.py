"""Random state of a process: Python, numpy, torch and accelerators, captured into raw memory in microseconds.

`random.getstate` costs 8.5 us and `numpy.random.get_state` 32 us (docs/facts/limits.md §8), too much for every step.
Both keep a Mersenne Twister in a C struct; this module copies the struct's memory. At start each address is
checked against the official getter; where they differ (another Python or numpy), the getter is used instead.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lastgasp.pytorch.compiled import compiled

_WORDS = 624
_ENGINE_HEAD, _GENERATOR_ROOM = 20, 4096
"""Bytes before the words in `at::mt19937`; bytes of a generator in which they are looked for."""
_TWISTER = 4 + 4 * _WORDS
# int64: version, numpy kind, length of the numpy section, bytes of torch state, accelerators,
# bytes of one accelerator state, Python has gauss_next, numpy has gauss; float64: the two of them
_HEAD = struct.Struct("<8q2d")
_VERSION = 1
_NUMPY_RAW, _NUMPY_PICKLED = 0, 1
_PYTHON, _NUMPY, _TORCH = 1, 2, 4  # as _copies.c has them
_ALL = _PYTHON | _NUMPY | _TORCH
_PYTHON_AT = 80
_NUMPY_AT = _PYTHON_AT + 2504
_NUMPY_ROOM = 4096
_TORCH_AT = _NUMPY_AT + _NUMPY_ROOM


@dataclass(frozen=True)
class RngState:
    """Random state of one process: what the four getters would have returned."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: dict[str, Any]
    torch: bytes
    accelerators: tuple[bytes, ...] = ()


class _Slot:
    """Where one capture goes: addresses and views into memory that the caller keeps alive."""

    fast: Callable[[], int] | None = None
    """Captures all but accelerators in C; returns the bits of what it could not."""

    def __init__(self, view: memoryview, torch_bytes: int) -> None:
        self.view = view
        self.ints = view[:64].cast("q")
        self.floats = view[64:80].cast("d")
        self.python = view[_PYTHON_AT : _PYTHON_AT + _TWISTER]
        self.numpy = view[_NUMPY_AT : _NUMPY_AT + _TWISTER]
        self.torch = torch.frombuffer(view, dtype=torch.uint8, count=torch_bytes, offset=_TORCH_AT)


class RngRecorder:
    """Captures the random state of this process into memory given by the caller.

    Args:
        devices: accelerators whose generators count; CPU is always captured.

    Attributes:
        used: generators of the user's objects that this run has used, by id: `position.generators` looks after them.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._devices = [d for d in devices if d.type != "cpu"]
        self._torch_bytes = torch.get_rng_state().numel()
        states = [_accelerator_state(d) for d in self._devices]
        self._accelerator_bytes = len(states[0]) if states else 0
        self.size = _align(_TORCH_AT + self._torch_bytes + self._accelerator_bytes * len(states))
        self._python_memory = _python_memory()
        self._torch_state = torch.default_generator.get_state
        self._numpy = _NumpyAddresses()
        self._own: _Slot | None = None
        self.used: dict[int, Any] = {}

    @property
    def fast(self) -> tuple[bool, bool]:
        """Whether Python's and numpy's state are copied from memory, rather than asked for."""
        return self._python_memory is not None, self._numpy.memory is not None

    def bind(self, view: memoryview) -> _Slot:
        """Prepare `view` (writable, at least `size` bytes, aligned to 8) as a target of `capture`."""
        if len(view) < self.size:
            raise ValueError(f"the view holds {len(view)} bytes, a random state needs {self.size}")
        slot = _Slot(view[: self.size], self._torch_bytes)
        slot.ints[0] = _VERSION
        slot.ints[3] = self._torch_bytes
        slot.ints[4] = len(self._devices)
        slot.ints[5] = self._accelerator_bytes
        slot.fast = self._compiled(slot.view)
        return slot

    def _compiled(self, view: memoryview) -> Callable[[], int] | None:
        copies = compiled()
        if copies is None:
            return None
        numpy = self._numpy
        fast: Callable[[], int] = copies.Random(
            view, random._inst, _address(self._python_memory), numpy.owner, numpy.generator,
            _address(numpy.memory), *numpy.gauss_addresses(), self._torch_state, self._torch_bytes, _torch_engine(),
        ).capture  # fmt: skip
        return fast

    def capture(self, slot: _Slot) -> None:
        """Write the random state as it stands into `slot`. About 2 us, 5 without C; no generator is advanced."""
        missing = _ALL if slot.fast is None else slot.fast()
        if missing:
            self._capture_slowly(slot, missing)
        if self._devices:
            self._capture_accelerators(slot)

    def _capture_slowly(self, slot: _Slot, missing: int) -> None:
        if missing & _PYTHON:
            self._capture_python(slot)
        if missing & _NUMPY:
            self._numpy.capture(slot)
        if missing & _TORCH:
            slot.torch.copy_(self._torch_state())

    def _capture_python(self, slot: _Slot) -> None:
        if self._python_memory is not None:
            slot.python[:] = self._python_memory
            gauss = random._inst.gauss_next  # type: ignore[attr-defined]
        else:
            gauss = _python_slow(slot.view)
        slot.ints[6] = gauss is not None
        if gauss is not None:
            slot.floats[0] = gauss

    def _capture_accelerators(self, slot: _Slot) -> None:
        at = _TORCH_AT + self._torch_bytes
        for device in self._devices:
            slot.view[at : at + self._accelerator_bytes] = _accelerator_state(device)
            at += self._accelerator_bytes

    def snapshot(self) -> bytes:
        """The random state as it stands, encoded as `decode` reads it. For rare moments: it allocates."""
        if self._own is None:
            self._own = self.bind(memoryview(bytearray(self.size)))
        self.capture(self._own)
        return bytes(self._own.view)


class _NumpyAddresses:
    """Where numpy's global legacy generator keeps its key, position and cached Gaussian."""

    def __init__(self) -> None:
        self.owner: Any = np.random.mtrand._rand
        self.generator = self.owner._bit_generator
        self.memory: memoryview | None = None
        try:
            gauss_at = _gauss_offset()
            memory = _memory(self.generator.ctypes.state_address)
            if gauss_at is not None and self._agrees(memory, gauss_at):
                self.memory = memory
        except (AttributeError, TypeError, ValueError):
            pass

    def _agrees(self, memory: memoryview, gauss_at: int) -> bool:
        truth: Any = np.random.get_state(legacy=False)
        if truth["bit_generator"] != "MT19937":
            return False
        address = id(self.owner) + gauss_at
        self._gauss = ctypes.c_double.from_address(address)
        self._has_gauss = ctypes.c_int.from_address(address - 8)
        raw = bytes(memory)
        expected = truth["state"]["key"].astype("<u4").tobytes() + struct.pack("<i", truth["state"]["pos"])
        return bool(raw == expected and self._has_gauss.value == truth["has_gauss"])

    def gauss_addresses(self) -> tuple[int, int]:
        """Of the flag and of the value; 0 where the memory is not known."""
        if self.memory is None:
            return 0, 0
        return ctypes.addressof(self._has_gauss), ctypes.addressof(self._gauss)

    def capture(self, slot: _Slot) -> None:
        if self.memory is not None and self.owner._bit_generator is self.generator:
            slot.numpy[:] = self.memory
            slot.ints[1] = _NUMPY_RAW
            slot.ints[2] = _TWISTER
            slot.ints[7] = self._has_gauss.value
            slot.floats[1] = self._gauss.value
        else:
            raw = pickle.dumps(np.random.get_state(legacy=False))
            if len(raw) > _NUMPY_ROOM:
                raise ValueError(f"numpy's global random state takes {len(raw)} bytes, expected {_NUMPY_ROOM}")
            slot.view[_NUMPY_AT : _NUMPY_AT + len(raw)] = raw
            slot.ints[1] = _NUMPY_PICKLED
            slot.ints[2] = len(raw)


def decode(data: bytes | memoryview) -> RngState:
    """Read what `RngRecorder` wrote.

    Raises:
        ValueError: the bytes are not a random state of a version this code knows.
    """
    data = bytes(data)
    if len(data) < _TORCH_AT:
        raise ValueError(f"a random state has at least {_TORCH_AT} bytes, got {len(data)}")
    version, kind, length, torch_bytes, count, each, has_python, has_numpy, g_python, g_numpy = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise ValueError(f"random state of version {version}, expected {_VERSION}")
    end = _TORCH_AT + torch_bytes
    return RngState(
        python=_python_state(data[_PYTHON_AT : _PYTHON_AT + _TWISTER], g_python if has_python else None),
        numpy=_numpy_state(kind, data[_NUMPY_AT : _NUMPY_AT + length], has_numpy, g_numpy),
        torch=data[_TORCH_AT:end],
        accelerators=tuple(data[end + i * each : end + (i + 1) * each] for i in range(count)),
    )


def restore(state: RngState, devices: Sequence[torch.device] = ()) -> None:
    """Make `state` the random state of this process.

    Args:
        state: what `decode` returned.
        devices: the accelerators of this process, in the order that the recorder was given.
    """
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(as_tensor(state.torch))
    accelerators = [d for d in devices if d.type != "cpu"]
    for device, raw in zip(accelerators, state.accelerators, strict=False):
        generator_of(device).set_state(as_tensor(raw))


def _align(size: int) -> int:
    return -(-size // 64) * 64


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of an accelerator, which this begins to use."""
    module: Any = torch.get_device_module(device)
    module.init()
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def _accelerator_state(device: torch.device) -> bytes:
    # the state of an accelerator generator is a CPU tensor (seed and offset): no device synchronisation
    return bytes(generator_of(device).get_state().numpy())


@functools.cache
def _engine_offset() -> int | None:
    """Where `at::mt19937` stands in CPU generators of torch, as `_copies.c` reads it; None where it is not so.

    Found in a generator of our own, and compared with its getter in each state that matters: after a seed, in the
    middle of the words, and with both cached normals.
    """
    copies = compiled()
    probe: Any = torch.Generator()
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.pread(memory, _GENERATOR_ROOM, probe._cdata).find(_torch_words(probe)) - _ENGINE_HEAD
    finally:
        os.close(memory)
    if copies is None or found < 0:
        return None
    for step in range(4):
        if step == 2:
            raw = bytearray(_torch_bytes(probe))
            struct.pack_into("<8xd8xi4xfi", raw, len(raw) - 40, 0.8125, 1, 0.375, 1)
            probe.set_state(as_tensor(bytes(raw)))
        elif step:
            torch.rand(step, generator=probe)
        if copies.torch_state(probe._cdata + found) != _torch_bytes(probe):
            return None
    return found


def _torch_bytes(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy())


def _torch_words(generator: torch.Generator) -> bytes:
    return struct.pack(f"<{_WORDS}I", *struct.unpack_from(f"<{_WORDS}Q", _torch_bytes(generator), 24))


def _torch_engine() -> int:
    """Address of the default generator's `at::mt19937`; 0 where it is not known, and torch is asked."""
    try:
        generator: Any = torch.default_generator
        offset, copies = _engine_offset(), compiled()
        if offset is None or copies is None:
            return 0
        address = int(generator._cdata) + offset
        return address if copies.torch_state(address) == _torch_bytes(generator) else 0
    except (AttributeError, OSError, RuntimeError, ValueError, struct.error):
        return 0


def _address(memory: memoryview | None) -> int:
    return 0 if memory is None else ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _python_words() -> bytes:
    words = random.getstate()[1]
    return struct.pack(f"<i{_WORDS}I", words[_WORDS], *words[:_WORDS])


def _memory(address: int) -> memoryview:
    """A view of the twister at `address`, which lives as long as the process."""
    return memoryview((ctypes.c_char * _TWISTER).from_address(address)).cast("B")


def _python_memory() -> memoryview | None:
    """`int index; uint32_t state[624]` of the global `random.Random` (CPython _randommodule.c)."""
    address = id(random._inst) + object.__basicsize__
    if type(random._inst).__basicsize__ < object.__basicsize__ + _TWISTER:
        return None
    memory = _memory(address)
    return memory if bytes(memory) == _python_words() else None


def _python_slow(view: memoryview) -> float | None:
    view[_PYTHON_AT : _PYTHON_AT + _TWISTER] = _python_words()
    gauss: float | None = random.getstate()[2]
    return gauss


def _gauss_offset() -> int | None:
    """Offset of `double gauss` in a RandomState; `int has_gauss` stands 8 bytes before it (numpy's aug_bitgen).

    Found by planting a value in a private RandomState and looking for it in the object's memory.
    """
    probe = np.random.RandomState(0)
    state: Any = probe.get_state(legacy=False)
    size = type(probe).__basicsize__
    planted = 0.8125 + 2.0**-40
    state.update(has_gauss=1, gauss=planted)
    probe.set_state(state)
    memory = ctypes.string_at(id(probe), size)
    at = memory.find(struct.pack("<d", planted))
    if at < 16 or memory.find(struct.pack("<d", planted), at + 1) >= 0:
        return None
    set_flag = ctypes.c_int.from_address(id(probe) + at - 8).value
    state.update(has_gauss=0)
    probe.set_state(state)
    cleared = ctypes.c_int.from_address(id(probe) + at - 8).value
    return at if (set_flag, cleared) == (1, 0) else None


def _python_state(raw: bytes, gauss: float | None) -> tuple[int, tuple[int, ...], float | None]:
    index, *words = struct.unpack(f"<i{_WORDS}I", raw)
    return 3, (*words, index), gauss


def _numpy_state(kind: int, raw: bytes, has_gauss: int, gauss: float) -> dict[str, Any]:
    if kind == _NUMPY_PICKLED:
        pickled: dict[str, Any] = pickle.loads(raw)
        return pickled
    key = np.frombuffer(raw, dtype="<u4", count=_WORDS).astype(np.uint32)
    (pos,) = struct.unpack_from("<i", raw, 4 * _WORDS)
    twister = {"key": key, "pos": pos}
    return {"bit_generator": "MT19937", "state": twister, "has_gauss": has_gauss, "gauss": gauss}


def as_tensor(raw: bytes) -> torch.Tensor:
    """The state of one generator as `Generator.set_state` takes it."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
