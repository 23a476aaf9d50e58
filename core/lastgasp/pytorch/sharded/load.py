"""Fills a model and its optimizers from a checkpoint of `torch.distributed.checkpoint`, or from the image of a rank."""

from __future__ import annotations

import io
import logging
import pathlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import _init_optim_state, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor

from lastgasp.arena_digest import ALONE, threads
from lastgasp.errors import CheckpointMismatch
from lastgasp.pytorch.sharded import values
from lastgasp.pytorch.sharded.files import Rename, groups_of, same
from lastgasp.pytorch.sharded.flat import Pieces, Planner, cast_buffers
from lastgasp.pytorch.sharded.names import (
    Leaf,
    Names,
    names_of,
    optimizer_leaves,
    optimizer_path,
    root_of,
    targets,
)  # fmt: skip
from lastgasp.pytorch.sharded.table import Chunk, Entry, Group, Path, Undescribable, chunk_of, local_of, parse
from lastgasp.pytorch.zero import inside

log = logging.getLogger("lastgasp")

_SHOWN = 8
Target = Tensor | Pieces
"""What is filled."""


class _Kept(Protocol):
    """What is loaded from."""

    path: str

    @property
    def paths(self) -> Mapping[str, Path]:
        """Name of everything in it -> its place in the state dictionary."""

    def differs(self, name: str, tensor: Target) -> str:
        """Why this tensor cannot be filled from it; empty if it can."""

    def tensor(self, name: str) -> tuple[torch.Size, torch.dtype] | None:
        """Shape, over all ranks, and type of a tensor; None for another value."""

    def value(self, name: str) -> Any:
        """A value that is no tensor."""

    def fill(self, tensors: Mapping[str, Target]) -> None:
        """Fill these tensors in place."""


def load(
    directory: pathlib.Path,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Any],
    *,
    single_model: bool = True,
    single_optimizer: bool = True,
    read: Rename = same,
) -> None:
    """Load a checkpoint, of any number of ranks. On the training thread of every rank, each on its own.

    Optimizers without state get it by torch's own means: an update with gradients and a learning rate of zero. So
    hooks on optimizers come later. What they lack then is made as the checkpoint has it. Nothing is verified here.

    Args:
        read: from a framework's names to those of `names`.

    Raises:
        CheckpointMismatch: it is of another model or optimizer; nothing was changed but state that optimizers lacked.
        OSError: a file cannot be read.
    """
    kept = _Directory(directory, read)
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
    parts_too: bool = True,
) -> None:
    """The same from the image of this rank (`Shards.payload`), bit by bit.

    Args:
        parts_too: as of the `Shards` that made it.

    Raises:
        CheckpointMismatch: it is of another rank, number of ranks, model or optimizer.
        ValueError: it is no image.
    """
    image = parse(payload)
    table = image.table
    if (table.rank, table.world_size) != (rank, world_size):
        raise CheckpointMismatch("memory", [f"it is of rank {table.rank} of {table.world_size}, and this is rank "
                                            f"{rank} of {world_size}"])  # fmt: skip
    kept = _Memory(image, values.decode(image.values))
    _load(kept, root_of(models, single_model), dict(optimizers), single_optimizer, parts_too)


def _load(
    kept: _Kept, root: nn.Module, optimizers: dict[str, Any], single: bool, parts_too: bool = True
) -> None:
    try:
        _load_described(kept, root, optimizers, single, parts_too)
    except Undescribable as error:
        raise CheckpointMismatch(kept.path, [str(error)]) from error


def _load_described(kept: _Kept, root: nn.Module, optimizers: dict[str, Any], single: bool, parts_too: bool) -> None:
    leaves, extra, params = names_of(root, "")
    places = {name: optimizer_path(name, single) for name in optimizers}
    buffers = {leaf.name: leaf.value for leaf in leaves if leaf.buffer and leaf.name in kept.paths}
    cast_buffers(root, buffers, kept.tensor)
    problems = _problems(kept, leaves, "model.", {_name(one.path) for one in extra})
    for name, optimizer in optimizers.items():
        problems += _group_problems(kept, optimizer, optimizer_leaves(optimizer, places[name], params)[1])
    _require(kept, problems)
    for name, optimizer in optimizers.items():
        leaves += _with_state(kept, root, optimizer, places[name], params, parts_too)
    tensors = targets([leaf for leaf in leaves if isinstance(leaf.value, Tensor)])
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


def _with_state(
    kept: _Kept, root: nn.Module, optimizer: Any, at: Path, params: Names, parts_too: bool
) -> list[Leaf]:
    """The leaves of an optimizer that has just the state that the checkpoint has for it."""
    begin, inner = _name((*at, "state")) + ".", inside(optimizer)
    before = set(inner.state)
    if any(name.startswith(begin) for name in kept.paths):
        _make_state(root, inner, params)
        _make_lacking(kept, optimizer, at, params)
    known, state = {path[: len(at) + 2] for path in kept.paths.values()}, inner.state
    for key in list(state):  # made just now, where there was none when the checkpoint was written
        names = (params.of(key) if isinstance(key, Tensor) else (str(key),)) or ("",)
        others = key not in before and params.elsewhere.issuperset(names)
        if others or not any((*at, "state", name) in known for name in names):
            del state[key]
    leaves, _ = optimizer_leaves(optimizer, at, params, parts_too=parts_too)
    _require(kept, _problems(kept, leaves, begin, _of_others(kept, optimizer, at, params)))
    return leaves


def _make_state(root: nn.Module, inner: Any, params: Names) -> None:
    """Have torch make what it can of an optimizer's state, and leave nothing else behind. Never raises.

    It makes none where there are gradients or some state, nor for what is frozen; some optimizers refuse that update.
    """
    gradients = [(p, p.grad) for group in inner.param_groups for p in group["params"]]
    rates = [(group, group["lr"]) for group in inner.param_groups if "lr" in group]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        if params.flats:  # which the other function gathers
            _init_optim_state(inner)
        else:
            get_optimizer_state_dict(root, inner)
    except Exception as error:  # of the optimizer's kind
        log.debug("%s makes no state of itself before a checkpoint is loaded: %s", type(inner).__name__, error)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for group, rate in rates:
            group["lr"] = rate


def _make_lacking(kept: _Kept, optimizer: Any, at: Path, params: Names) -> None:
    """Make the state that only the checkpoint has: of what was frozen, say, or made in a later update than the first.

    Not where the optimizer lacks options of the one that was saved: it is another one. Nor under keys that may not have
    been text: the optimizer would not find it.
    """
    inner, begin = inside(optimizer), (*at, "state")
    leaves, groups = optimizer_leaves(optimizer, at, params)
    if any(_options(kept, group) - optimizer.param_groups[int(group.path[-1])].keys() for group in groups):
        return
    depth, there = len(begin) + 1, {leaf.path for leaf in leaves}
    alike = {leaf.path[depth:]: leaf for leaf in leaves if isinstance(leaf.value, Tensor)}
    trained = [(p, group) for group in inner.param_groups for p in group["params"]]
    own = {name: (p, group) for p, group in trained for name in params.of(p) if name not in params.elsewhere}
    others = params.all() - own.keys()
    lacking = [(path, name) for name, path in kept.paths.items() if path[: len(begin)] == begin and path not in there]
    for path, name in sorted(lacking, key=lambda one: [f"{key:0>9}" for key in one[0]]):  # lists in their order
        owner = path[len(begin)]
        if owner in others:
            continue
        parameter, group = own.get(str(owner), (None, {}))
        if not all(map(_as_it_was, path[len(begin) :] if parameter is None else path[depth:])):
            continue
        stored = kept.tensor(name)
        if stored is None:
            value = kept.value(name)
        else:
            value = _empty(*stored, parameter, alike.get(path[depth:]), _on_host(str(path[-1]), group), params)
        if parameter is None:
            _put(inner.state, path[len(begin) :], value)
        else:
            _put(inner.state[parameter], path[depth:], value)


def _as_it_was(key: str | int) -> bool:
    """Whether a key of a dictionary is known from its text, which a path has of a number or a tuple, too."""
    return isinstance(key, int) or (key.isidentifier() and key not in ("None", "True", "False"))


def _options(kept: _Kept, group: Group) -> set[str]:
    depth = len(group.path)
    return {str(path[depth]) for path in kept.paths.values() if path[:depth] == group.path}


def _on_host(key: str, group: Mapping[str, Any]) -> bool:
    """As torch's `load_state_dict` decides."""
    return key == "step" and not (group.get("capturable") or group.get("fused"))


def _empty(
    shape: torch.Size, dtype: torch.dtype, parameter: Tensor | None, alike: Leaf | None, on_host: bool, params: Names
) -> Tensor:
    """A tensor to be filled, as the parameter is spread over the ranks.

    Args:
        alike: what the optimizer has of the same name for another parameter, if anything.
    """
    if parameter is not None and params.flats.parts.get(id(parameter)) and len(shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if parameter is not None and shape == parameter.shape and not on_host:
        spread = isinstance(parameter, DTensor)
        if alike is None or not spread or isinstance(alike.value, DTensor):
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if alike.part_of is not None:
            return torch.zeros_like(local_of(parameter), dtype=dtype)
    elsewhere = None if parameter is None or on_host else parameter.device
    return torch.zeros(shape, dtype=dtype, device=elsewhere if alike is None else alike.value.device)


def _put(holder: Any, keys: Path, value: Any) -> None:
    """Into nested dictionaries and lists, which are made where they lack."""
    for key, after in zip(keys, (*keys[1:], None), strict=True):
        found = value if after is None else [] if isinstance(after, int) else {}
        if isinstance(holder, list):
            holder += [found] * (int(key) == len(holder))
            holder = holder[int(key)]
        else:
            holder = holder.setdefault(key, found)


def _of_others(kept: _Kept, optimizer: Any, at: Path, params: Names) -> set[str]:
    """The names of what the checkpoint has for parameters that other ranks update (`ZeroRedundancyOptimizer`)."""
    own = {name for group in inside(optimizer).param_groups for p in group["params"] for name in params.of(p)}
    others = {name for group in optimizer.param_groups for p in group["params"] for name in params.of(p)} - own
    others |= params.elsewhere
    begin = (*at, "state")
    return {n for n, path in kept.paths.items() if path[: len(begin)] == begin and path[len(begin)] in others}


def _require(kept: _Kept, problems: list[str]) -> None:
    if problems:
        shown = problems if len(problems) <= _SHOWN else [*problems[:_SHOWN], f"and {len(problems) - _SHOWN} more"]
        raise CheckpointMismatch(kept.path, shown)


def _problems(kept: _Kept, leaves: list[Leaf], begin: str, more: set[str]) -> list[str]:
    """What of these leaves is not in it, differs, or is only in it."""
    own = targets(leaves)
    there = {name for name in kept.paths if name.startswith(begin)}
    lines = [f"{name} is not in the checkpoint" for name in sorted((set(own) | more) - there)]
    lines += [f"{name} is only in the checkpoint" for name in sorted(there - set(own) - more)]
    for name, value in own.items():
        if isinstance(value, Tensor | Pieces) and name in there and (why := kept.differs(name, value)):
            lines.append(f"{name} is {why}")
    return lines


def _group_problems(kept: _Kept, optimizer: Any, groups: list[Group]) -> list[str]:
    lines = []
    for group in groups:
        name = _name((*group.path, "params"))
        if name not in kept.paths:
            lines.append(f"{_name(group.path)} is not in the checkpoint")
        elif sorted(stored := list(kept.value(name))) != sorted(group.params):  # FSDP1's come by flat tensors
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

    def __init__(self, directory: pathlib.Path, read: Rename) -> None:
        self.path = str(directory)
        self._reader = FileSystemReader(directory)
        self._metadata: Metadata = self._reader.read_metadata()
        known = {name: read(path) for name, path in (self._metadata.planner_data or {}).items()}
        self._there = {_name(path): name for name, path in known.items()}
        self.paths: dict[str, Path] = {_name(path): path for path in known.values()}

    def differs(self, name: str, tensor: Target) -> str:
        """As `_Kept.differs`."""
        stored = self._metadata.state_dict_metadata[self._there[name]]
        if not isinstance(stored, TensorStorageMetadata):
            return "no tensor in the checkpoint"
        if (stored.size, stored.properties.dtype) == (tensor.shape, tensor.dtype):
            return ""
        there, here = f"{stored.properties.dtype} {list(stored.size)}", f"{tensor.dtype} {list(tensor.shape)}"
        return f"{there} in the checkpoint and {here} here"

    def tensor(self, name: str) -> tuple[torch.Size, torch.dtype] | None:
        """As `_Kept.tensor`."""
        stored = self._metadata.state_dict_metadata[self._there[name]]
        return (stored.size, stored.properties.dtype) if isinstance(stored, TensorStorageMetadata) else None

    def value(self, name: str) -> Any:
        """As `_Kept.value`."""
        place = self._metadata.storage_data[MetadataIndex(self._there[name])]
        with pathlib.Path(self.path, place.relative_path).open("rb") as file:
            file.seek(place.offset)
            # Not weights_only: it is our own file, verified, and holds states of the user's objects.
            return torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=False)

    def fill(self, tensors: Mapping[str, Target]) -> None:
        """As `_Kept.fill`."""
        here = {self._there[name]: one for name, one in tensors.items() if not isinstance(one, Pieces) or one.pieces}
        if here:
            dcp_load(here, storage_reader=self._reader, planner=Planner(), no_dist=True)


class _Memory:
    """The image of one rank."""

    path = "memory"

    def __init__(self, image: Any, known: values.Values) -> None:
        self._image, table = image, image.table
        self._entries: dict[str, list[Entry]] = {}
        for entry in table.entries:
            self._entries.setdefault(entry.name, []).append(entry)
        given = known.groups
        pairs = [*known.objects, *(groups_of(table.groups, given) if given is not None else ())]
        pairs += [] if given is not None else [((*one.path, "params"), list(one.params)) for one in table.groups]
        self._values = {_name(path): value for path, value in pairs}
        self.paths: dict[str, Path] = {_name(path): path for path, _ in pairs}
        self.paths |= {entry.name: entry.path for entry in table.entries}

    def differs(self, name: str, tensor: Target) -> str:
        """As `_Kept.differs`."""
        entries = self._entries.get(name)
        if entries is None:  # a tensor among the values of a parameter group
            value = self._values[name]
            alike = isinstance(value, Tensor) and (value.dtype, value.shape) == (tensor.dtype, tensor.shape)
            return "" if alike else "another value there"
        there = [(one.torch_dtype, one.shape, one.offsets, one.sizes) for one in entries if one.nbytes]
        pieces = self._pieces(tensor)
        here = [(tensor.dtype, chunk.shape, chunk.offsets, tuple(t.shape)) for chunk, t in pieces if t.numel()]
        return "" if here == there else f"{there} there and {here} here (type, shape, offsets, sizes)"

    def tensor(self, name: str) -> tuple[torch.Size, torch.dtype] | None:
        """As `_Kept.tensor`."""
        entries = self._entries.get(name)
        return None if entries is None else (torch.Size(entries[0].shape), entries[0].torch_dtype)

    def value(self, name: str) -> Any:
        """As `_Kept.value`."""
        return self._values[name]

    def fill(self, tensors: Mapping[str, Target]) -> None:
        """As `_Kept.fill`, by as many threads as verify: each page is touched for the first time."""
        def fill(name: str) -> None:
            target = tensors[name]
            if name not in self._entries:
                assert isinstance(target, Tensor)  # `differs` has found it alike
                local_of(target).copy_(self._values[name])
                return
            entries = [entry for entry in self._entries[name] if entry.nbytes]
            into = [tensor for _, tensor in self._pieces(target) if tensor.numel()]
            for entry, tensor in zip(entries, into, strict=True):
                tensor.copy_(self._image.tensor(entry))

        nbytes = [one.nbytes if isinstance(one, Pieces) else local_of(one).nbytes
                  for one in tensors.values() if one.device.type == "cpu"]  # fmt: skip
        if sum(nbytes) < ALONE:
            for name in tensors:
                fill(name)
        else:
            with ThreadPoolExecutor(threads()) as pool:
                list(pool.map(fill, tensors))

    def _pieces(self, target: Target) -> list[tuple[Chunk, Tensor]]:
        if isinstance(target, Pieces):
            return target.pieces
        return [(chunk_of(target, self._image.table.world_size), local_of(target))]
