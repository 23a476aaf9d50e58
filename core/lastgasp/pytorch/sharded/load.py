"""Fills a model and its optimizers from a checkpoint of `torch.distributed.checkpoint`, or from the image of a rank."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from lastgasp.arena_digest import ALONE, threads
from lastgasp.errors import CheckpointMismatch
from lastgasp.pytorch.sharded import values
from lastgasp.pytorch.sharded.files import groups_of
from lastgasp.pytorch.sharded.names import (
    Leaf,
    model_leaves,
    names_of,
    optimizer_leaves,
    optimizer_path,
    root_of,
)  # fmt: skip
from lastgasp.pytorch.sharded.table import Entry, Group, Path, chunk_of, local_of, parse
from lastgasp.pytorch.zero import inside

_SHOWN = 8


class _Kept(Protocol):
    """What is loaded from."""

    path: str

    @property
    def paths(self) -> Mapping[str, Path]:
        """Name of everything in it -> its place in the state dictionary."""

    def differs(self, name: str, tensor: Tensor) -> str:
        """Why this tensor cannot be filled from it; empty if it can."""

    def value(self, name: str) -> Any:
        """A value that is no tensor."""

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill these tensors in place."""


def load(
    directory: pathlib.Path,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Any],
    *,
    single_model: bool = True,
    single_optimizer: bool = True,
) -> None:
    """Load a checkpoint, of any number of ranks. On the training thread of every rank, each on its own.

    Optimizers without state get it by torch's own means: an update with gradients and a learning rate of zero. So
    hooks on optimizers come later. Nothing is verified here.

    Raises:
        CheckpointMismatch: it is of another model or optimizer; nothing was changed but state that optimizers lacked.
        OSError: a file cannot be read.
    """
    kept = _Directory(directory)
    _load(kept, root_of(models, single_model), dict(optimizers), single_optimizer)


def fill(
    payload: Any,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
    single_model: bool = True,
    single_optimizer: bool = True,
    groups: values.Groups | None = None,
) -> None:
    """The same from the image of this rank (`Shards.payload`), bit by bit.

    Args:
        groups: values of the parameter groups; those in the image by default.

    Raises:
        CheckpointMismatch: it is of another rank, number of ranks, model or optimizer.
        ValueError: it is no image.
    """
    image = parse(payload)
    table = image.table
    if (table.rank, table.world_size) != (rank, world_size):
        raise CheckpointMismatch("memory", [f"it is of rank {table.rank} of {table.world_size}, and this is rank "
                                            f"{rank} of {world_size}"])  # fmt: skip
    kept = _Memory(image, values.decode(image.values), groups)
    _load(kept, root_of(models, single_model), dict(optimizers), single_optimizer)


def _load(kept: _Kept, root: nn.Module, optimizers: dict[str, Any], single: bool) -> None:
    leaves, extra = model_leaves(root, "")
    params, places = names_of(leaves), {name: optimizer_path(name, single) for name in optimizers}
    problems = _problems(kept, leaves, "model.", {_name(one.path) for one in extra})
    for name, optimizer in optimizers.items():
        problems += _group_problems(kept, optimizer, optimizer_leaves(optimizer, places[name], params)[1])
    _require(kept, problems)
    for name, optimizer in optimizers.items():
        leaves += _with_state(kept, root, optimizer, places[name], params)
    tensors = {leaf.name: leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)}
    with torch.no_grad():
        kept.fill(tensors)
    for leaf in leaves:
        if not isinstance(leaf.value, Tensor):
            leaf.holder[leaf.key] = kept.value(leaf.name)
    for one in extra:
        one.module.set_extra_state(kept.value(_name(one.path)))
    for name, optimizer in optimizers.items():
        for group in optimizer_leaves(optimizer, places[name], params)[1]:
            _fill_group(kept, optimizer.param_groups[int(group.path[-1])], group)


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _with_state(kept: _Kept, root: nn.Module, optimizer: Any, at: Path, params: Mapping[int, str]) -> list[Leaf]:
    """The leaves of an optimizer that has just the state that the checkpoint has for it."""
    begin = _name((*at, "state")) + "."
    if any(name.startswith(begin) for name in kept.paths):
        get_optimizer_state_dict(root, inside(optimizer))  # makes it where there is none
    known, state = {path[: len(at) + 2] for path in kept.paths.values()}, inside(optimizer).state
    for parameter in list(state):  # made just now, for one that had none when the checkpoint was written
        if (*at, "state", params.get(id(parameter), "")) not in known:
            del state[parameter]
    leaves, _ = optimizer_leaves(optimizer, at, params)
    _require(kept, _problems(kept, leaves, begin, _of_others(kept, optimizer, at, params)))
    return leaves


def _of_others(kept: _Kept, optimizer: Any, at: Path, params: Mapping[int, str]) -> set[str]:
    """The names of what the checkpoint has for parameters that other ranks update (`ZeroRedundancyOptimizer`)."""
    own = {params.get(id(p)) for group in inside(optimizer).param_groups for p in group["params"]}
    others = {params.get(id(p)) for group in optimizer.param_groups for p in group["params"]} - own
    begin = (*at, "state")
    return {n for n, path in kept.paths.items() if path[: len(begin)] == begin and path[len(begin)] in others}


def _require(kept: _Kept, problems: list[str]) -> None:
    if problems:
        shown = problems if len(problems) <= _SHOWN else [*problems[:_SHOWN], f"and {len(problems) - _SHOWN} more"]
        raise CheckpointMismatch(kept.path, shown)


def _problems(kept: _Kept, leaves: list[Leaf], begin: str, more: set[str]) -> list[str]:
    """What of these leaves is not in it, differs, or is only in it."""
    own = {leaf.name: leaf.value for leaf in leaves}
    there = {name for name in kept.paths if name.startswith(begin)}
    lines = [f"{name} is not in the checkpoint" for name in sorted((set(own) | more) - there)]
    lines += [f"{name} is only in the checkpoint" for name in sorted(there - set(own) - more)]
    for name, value in own.items():
        if isinstance(value, Tensor) and name in there and (why := kept.differs(name, value)):
            lines.append(f"{name} is {why}")
    return lines


def _group_problems(kept: _Kept, optimizer: Any, groups: list[Group]) -> list[str]:
    lines = []
    for group in groups:
        name = _name((*group.path, "params"))
        if name not in kept.paths:
            lines.append(f"{_name(group.path)} is not in the checkpoint")
        elif (stored := list(kept.value(name))) != list(group.params):
            lines.append(f"{name} are {_few(stored)} in the checkpoint and {_few(group.params)} here")
        for key, value in optimizer.param_groups[int(group.path[-1])].items():
            name = _name((*group.path, key))
            if isinstance(value, Tensor) and name in kept.paths and (why := kept.differs(name, value)):
                lines.append(f"{name} is {why}")
    after = _name((*groups[0].path[:-1], len(groups)))
    return [*lines, f"{after} is only in the checkpoint"] if f"{after}.params" in kept.paths else lines


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _fill_group(kept: _Kept, held: dict[str, Any], group: Group) -> None:
    """Give one parameter group its values back; tensors are filled in place, as schedulers and graphs hold them."""
    depth = len(group.path)
    for name, path in kept.paths.items():
        if path[:depth] != group.path or path[depth] == "params":
            continue
        target: Any = held
        for key in path[depth:-1]:
            target = target[key]
        if isinstance(there := target.get(path[-1]) if isinstance(target, dict) else target[path[-1]], Tensor):
            kept.fill({name: there})
        else:
            target[path[-1]] = kept.value(name)


class _Directory:
    """A checkpoint directory of `torch.distributed.checkpoint`."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.path = str(directory)
        self._reader = FileSystemReader(directory)
        self._metadata: Metadata = self._reader.read_metadata()
        self.paths: dict[str, Path] = self._metadata.planner_data or {}

    def differs(self, name: str, tensor: Tensor) -> str:
        """As `_Kept.differs`."""
        stored = self._metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            return "no tensor in the checkpoint"
        if (stored.size, stored.properties.dtype) == (tensor.shape, tensor.dtype):
            return ""
        there, here = f"{stored.properties.dtype} {list(stored.size)}", f"{tensor.dtype} {list(tensor.shape)}"
        return f"{there} in the checkpoint and {here} here"

    def value(self, name: str) -> Any:
        """As `_Kept.value`."""
        place = self._metadata.storage_data[MetadataIndex(name)]
        with pathlib.Path(self.path, place.relative_path).open("rb") as file:
            file.seek(place.offset)
            # Not weights_only: it is our own file, verified, and holds states of the user's objects.
            return torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=False)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """As `_Kept.fill`."""
        if tensors:
            dcp_load(dict(tensors), storage_reader=self._reader, no_dist=True)


class _Memory:
    """The image of one rank."""

    path = "memory"

    def __init__(self, image: Any, known: values.Values, groups: values.Groups | None) -> None:
        self._image, table = image, image.table
        self._entries: dict[str, Entry] = {entry.name: entry for entry in table.entries}
        given = known.groups if groups is None else groups
        pairs = [*known.objects, *(groups_of(table.groups, given) if given is not None else ())]
        pairs += [] if given is not None else [((*one.path, "params"), list(one.params)) for one in table.groups]
        self._values = {_name(path): value for path, value in pairs}
        self.paths: dict[str, Path] = {_name(path): path for path, _ in pairs}
        self.paths |= {entry.name: entry.path for entry in table.entries}

    def differs(self, name: str, tensor: Tensor) -> str:
        """As `_Kept.differs`."""
        entry = self._entries.get(name)
        if entry is None:  # a tensor among the values of a parameter group
            value = self._values[name]
            alike = isinstance(value, Tensor) and (value.dtype, value.shape) == (tensor.dtype, tensor.shape)
            return "" if alike else "another value there"
        chunk, local = chunk_of(tensor, self._image.table.world_size), local_of(tensor)
        there = entry.torch_dtype, entry.shape, entry.offsets, entry.sizes
        here = local.dtype, chunk.shape, chunk.offsets, tuple(local.shape)
        return "" if here == there else f"{there} there and {here} here (type, shape, offsets, sizes)"

    def value(self, name: str) -> Any:
        """As `_Kept.value`."""
        return self._values[name]

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """As `_Kept.fill`, by as many threads as verify: each page is touched for the first time."""
        def fill(name: str) -> None:
            entry = self._entries.get(name)
            local_of(tensors[name]).copy_(self._values[name] if entry is None else self._image.tensor(entry))

        if sum(local_of(tensor).nbytes for tensor in tensors.values() if tensor.device.type == "cpu") < ALONE:
            for name in tensors:
                fill(name)
        else:
            with ThreadPoolExecutor(threads()) as pool:
                list(pool.map(fill, tensors))


