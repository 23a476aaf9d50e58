"""The buffers of a model between the micro-batches of a step: each begins with those that the step began with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class BufferValue(NamedTuple):
    """A buffer's module, its name there, and a value of it."""

    module: nn.Module
    name: str
    value: Tensor


def buffer_values(model: nn.Module) -> list[BufferValue]:
    """All of the model, as they stand; the model may assign them anew."""
    return [BufferValue(module, name, value.detach().clone()) for module in model.modules()
            for name, value in module._buffers.items() if value is not None]  # fmt: skip


def put_buffers_back(values: list[BufferValue]) -> None:
    """Into the tensors that are there, which others may hold; where these have another shape, in their place."""
    for module, name, value in values:
        now = module._buffers.get(name)
        if now is not None and now.shape == value.shape:
            now.detach().copy_(value)
        else:
            module._buffers[name] = value.clone()
