"""The random state of a rank: captured around each step, put into Megatron's own form at the gasp."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from lastgasp.adapter.torch import AuxRecorder, as_tensor, decode_aux

_STATES = msgspec.msgpack.Decoder(dict[str, bytes])


class RandomState:
    """Records python's, numpy's, torch's and the accelerator's generators, and Megatron's tracker of its own.

    Args:
        device: that of the weights.
    """

    def __init__(self, device: torch.device) -> None:
        self.recorder = AuxRecorder([] if device.type == "cpu" else [device])
        self._known: tuple[Any, ...] = ()

    def capture(self, step: int, settled: bool) -> None:
        """Capture the current state, for `step`; about 10 us."""
        self._look_at_tracker()
        self.recorder.capture(step, settled)

    def _look_at_tracker(self) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        states: dict[str, Any] = get_cuda_rng_tracker().get_states()
        values = tuple(states.values())
        same = len(values) == len(self._known) and all(a is b for a, b in zip(values, self._known, strict=True))
        if same and all(isinstance(value, torch.Tensor) for value in values):
            return  # a fork of the tracker puts a new tensor there; a generator changes in place
        self._known = values
        self.recorder.extra = msgspec.msgpack.encode({name: _raw(state) for name, state in states.items()})

    def read(self, step: int) -> bytes:
        """The encoded state of `step`; empty if it is no longer known."""
        return self.recorder.read(step) or b""


def native(data: bytes) -> dict[str, Any]:
    """An encoded state as an element of Megatron's `rng_state` list (checkpointing.get_rng_state)."""
    aux = decode_aux(data)
    numpy = aux.rng.numpy
    twister = numpy["state"]
    trackers = _STATES.decode(aux.extra) if aux.extra else {}
    accelerators = aux.rng.accelerators
    return {
        "random_rng_state": aux.rng.python,
        "np_rng_state": (
            numpy["bit_generator"], twister["key"], twister["pos"], numpy["has_gauss"], numpy["gauss"],
        ),
        "torch_rng_state": as_tensor(aux.rng.torch),
        "cuda_rng_state": as_tensor(accelerators[0] if accelerators else aux.rng.torch),
        "rng_tracker_states": {name: as_tensor(raw) for name, raw in trackers.items()},
    }  # fmt: skip


def _raw(state: Any) -> bytes:
    tensor = state if isinstance(state, torch.Tensor) else state.get_state()
    return bytes(tensor.cpu().numpy())
