"""FSDP1 (`FullyShardedDataParallel`): each rank has a stretch of one flat tensor, in which all parameters lie in a row.

A stretch of a parameter's elements is no box of the parameter, as `torch.distributed.checkpoint` stores them, but at
most `2 * dimensions - 1` of them: the end of a row, whole rows, the beginning of one. The optimizer's state lies as the
parameters do: flat, or by parameter where `use_orig_params=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.fsdp import FullyShardedDataParallel

from lastgasp.pytorch.sharded.table import Chunk, Undescribable

INNER = "_fsdp_wrapped_module"
"""What FSDP1 puts between a module's name and those of its parameters."""


@dataclass(eq=False, slots=True)
class Slice:
    """A box of a parameter, or of its optimizer state, in this rank's stretch.

    Attributes:
        flat: the stretch as it is now.
        begin: the element of the stretch that is its first.
        chunk: its place in the whole parameter.
    """

    flat: Callable[[], Tensor]
    begin: int
    chunk: Chunk
    _of: tuple[Tensor, int] | None = None
    _view: Tensor | None = None

    @property
    def sharded_param(self) -> Tensor:
        """It, as it lies in memory: the same view as long as that is the same."""
        flat, of = self.flat(), self._of
        if self._view is None or of is None or flat is not of[0] or flat.data_ptr() != of[1]:
            sizes = self.chunk.sizes
            part = flat.detach().view(-1)[self.begin : self.begin + prod(sizes)]
            self._of, self._view = (flat, flat.data_ptr()), part.view(sizes)
        return self._view


@dataclass(eq=False)
class Part:
    """What this rank has of one parameter.

    Attributes:
        flat: where its first element is in `stretch()`, and how many there are.
        first: the first one among the parameter's own, in order.
        whole: every rank of the job holds all of it.
        copies: the ranks that hold the same of it.
        all: the flat tensor.
        own: it, as the optimizer has it (`use_orig_params=True`); None where that has the flat tensor.
        name: in the model, as found first.
    """

    stretch: Callable[[], Tensor]
    begin: int
    count: int
    first: int
    shape: tuple[int, ...]
    whole: bool
    copies: frozenset[int]
    all: Tensor
    own: nn.Parameter | None
    name: str = ""
    boxes: list[tuple[int, Chunk]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.count:
            found = boxes(self.shape, self.first, self.first + self.count)
        else:
            found = [(0, (0,) * len(self.shape), (0,) * len(self.shape))]
        self.boxes = [(self.begin + at, Chunk(self.shape, offsets, sizes, self.whole)) for at, offsets, sizes in found]

    def slices(self, flat: Callable[[], Tensor], begin: int) -> list[Slice]:
        """Its boxes in a tensor that lies as `stretch()` does, from its element `begin` on."""
        return [Slice(flat, at - begin, chunk) for at, chunk in self.boxes]

    @property
    def moved(self) -> bool:
        """Whether what the optimizer trains has other memory, which FSDP1 copies into its own in the next forward, or
        (of a flat one) gives up there.
        """
        flat, trained, begin, count = self.stretch(), self.own, self.begin, self.count
        if trained is None:
            begin, count = 0, flat.numel()
        now = self.all if trained is None else trained
        if not count or now.numel() != count:  # gathered
            return False
        return now.data_ptr() != flat.data_ptr() + begin * flat.element_size()


def boxes(shape: tuple[int, ...], first: int, end: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """The boxes that are the elements `first` to `end` of a tensor, in order: where each begins (from `first` on), its
    offsets and its sizes.
    """
    if len(shape) <= 1:
        return [(0, (first,) * len(shape), (end - first,) * len(shape))]
    row = prod(shape[1:])
    found, at = list[tuple[int, tuple[int, ...], tuple[int, ...]]](), first
    while at < end:
        index, inside = divmod(at, row)
        if inside == 0 and (rows := (end - at) // row):
            found.append((at - first, (index, *(0,) * (len(shape) - 1)), (rows, *shape[1:])))
            at += rows * row
            continue
        stop = min(end, (index + 1) * row)
        inner = boxes(shape[1:], inside, stop - index * row)
        found += [(at - first + begin, (index, *offsets), (1, *sizes)) for begin, offsets, sizes in inner]
        at = stop
    return found


class Flats:
    """All of a model's parameters that FSDP1 manages.

    Args:
        root: the model.

    Attributes:
        by_module: id of a module -> its parameters' names, each with what this rank has of it.
        parts: id of what an optimizer trains -> what lies in it.

    Raises:
        Undescribable: this torch keeps them elsewhere, or it cannot be told which elements a rank has.
    """

    def __init__(self, root: nn.Module) -> None:
        self.by_module: dict[int, list[tuple[str, Part]]] = {}
        self.parts: dict[int, list[Part]] = {}
        self._trained: set[int] = set()
        self._groups: set[tuple[tuple[int, ...], ...]] = set()
        for module in root.modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                try:
                    self._add(module, module._handle)
                except AttributeError as error:
                    raise Undescribable(f"FSDP1 of this torch keeps its parameters elsewhere ({error})") from error

    def __bool__(self) -> bool:
        return bool(self.parts)

    def _add(self, module: FullyShardedDataParallel, handle: Any) -> None:
        flat: Any = handle.flat_param
        if getattr(handle, "_fsdp_extension", None) is not None or any(flat._param_extensions):
            raise Undescribable("FSDP1 together with tensor parallelism")
        if not all(flat._contiguities):
            raise Undescribable("FSDP1 with parameters that are not contiguous")
        spread, ranks = handle.uses_sharded_strategy, dist.get_process_group_ranks(handle.process_group)
        across = getattr(module, "_inter_node_pg", None)
        copies, others = [dist.get_rank()] if spread else ranks, list[int]()
        if across is not None:
            others = dist.get_process_group_ranks(across)
            copies = others if spread else copies
        self._groups.add((tuple(ranks), tuple(others)))
        if len(self._groups) > 1:  # experts: ranks that hold the same boxes of them would be taken for equal
            raise Undescribable("FSDP1 over different process groups in one model")
        whole = not spread and len(ranks) == dist.get_world_size()

        def stretch() -> Tensor:
            found: Tensor = getattr(flat, "_local_shard", flat)  # it is there from the first forward on
            return found

        infos = list(zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True))
        places, own = list[tuple[nn.Module, str, Part]](), flat._params or [None] * len(infos)
        for (info, shape, here), parameter in zip(infos, own, strict=True):
            if here.in_shard:
                begin, count, first = here.offset_in_shard, here.numel_in_shard, here.intra_param_start_idx
            else:
                begin, count, first = 0, 0, 0
            part = Part(stretch, begin, count, first, tuple(shape), whole, frozenset(copies), flat, parameter)
            places.append((info.module, info.param_name, part))
        by = {(id(holder), name): part for holder, name, part in places}
        for one in flat._shared_param_infos:
            places.append((one.module, one.param_name, by[id(one.prim_module), one.prim_param_name]))
        for holder, name, part in places:
            self.by_module.setdefault(id(holder), []).append((name, part))
        self._trained |= {id(flat), *(id(one) for one in (*own, *(flat._shared_params or ())) if one is not None)}
        if flat._params is None:
            self.parts[id(flat)] = list(by.values())
        else:
            self.parts |= {id(part.own): [part] for part in by.values()}

    def manages(self, parameter: Tensor) -> bool:
        """Whether it is one of FSDP1's, flat or not."""
        return id(parameter) in self._trained

    def all(self) -> Iterator[Part]:
        """All of them."""
        return chain.from_iterable(self.parts.values())


def let_go(root: nn.Module) -> None:
    """End the use of FSDP1's parameters, as nobody will train them: a backward pass that was broken off leaves hooks
    and views in autograd's nodes, which keep the model alive and which no garbage collector sees.
    """
    for module in root.modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            handle: Any = module._handle
            held = vars(handle.flat_param)
            for hook in held.get("_post_backward_hook_state", ())[-1:]:
                hook.remove()
            for name in held.keys() - {"_local_shard"}:
                del held[name]
            vars(handle).clear()


def stays_alive(root: nn.Module) -> bool:
    """Whether `let_go` may leave it in memory: its hooks sum gradients of ranks that hold the same.

    Seen on gloo where that all-reduce had failed: the model was alive still when the next one was made.
    """
    return is_hybrid(root) or any(
        isinstance(module, FullyShardedDataParallel) and module._handle is not None
        and not module._handle.uses_sharded_strategy for module in root.modules()
    )  # fmt: skip


def is_hybrid(root: nn.Module) -> bool:
    """Whether several groups of ranks have all parts (`HYBRID_SHARD`)."""
    return any(
        isinstance(module, FullyShardedDataParallel) and module._handle is not None
        and getattr(module, "_inter_node_pg", None) is not None for module in root.modules()
    )  # fmt: skip


class Pieces:
    """What this rank has of a tensor, in several boxes, to be filled from a checkpoint.

    Attributes:
        shape, dtype: of the whole tensor.
        pieces: each with its place.
    """

    def __init__(self, pieces: list[tuple[Chunk, Tensor]]) -> None:
        self.pieces = [(chunk, tensor) for chunk, tensor in pieces if tensor.numel()]
        chunk, tensor = pieces[0]
        self.shape, self.dtype, self.device = torch.Size(chunk.shape), tensor.dtype, tensor.device

    def size(self) -> torch.Size:
        """As of a tensor."""
        return self.shape

    @property
    def nbytes(self) -> int:
        """Of this rank's part."""
        return sum(tensor.nbytes for _, tensor in self.pieces)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """As torch's `_Checkpointable` has it."""
        return [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk, _ in self.pieces]

    def at(self, offsets: Any) -> Tensor:
        """The piece that begins there."""
        return next(tensor for chunk, tensor in self.pieces if chunk.offsets == tuple(offsets))


class Planner(DefaultLoadPlanner):
    """For tensors by their names in the checkpoint, and pieces, which the base takes for values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """As they are."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """As in the base, and pieces."""
        found = self.state_dict[index.fqn]
        return found.at(index.offset) if isinstance(found, Pieces) else super().lookup_tensor(index)


def cast_buffers(
    root: nn.Module, buffers: Mapping[str, Tensor], stored: Callable[[str], tuple[torch.Size, torch.dtype] | None]
) -> None:
    """Have buffers the types in which a checkpoint has them, if FSDP1 will cast them to these in the first forward pass
    (`MixedPrecision(buffer_dtype=...)`).
    """
    types = {getattr(getattr(module, "mixed_precision", None), "buffer_dtype", None) for module in root.modules()}
    for name, buffer in buffers.items() if types - {None} else ():
        found = stored(name)
        if found is not None and found[1] in types and buffer.is_floating_point():
            buffer.data = buffer.to(found[1])


def state_slices(state: Mapping[Any, Any], key: Any, parts: list[Part]) -> list[list[Slice] | None]:
    """What a value of an optimizer's state is for each part of what it trains: boxes, or (None) the same for all.

    Raises:
        Undescribable: a tensor that lies in another way than the parameter, and is no number.
    """
    value, first = state[key], parts[0]
    if not isinstance(value, Tensor) or value.dim() == 0:
        return [None] * len(parts)
    shapes: set[tuple[int, ...]] = {(first.stretch().numel() if first.own is None else first.count,)}
    if first.own is not None and first.count == prod(first.shape):  # not sharded
        shapes.add(first.shape)
    if tuple(value.shape) not in shapes or not value.is_contiguous():
        raise Undescribable(f"{first.name}: the optimizer's {key!r}, of shape {list(value.shape)} where FSDP1's "
                            f"parameter has {min(shapes)}")  # fmt: skip
    return [part.slices(lambda: state[key], 0 if part.own is None else part.begin) for part in parts]
