"""`Shards`: the live state of this rank as a table and as bytes, step by step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from lastgasp.errors import ConfigError
from lastgasp.pytorch.sharded import values
from lastgasp.pytorch.sharded.flat import Flats
from lastgasp.pytorch.sharded.names import (
    MODEL,
    OPTIMIZER,
    ExtraState,
    Leaf,
    names_of,
    optimizer_leaves,
    optimizer_path,
    root_of,
)  # fmt: skip
from lastgasp.pytorch.sharded.shared import Shared, shared_parts
from lastgasp.pytorch.sharded.table import (
    Chunk,
    Entry,
    Group,
    Path,
    Table,
    Undescribable,
    bytes_of,
    chunk_of,
    head_of,
    local_of,
    strides_of,
)  # fmt: skip
from lastgasp.pytorch.statedigest import digest, leaves
from lastgasp.pytorch.zero import inside

log = logging.getLogger("lastgasp")

_DENSE = "something that can be written from this rank alone"


@dataclass(frozen=True)
class Found:
    """What a walk over the state has found: `tensors[i]` is described by `table.entries[i]`."""

    table: Table
    tensors: list[Leaf]
    others: list[Leaf]
    extra: list[ExtraState]
    flats: Flats


class Shards:
    """Everything that this rank holds of a sharded model and its optimizers.

    Made on the training thread while no parameter is gathered. Enters no collective. `look` and `payload` are for the
    training thread; what reads `found` and tensors may run on any other one while no update is under way.

    Args:
        models, optimizers: by name.
        rank, world_size: as in torch.distributed.
        single_model, single_optimizer: whether the one there is was given without a name.
        parts_too: as of `optimizer_leaves`.

    Attributes:
        found: the table and where its tensors are.
        payload_size: bytes of the last `payload`.

    Raises:
        ConfigError: something of the state cannot be described; says what, and why.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Any],
        rank: int,
        world_size: int,
        *,
        single_model: bool = True,
        single_optimizer: bool = True,
        parts_too: bool = True,
    ) -> None:
        self.root = root_of(models, single_model)
        self.optimizers = dict(optimizers)
        self.rank, self.world_size = rank, world_size
        self.single_optimizer, self._parts_too = single_optimizer, parts_too
        self._prefix = f"{next(iter(models))}." if single_model else ""
        self.payload_size = 0
        try:
            self._walk()
            if not self.found.flats:  # which gathers all of them
                self._require_names(get_model_state_dict(self.root))
        except Undescribable as error:
            raise ConfigError("model", str(error), _DENSE, "See docs/sharded.md.") from error

    # -- the table ----------------------------------------------------------------------------------------

    def table(self) -> bytes:
        """The table, encoded; another one after `look` has returned True."""
        return self._table

    def look(self) -> bool:
        """At the end of a step: follow what has moved.

        Returns:
            Whether the table is another one: optimizers make their state in their first update, or later.

        Raises:
            ConfigError: something of the state cannot be described any more.
        """
        if any(part.moved for part in self.found.flats.all()):
            return self._again()
        if not self._nested and self._count() == self._counted:
            try:
                now = self._locals()
                if [t.data_ptr() for t in now] == self._addresses and all(map(is_, now, self._live)):
                    return False
            except (KeyError, IndexError, AttributeError):
                pass  # laid out anew
        return self._again()

    def _again(self) -> bool:
        before = self._table
        try:
            self._walk()
            if moved := next((part for part in self.found.flats.all() if part.moved), None):
                raise Undescribable(f"{moved.name}: a parameter of FSDP1 that was given other memory")
        except Undescribable as error:
            raise ConfigError("model", str(error), _DENSE, "See docs/sharded.md.") from error
        return self._table != before

    def _walk(self) -> None:
        self.found = _described(
            self.root, self._prefix, self.optimizers, self.single_optimizer, self.rank, self.world_size,
            parts_too=self._parts_too,
        )  # fmt: skip
        self._table = self.found.table.encode()
        self._nested = any(len(leaf.path) > self._depth(leaf) for leaf in (*self.found.tensors, *self.found.others))
        modules = list(self.root.modules())
        self._held = [held for one in modules for held in (one._modules, one._parameters, one._buffers)]
        self._buffers = [one._buffers for one in modules if one._buffers]
        self._counted = self._count()
        self._bind(self._locals())

    def _depth(self, leaf: Leaf) -> int:
        """Length of a path that is not nested deeper than usual."""
        return 2 if leaf.path[0] == "model" else 4 + (not self.single_optimizer)

    def _count(self) -> list[int]:
        """Changes when a module gets something, or an optimizer gets state or a parameter group."""
        found = [sum(map(len, self._held)), sum(value is not None for held in self._buffers for value in held.values())]
        for one in self.optimizers.values():
            state = inside(one).state
            found += [len(state), sum(len(held) for held in state.values() if isinstance(held, Mapping))]
            found += [len(group["params"]) for group in one.param_groups]
        return found

    def _locals(self) -> list[Tensor]:
        found = [leaf.value for leaf in self.found.tensors]
        return [t._local_tensor if isinstance(t, DTensor) else t for t in found]

    def _bind(self, now: list[Tensor]) -> None:
        """Make the views of the bytes, in the order of the image."""
        self._live = now
        self._addresses = [t.data_ptr() for t in now]
        self._bytes, at = list[Tensor](), 0
        self._views, self._device = list[memoryview](), list[tuple[Tensor, Tensor]]()
        for entry, tensor in zip(self.found.table.entries, now, strict=True):
            if entry.nbytes and entry.at == at:
                self._bytes.append(bytes_of(tensor.detach()))
                at += entry.nbytes
        assert at == self.found.table.nbytes

    def _view(self) -> None:
        """The bytes of the host; those of devices get memory there now, which only arenas need."""
        for flat in self._bytes:
            host = flat
            if flat.device.type != "cpu":
                host = host_memory(flat)
                self._device.append((host, flat))
            self._views.append(host.numpy().data)

    # -- the bytes ----------------------------------------------------------------------------------------

    @property
    def extra_modules(self) -> dict[Path, nn.Module]:
        """Modules with extra state, by its place in the state dictionary."""
        return {one.path: one.module for one in self.found.extra}

    def objects(self, extra: Mapping[Path, Any] | None = None) -> list[tuple[Path, Any]]:
        """Values that are no tensors, as they stand: step counters, extra states of modules but for those given."""
        found, known = [(leaf.path, leaf.value) for leaf in self.found.others], extra or {}
        return found + [
            (one.path, known[one.path] if one.path in known else one.module.get_extra_state())
            for one in self.found.extra
        ]

    def payload(
        self, groups: values.Groups | None = None, extra: Mapping[Path, Any] | None = None
    ) -> list[bytes | memoryview]:
        """The image of this rank, in pieces: what `parse` reads, one after the other. After `look`.

        Args:
            groups: values of the parameter groups, which then go along; extra: extra states that were taken already.
        """
        others = self.found.others or self.found.extra
        more = values.encode(self.objects(extra) if others else (), groups)
        head, self.payload_size = head_of(self._table, self.found.table.nbytes, len(more))
        if not self._views:
            self._view()
        for host, flat in self._device:
            host.copy_(flat, non_blocking=True)
        if self._device:
            torch.accelerator.synchronize()
        return [head, *self._views, more]

    def tensors(self) -> list[tuple[Entry, Tensor]]:
        """Each entry with this rank's live part, for a thread that saves."""
        return [(e, local_of(leaf.value)) for e, leaf in zip(self.found.table.entries, self.found.tensors, strict=True)]

    # -- what it proves -----------------------------------------------------------------------------------

    def digests(self) -> dict[str, bytes]:
        """Digests of this rank's parts of parameters and optimizer states: the same on ranks that are replicas."""
        return {kind: digest(self._content(kind)) for kind in (MODEL, OPTIMIZER)}

    def shared(self) -> list[Shared]:
        """The parts of parameters that other ranks may hold, too, of which a checkpoint has one rank's values."""
        pairs = zip(self.found.table.entries, self.found.tensors, strict=True)
        return shared_parts(
            ((e, leaf.value) for e, leaf in pairs if e.path[0] == MODEL and not e.buffer), self.world_size
        )

    def states_of_one(self) -> dict[str, bytes]:
        """Digests of what optimizers hold besides parts, of which one rank writes its own, by its keys."""
        found: dict[str, list[Any]] = {}
        for entry, tensor in self.tensors():
            if entry.path[0] == OPTIMIZER and entry.plain:
                found.setdefault(str(entry.path[-1]), []).append(tensor)
        for leaf in self.found.others:
            if not leaf.alone:
                found.setdefault(str(leaf.path[-1]), []).extend(leaves(leaf.value))
        return {key: digest(held) for key, held in found.items()}

    def _content(self, kind: str) -> Iterable[Any]:
        for entry, tensor in self.tensors():
            if entry.path[0] == kind and not entry.buffer:
                yield f"{entry.name} {entry.offsets} {entry.sizes}"
                yield tensor

    def _require_names(self, stated: Mapping[str, Any]) -> None:
        """The names of this walk are those of torch."""
        mine = {str(leaf.path[-1]): leaf for leaf in self.found.tensors if leaf.path[0] == "model"}
        names = set(mine) | {str(one.path[-1]) for one in self.found.extra}
        if names != set(stated):
            other = sorted(names ^ set(stated))
            raise Undescribable(f"a model whose state_dict() has other names than what is in it: {other[:5]}")
        for name, leaf in mine.items():
            if local_of(stated[name]).data_ptr() != local_of(leaf.value).data_ptr():
                raise Undescribable(f"{name}, of which state_dict() returns another tensor than the model has")


def host_memory(like: Tensor) -> Tensor:
    """Memory of the host for the bytes of a device's tensor; pinned, unless no more may be."""
    try:
        return torch.empty(like.shape, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.debug("copies are slower, as their memory cannot be pinned: %s", error)
        return torch.empty(like.shape, dtype=torch.uint8)


def _described(
    root: nn.Module, prefix: str, optimizers: Mapping[str, Any], single: bool, rank: int, world_size: int,
    *, parts_too: bool,
) -> Found:  # fmt: skip
    found, extra, names = names_of(root, prefix)
    groups = list[Group]()
    for name, optimizer in optimizers.items():
        own, its = optimizer_leaves(optimizer, optimizer_path(name, single), names, parts_too=parts_too)
        found += own
        groups += its
    tensors = [leaf for leaf in found if isinstance(leaf.value, Tensor)]
    others = [leaf for leaf in found if not isinstance(leaf.value, Tensor)]
    tensors.sort(key=lambda leaf: -leaf.value.element_size())  # so that all are aligned without gaps
    entries, nbytes = _entries(tensors, world_size)
    alone = tuple(leaf.path for leaf in others if leaf.alone)
    table = Table(rank, world_size, tuple(entries), tuple(groups), nbytes, alone)
    return Found(table, tensors, others, extra, names.flats)


def _entries(tensors: list[Leaf], world_size: int) -> tuple[list[Entry], int]:
    entries, at, known, chunks = list[Entry](), 0, dict[tuple[Any, ...], int](), dict[Any, Chunk]()
    for leaf in tensors:
        tensor, local = leaf.value if leaf.part_of is None else leaf.part_of, local_of(leaf.value)
        try:
            key = (tensor.shape, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else id(tensor)
            chunk = leaf.chunk or chunks.get(key) or chunks.setdefault(key, chunk_of(tensor, world_size))
            strides = strides_of(local)
            if leaf.buffer and isinstance(tensor, DTensor):
                raise Undescribable("a buffer that is a DTensor")
        except Undescribable as error:
            raise Undescribable(f"{leaf.name}: {error}") from error
        size = local.numel() * local.element_size()
        memory = (local.device, local.data_ptr(), local.dtype, local.shape, strides)  # tied parameters share it
        begin = known.get(memory, at) if size else at
        if begin == at and size:
            known[memory], at = at, at + size
        entries.append(
            Entry(leaf.path, str(local.dtype).removeprefix("torch."), chunk.shape, chunk.offsets, tuple(local.shape),
                  strides, begin if size else 0, size, chunk.whole and not leaf.alone, bool(leaf.buffer))
        )  # fmt: skip
    return entries, at
