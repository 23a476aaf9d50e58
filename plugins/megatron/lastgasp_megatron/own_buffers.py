"""Module buffers that each data parallel rank has for itself, such as BatchNorm's statistics.

Megatron broadcasts none, and its file holds those of the one rank that writes it. In a gasp those of the others lie in
the same file under a key of lastgasp's, as far as they differ and are known: live ranks give theirs when a fault is
answered, those with an arena at each step. Whose are in no file begins with the writer's, which is said.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lastgasp.adapter import cause_of
from lastgasp.adapter.torch import digest, split_trailer, with_trailer
from lastgasp_megatron.beside import Kept, own_buffers, some
from lastgasp_megatron.image import Image

log = logging.getLogger("lastgasp.megatron")

KEY = "lastgasp_buffers"
_ALL_RANKS, _RANK = 1 << 26, 1 << 20
"""Bytes of the buffers of all ranks, which each saver is sent, and of one."""


def limit(ranks: int) -> int:
    """Bytes that one of so many ranks may have carried."""
    return min(_RANK, _ALL_RANKS // ranks)


def taken(kept: Kept, most: int, check: bool = False) -> dict[str, Tensor]:
    """This rank's, by name; without those that are too large together. Nothing is copied.

    Args:
        check: leave out what has changed since the step and has no copy; this waits for the device.
    """
    found: dict[str, Tensor] = {}
    for label, place in kept.own.items():
        live = place.where.get(place.name)
        if live is not None and live.numel() * live.element_size() > most:
            continue  # nor is it digested
        value = place.value(check)
        size = 0 if value is None else value.numel() * value.element_size()
        if value is not None and size <= most:
            found[label] = value
            most -= size
    return found


def encoded(buffers: Mapping[str, Tensor]) -> bytes:
    """The same as bytes; empty for none."""
    if not buffers:
        return b""
    file = io.BytesIO()
    torch.save({name: value.detach().cpu().clone() for name, value in buffers.items()}, file)
    return file.getvalue()


def with_own(image: Image) -> bytes:
    """An image's auxiliary state, and its buffers behind it; empty where the state is not known."""
    return with_trailer(image.aux, encoded(image.own)) if image.aux else b""


def record_of(image: Image, states: Mapping[int, bytes]) -> dict[str, Any]:
    """What belongs into the file of `image` besides: nothing for a model without such buffers.

    Args:
        states: auxiliary states by rank, with the buffers behind them (`with_trailer`).
    """
    if not image.own:
        return {}
    ranks, differ = {image.rank: image.own}, {image.rank: dict[str, Tensor]()}
    for rank in image.shard.sharers:
        more = split_trailer(states.get(rank) or b"")[1] if rank != image.rank else b""
        if not more:
            continue
        try:
            found = torch.load(io.BytesIO(more), weights_only=True)
            differ[rank], ranks[rank] = _unlike(found, image.own), found
        except Exception as error:  # whatever it is, it costs these buffers and not the step
            log.warning("buffers of rank %d cannot be read, and count as lost: %s", rank, cause_of(error))
    lost = {rank: [name for name in image.own if name not in found] for rank, found in ranks.items()}
    return {KEY: {"of": image.rank, "ranks": list(image.shard.sharers), "differ": differ, "lost": lost}}


def _unlike(found: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pairs = {name: (value.cpu(), others[name].cpu()) for name, value in found.items() if name in others}
    return {name: a.clone() for name, (a, b) in pairs.items() if a.shape != b.shape or a.dtype != b.dtype
            or digest([a]) != digest([b])}  # fmt: skip


class OwnBuffers:
    """Those of a model that is about to be loaded.

    Args:
        chunks: its parts; rank: this one; sharers: all that load the same file, in Megatron's order.
    """

    def __init__(self, chunks: Any, rank: int, sharers: Sequence[int]) -> None:
        parts = chunks if isinstance(chunks, list | tuple) else [chunks]
        self._rank, self._sharers = rank, list(sharers)
        modules = [one for one in parts if isinstance(one, nn.Module)]
        self._live = {label: (where, name) for label, where, name in own_buffers(modules)}
        self._before = {label: _digest(value) for label, value in self._values()}

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        for label, (where, name) in self._live.items():
            if (value := where.get(name)) is not None:
                yield label, value

    def restore(self, record: Mapping[str, Any] | None, goes_on: bool, note: Callable[[str], None]) -> None:
        """Behind the load: put this rank's in place of the writer's, and note what stays the writer's.

        Args:
            record: of the file, that `record_of` has made; None for one that Megatron has saved itself.
            goes_on: this job has saved it.
        """
        if len(self._sharers) < 2:
            return
        if record is None:
            if goes_on and (names := self._trained(self._live)):
                note(f"module buffers ({some(names)}) begin with those of one data parallel rank on all of them, since "
                     "there are no others in the checkpoint. Where each had its own, a resume is not bit-equal")
            return
        alike, rank = record["ranks"] == self._sharers, self._rank
        known = record["differ"].get(rank) if alike else None
        refused = [] if known is None else [name for name, value in known.items() if not self._put(name, value)]
        lost = self._trained(self._live if known is None else [*record["lost"].get(rank, ()), *refused])
        if not lost or (alike and rank == record["of"]):
            return
        if alike:
            note(f"rank {rank}: its module buffers ({some(lost)}) begin with those of rank {record['of']}, since its "
                 "own are lost: where they differed, a resume is not bit-equal")  # fmt: skip
        else:
            note(f"module buffers ({some(lost)}) begin with those of one rank on all that share its part of the model, "
                 "since other ranks do than before: a resume is not bit-equal")  # fmt: skip

    def _put(self, name: str, value: Tensor) -> bool:
        where, key = self._live.get(name, ({}, ""))
        live = where.get(key)
        if live is None or live.shape != value.shape:
            return False
        with torch.no_grad():
            live.copy_(value)
        return True

    def _trained(self, names: Any) -> list[str]:
        """Those that a load has changed: constants are what the constructor of their module made of them."""
        now = {label: _digest(value) for label, value in self._values()}
        return [name for name in names if name in now and now[name] != self._before.get(name)]


def _digest(value: Tensor) -> bytes:
    try:
        return digest([value.detach()])
    except Exception as error:  # of a kind that torch cannot view as bytes
        return cause_of(error).encode()


