"""The auxiliary state of a rank: random state, module buffers, data position; captured at every boundary.

It goes to a crash-safe buffer, so that it is at hand after the rank was killed. The big state (parameters,
optimizer) is read live at the gasp.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lastgasp.crash_safe_buffer import CrashSafeBuffer
from lastgasp.pytorch import rng
from lastgasp.pytorch.buffers import BufferRecorder, Resized, decode_buffers, encode_table, persistent_buffers
from lastgasp.pytorch.queued import QueuedWork

_HEAD = struct.Struct("<8q")  # magic, version, bytes of: random state, table, buffers, extra
_HEAD_ROOM = 64
_MAGIC = int.from_bytes(b"LGSMALL1", "little")
_VERSION = 1
_EXTRA_ROOM = 1 << 18


@dataclass(frozen=True)
class AuxState:
    """What `decode_aux` returns.

    Args:
        rng: random state of the rank.
        extra: the adapter's own bytes (data position), empty if there were none.
        buffers: key in `state_dict` -> value; empty on a rank whose buffers do not count.
    """

    rng: rng.RngState
    extra: bytes = b""
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Since(NamedTuple):
    """What happened between two captures.

    Attributes:
        drew: random numbers were drawn.
        changed: buffers changed, as far as `BufferRecorder.differ` can tell.
    """

    drew: bool
    changed: bool


NOTHING = Since(drew=False, changed=False)


class AuxRecorder:
    """Captures the auxiliary state of this rank into its crash-safe buffer.

    Args:
        devices: accelerators of this rank; their generators are captured too.
        module: whose persistent buffers are captured.
        extra_room: bytes reserved for `extra`; the box grows when it is not enough.
        host_buffers: False on a rank whose buffers do not count: those on an accelerator alone are kept, on it.

    Set `extra` to a new bytes object whenever it changes; the same object is written once per slot. `tail` follows it
    in the record and is for the part that changes at each step, so that the rest need not be written again.

    Attributes:
        queued: what those accelerators have been given; `capture` of a settled step marks it.
    """

    def __init__(
        self,
        devices: Sequence[torch.device] = (),
        module: nn.Module | None = None,
        extra_room: int = _EXTRA_ROOM,
        *,
        host_buffers: bool = True,
    ) -> None:
        self.extra = self.tail = b""
        self.queued = QueuedWork(devices)
        self.buffers = BufferRecorder(module, host_buffers)
        self._rng = rng.RngRecorder(devices)
        self._room = extra_room
        self.buffer, self._before = CrashSafeBuffer(self._needed()), 0
        self._bind()

    @property
    def fd(self) -> int:
        """Descriptor of the crash-safe buffer; others open `/proc/PID/fd/FD`."""
        return self.buffer.fd

    def _needed(self) -> int:
        table = encode_table(self.buffers.table)
        self._table_at = _HEAD_ROOM + self._rng.size
        self._buffers_at = _align(self._table_at + len(table))
        self._extra_at = _align(self._buffers_at + self.buffers.size)
        self._table = table
        return self._extra_at + self._room

    def _bind(self) -> None:
        payloads = self.buffer.payloads
        self._rng_slots = [self._rng.bind(p[_HEAD_ROOM:]) for p in payloads]
        self.buffers.bind([p[self._buffers_at : self._extra_at] for p in payloads])
        self._written: list[bytes | None] = [None] * len(payloads)
        self._tails: list[bytes | None] = [None] * len(payloads)
        for payload in payloads:
            payload[self._table_at : self._table_at + len(self._table)] = self._table

    def _fit(self) -> None:
        self._room = max(self._room, 2 * (len(self.extra) + len(self.tail)))
        self.buffer.grow(self._needed())
        self._bind()

    def capture(self, step: int, settled: bool) -> None:
        """Record the state as it stands, for `step` completed updates.

        Args:
            step: completed optimizer updates.
            settled: False when called just before the update that makes `step`.
        """
        if not self._rng_slots:
            return  # closed
        extra, tail, buffers = self.extra, self.tail, self.buffers
        length = len(extra) + len(tail)
        if buffers.names and buffers.changed_layout:
            buffers.refresh()
            self._fit()
        elif length > self._room:
            self._fit()
        buffer = self.buffer
        self._before = buffer.slot
        payload = buffer.begin(step, settled)
        slot = buffer.slot
        self._rng.capture(self._rng_slots[slot])
        if buffers.names:
            try:
                buffers.capture(slot, step)
            except Resized:
                buffers.refresh()
                self._fit()
                self.capture(step, settled)
                return
        if self._tails[slot] is not tail or self._written[slot] is not extra:
            self._write_extra(payload, slot, length)
        buffer.end(self._extra_at + length)
        if settled:
            self.queued.mark()

    def _write_extra(self, payload: memoryview, slot: int, length: int) -> None:
        extra, tail, at = self.extra, self.tail, self._extra_at
        sizes = self._rng.size, len(self._table), self.buffers.size, length
        _HEAD.pack_into(payload, 0, _MAGIC, _VERSION, *sizes, self._buffers_at, at)
        if self._written[slot] is not extra:
            payload[at : at + len(extra)] = self._written[slot] = extra
        payload[at + len(extra) : at + length] = self._tails[slot] = tail

    def read(self, step: int) -> bytes | None:
        """The encoded auxiliary state of `step`, if it is among the last ones. Callable from any thread."""
        return CrashSafeBuffer.read(self.buffer.fd, step)

    def since(self) -> Since:
        """What happened between the two newest captures."""
        size, payloads, slots = self._rng.size, self.buffer.payloads, (self.buffer.slot, self._before)
        now, before = (bytes(payloads[i][_HEAD_ROOM : _HEAD_ROOM + size]) for i in slots)
        return Since(drew=now != before, changed=self.buffers.differ(*slots))

    def snapshot_rng(self) -> bytes:
        """The random state as it stands, as `rng.decode` reads it. For rare moments."""
        return self._rng.snapshot()

    def note_on_buffers(self, aux_states: Mapping[int, bytes], rank: int, counted: Iterable[int]) -> str:
        """What of the ranks' buffers is that of the saver; empty if nothing is.

        Args:
            aux_states: of whom the rest is known; rank: that saves; counted: the ranks whose buffers count.
        """
        away, lost = self.buffers.away, [one for one in counted if one != rank and one in aux_states]
        if not away or not lost:
            return ""
        names = ", ".join(away[:3]) + (", ..." if len(away) > 3 else "")
        return (f"buffers on an accelerator, or sparse ({names}), are those of rank {rank}, because it cannot read "
                f"those of ranks {lost}: a resume may not be bit-equal")  # fmt: skip

    def close(self) -> None:
        """Close the crash-safe buffer; from then on nothing is captured. Idempotent.

        Arrays over its memory go now: Python's collector of cycles crashes over views that such arrays still use.
        """
        self.buffer.close()
        self._rng_slots = []
        self.buffers.bind([])


def decode_aux(data: bytes) -> AuxState:
    """Read an encoded auxiliary state.

    Raises:
        ValueError: not the bytes of a auxiliary state of a version this code knows.
    """
    rng_bytes, table, buffers, extra, buffers_at, extra_at = _head(data)
    table_at = _HEAD_ROOM + rng_bytes
    return AuxState(
        rng=rng.decode(data[_HEAD_ROOM:table_at]),
        extra=data[extra_at : extra_at + extra],
        buffers=decode_buffers(data[table_at : table_at + table], data[buffers_at : buffers_at + buffers]),
    )


def extra_of(data: bytes) -> bytes:
    """The adapter's own bytes of an encoded auxiliary state; the rest is not decoded."""
    *_, size, _, at = _head(data)
    return data[at : at + size]


def random_of(data: bytes) -> bytes:
    """The random state in an encoded auxiliary state, as `rng.decode` reads it."""
    size, *_ = _head(data)
    return data[_HEAD_ROOM : _HEAD_ROOM + size]


def with_random(data: bytes, random: bytes, extra: bytes) -> bytes:
    """The same auxiliary state with another random state, and other bytes of the adapter's.

    Raises:
        ValueError: the random state is one of other devices.
    """
    rng_bytes, table, buffers, _, buffers_at, extra_at = _head(data)
    if len(random) != rng_bytes:
        raise ValueError(f"a random state of {len(random)} bytes stands for one of {rng_bytes}")
    head = _HEAD.pack(_MAGIC, _VERSION, rng_bytes, table, buffers, len(extra), buffers_at, extra_at)
    return head + random + data[_HEAD_ROOM + rng_bytes : extra_at] + extra


def without_buffers(data: bytes) -> bytes:
    """The same auxiliary state without its buffers, for where they are saved elsewhere."""
    rng_bytes, _, _, extra, _, extra_at = _head(data)
    end = _HEAD_ROOM + rng_bytes
    head = _HEAD.pack(_MAGIC, _VERSION, rng_bytes, 0, 0, extra, end, end)
    return head + data[_HEAD_ROOM:end] + data[extra_at : extra_at + extra]


def restore_aux(state: AuxState, devices: Sequence[torch.device] = (), module: nn.Module | None = None) -> None:
    """Make the random state of `state` this process's, and its buffers (if any) those of `module`."""
    if module is not None and state.buffers:
        holders = dict(persistent_buffers(module))
        for name, value in state.buffers.items():
            holder, key = holders[name]
            live = holder[key]
            if live is not None:
                live.detach().copy_(value)
    rng.restore(state.rng, devices)


def _head(data: bytes) -> tuple[int, int, int, int, int, int]:
    if len(data) < _HEAD_ROOM:
        raise ValueError(f"a auxiliary state has at least {_HEAD_ROOM} bytes, got {len(data)}")
    magic, version, a, b, c, d, e, f = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(f"not an auxiliary state of version {_VERSION}")
    return a, b, c, d, e, f


def _align(size: int) -> int:
    return -(-size // 64) * 64


def own_aux(record: Mapping[str, Any], rank: int, world_size: int, note: Callable[[str], None]) -> bytes | None:
    """A rank's encoded state in the record of a checkpoint (`small`, `world_size`); None where it was lost.

    Args:
        note: is told what a resume cannot restore.
    """
    own: bytes | None = record["small"].get(rank)
    if record["world_size"] != world_size:
        note(f"saved by {record['world_size']} ranks, resumed by {world_size}: not bit-equal")
    elif own is None:
        note(f"no random state of rank {rank} was saved: a resume will not be bit-equal")
    return own
