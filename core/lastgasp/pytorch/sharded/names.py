"""Walks models and optimizers: where each tensor is now, and the name that `torch.distributed.checkpoint` gives it.

The names are those of `get_model_state_dict` and `get_optimizer_state_dict` (torch 2.13), found without a call of
`state_dict()`: that one reshards parameters, and must not run beside a training thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lastgasp.pytorch.sharded.flat import INNER, Flats, Part, Pieces, Slice, state_slices
from lastgasp.pytorch.sharded.table import Chunk, Group, Path, Undescribable
from lastgasp.pytorch.zero import inside, is_zero

MODEL, OPTIMIZER = "model", "optimizer"
EXTRA = "_extra_state"
_CHECKPOINTED, _COMPILED, _DDP = "_checkpoint_wrapped_module", "_orig_mod", "module"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or another value of the state, and where it is kept now.

    Attributes:
        path: where it is in the state dictionary.
        holder, key: it is `holder[key]`; for what FSDP manages, `holder.sharded_param` with an empty key.
        buffer: key in the `state_dict` of the container, for a module's buffer.
        alone: no other rank holds it, although it is no part of a larger tensor.
        part_of: a plain tensor that holds this rank's part alone, as this DTensor is spread over the ranks.
        chunk: its place in a larger tensor, where no DTensor tells it (FSDP1); others may have the same path.
    """

    path: Path
    holder: Any
    key: Any = None
    buffer: str = ""
    alone: bool = False
    part_of: DTensor | None = None
    chunk: Chunk | None = None

    @property
    def spread(self) -> Any:
        """It, as the DTensor that it is for the checkpoint."""
        make: Any = DTensor
        return self.value if self.part_of is None else make(self.value, self.part_of._spec, requires_grad=False)

    @property
    def value(self) -> Any:
        """It, as it stands."""
        return self.holder.sharded_param if self.key is None else self.holder[self.key]

    @property
    def name(self) -> str:
        """The name in the checkpoint."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True)
class ExtraState:
    """A module with `get_extra_state`."""

    path: Path
    module: nn.Module


def root_of(models: Mapping[str, nn.Module], single: bool) -> nn.Module:
    """What torch's functions are given as the model: it, or a container of all of them."""
    return next(iter(models.values())) if single else nn.ModuleDict(dict(models))


def modules_of(root: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Each module: its prefix in `state_dict`, the prefix without wrappers, and it. Shared ones come several times."""
    yield from _walk(root, "", "")


def _walk(module: nn.Module, raw: str, clean: str) -> Iterator[tuple[str, str, nn.Module]]:
    yield raw, clean, module
    for name, child in module._modules.items():
        if child is not None:
            inside_ddp = name == _DDP and isinstance(module, DistributedDataParallel)
            transparent = inside_ddp or name in (_CHECKPOINTED, _COMPILED, INNER)
            yield from _walk(child, f"{raw}{name}.", clean if transparent else f"{clean}{name}.")


def model_leaves(root: nn.Module, prefix: str, flats: Flats | None = None) -> tuple[list[Leaf], list[ExtraState]]:
    """Parameters, persistent buffers and extra states. Parameters that FSDP manages are found while gathered, too.

    Args:
        prefix: begins the names of the buffers in the container (`TorchState.container`).
        flats: of the root.

    Raises:
        Undescribable: this torch keeps them elsewhere.
    """
    managed, leaves, extra = _managed(root), list[Leaf](), list[ExtraState]()
    flats = Flats(root) if flats is None else flats
    for raw, clean, module in modules_of(root):
        for name, part in flats.by_module.get(id(module), ()):
            part.name = part.name or clean + name
            leaves += _boxes((MODEL, clean + name), part.slices(part.stretch, 0))
        for name, value in module._parameters.items():
            if value is not None and not flats.manages(value):
                owner = managed.get((id(module), name))
                path = (MODEL, clean + name)
                leaves.append(Leaf(path, module._parameters, name) if owner is None else Leaf(path, owner))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                leaves.append(Leaf((MODEL, clean + name), module._buffers, name, prefix + raw + name))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extra.append(ExtraState((MODEL, clean + EXTRA), module))
    return leaves, extra


class Whole(NamedTuple):
    """A parameter, over all ranks; the same on all of them, whatever is gathered just now."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool


def whole_parameters(root: nn.Module) -> list[Whole]:
    """All of a model's, by name."""
    flats = Flats(root)
    leaves = [leaf for leaf in model_leaves(root, "", flats)[0] if not leaf.buffer]
    trained = {part.name: (part.all if part.own is None else part.own).requires_grad for part in flats.all()}
    rows = {(str(leaf.path[-1]), tuple(leaf.chunk.shape if leaf.chunk else leaf.value.shape), str(leaf.value.dtype),
             leaf.chunk is None and leaf.value.requires_grad) for leaf in leaves}  # fmt: skip
    return [Whole(name, shape, dtype, trained.get(name, alone)) for name, shape, dtype, alone in sorted(rows)]


def _managed(root: nn.Module) -> dict[tuple[int, str], Any]:
    """The parameters that `fully_shard` manages, by module and name."""
    found = {}
    for module in root.modules():
        if isinstance(module, FSDPModule):
            try:
                state = module._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None)
                if groups is None:  # before torch 2.12
                    groups = [group for group in [state._fsdp_param_group] if group is not None]
                for one in (param for group in groups for param in group.fsdp_params):
                    info = one._module_info
                    places = [(info.module, info.param_name)]
                    places += zip(info.shared_modules, info.shared_param_names, strict=True)
                    found.update({(id(holder), name): one for holder, name in places})
            except AttributeError as error:
                raise Undescribable(f"fully_shard of this torch keeps its parameters elsewhere ({error})") from error
    return found


def _boxes(path: Path, slices: list[Slice]) -> list[Leaf]:
    return [Leaf(path, one, chunk=one.chunk) for one in slices]


class Names:
    """The names that a model's parameters have in it first.

    Args:
        leaves: of the model; flats: of FSDP1.
    """

    def __init__(self, leaves: list[Leaf], flats: Flats) -> None:
        self.flats, self._names = flats, dict[int, str]()
        for leaf in leaves:
            if not leaf.buffer and leaf.chunk is None:
                self._names.setdefault(id(leaf.value), str(leaf.path[-1]))

    def of(self, parameter: Tensor) -> tuple[str, ...]:
        """Those of what an optimizer trains: of all that lies in it, for a flat one; none if it is not the model's."""
        if parts := self.flats.parts.get(id(parameter)):
            return tuple(part.name for part in parts)
        name = self._names.get(id(parameter))
        return () if name is None else (name,)

    def all(self) -> set[str]:
        """All of them."""
        return {*self._names.values(), *(part.name for part in self.flats.all())}

    @cached_property
    def elsewhere(self) -> frozenset[str]:
        """Those for which an optimizer has nothing here, as others have all of their elements."""
        return frozenset(part.name for part in self.flats.all() if part.own is not None and not part.count)


def names_of(root: nn.Module, prefix: str) -> tuple[list[Leaf], list[ExtraState], Names]:
    """`model_leaves`, and their names."""
    flats = Flats(root)
    leaves, extra = model_leaves(root, prefix, flats)
    return leaves, extra, Names(leaves, flats)


def targets(leaves: list[Leaf]) -> dict[str, Any]:
    """All by their names, what is to be filled in several boxes as one."""
    found = {leaf.name: leaf.spread for leaf in leaves if leaf.chunk is None}
    pieces = dict[str, list[tuple[Chunk, Tensor]]]()
    for leaf in leaves:
        if leaf.chunk is not None:
            pieces.setdefault(leaf.name, []).append((leaf.chunk, leaf.value))
    return found | {name: Pieces(some) for name, some in pieces.items()}


def optimizer_path(name: str, single: bool) -> Path:
    """Where an optimizer is in the state dictionary."""
    return (OPTIMIZER,) if single else (OPTIMIZER, name)


def optimizer_leaves(
    optimizer: Any, at: Path, names: Names, *, parts_too: bool = True
) -> tuple[list[Leaf], list[Group]]:
    """The state of each parameter, tensors and others, and the parameter groups.

    Args:
        parts_too: plain tensors of which each rank has a part are told from whole ones.

    Raises:
        Undescribable: it holds a parameter that is not in the model.
    """
    leaves, groups, states = list[Leaf](), list[Group](), inside(optimizer).state
    spread = list[tuple[Leaf, DTensor]]()
    for number, group in enumerate(optimizer.param_groups):
        params = list[str]()
        for parameter in group["params"]:
            found = names.of(parameter)
            if not found:
                shape = list(parameter.shape)
                raise Undescribable(f"a parameter of shape {shape} in {type(optimizer).__name__} that is not among the "
                                    "model's (was the optimizer made before the model was sharded?)")  # fmt: skip
            params += found
            state = states.get(parameter)
            if state and (flat := names.flats.parts.get(id(parameter))):
                leaves += _of_flat(state, (*at, "state"), flat)
            elif state:
                own = list(_inside(state, (*at, "state", *found)))
                leaves += own
                if isinstance(parameter, DTensor):
                    spread += [(leaf, parameter) for leaf in own]
        groups.append(Group((*at, "param_groups", number), tuple(params)))
    common = [key for key in states if not isinstance(key, Tensor)]  # of no parameter: a counter of all updates
    leaves += (leaf for key in common for leaf in _inside(states, (*at, "state"), key))
    if is_zero(optimizer):
        return [replace(leaf, alone=True) for leaf in leaves], groups
    parts = _parts(spread, len(at) + 2) if parts_too else {}
    return [replace(leaf, part_of=parts.get(leaf.path)) for leaf in leaves], groups


def _of_flat(state: Any, at: Path, parts: list[Part]) -> Iterator[Leaf]:
    """The state of what FSDP1 has the optimizer train, for each parameter in it.

    Where the optimizer trains parameters (`use_orig_params=True`), a rank has no state of those that others have alone.
    """
    for key in state:
        if isinstance(state[key], Mapping | list):
            raise Undescribable(f"{parts[0].name}: the optimizer's {key!r} is nested, which FSDP1 does not support")
        for part, slices in zip(parts, state_slices(state, key, parts), strict=True):
            path = (*at, part.name, str(key))
            alone = part.own is not None and not part.whole
            yield from [Leaf(path, state, key, alone=alone)] if slices is None else _boxes(path, slices)


def _parts(spread: list[tuple[Leaf, DTensor]], depth: int) -> dict[Path, DTensor]:
    """Plain tensors that an optimizer keeps of its own part of a parameter (`zeros_like(p.to_local())`), and of which.

    A tensor of that shape may be so by chance, and be whole on another rank: it counts if those of all parameters are.
    """
    found: dict[Path, list[tuple[Leaf, DTensor]]] = {}
    for leaf, parameter in spread:
        if isinstance(leaf.value, Tensor) and not isinstance(leaf.value, DTensor):
            found.setdefault(leaf.path[depth:], []).append((leaf, parameter))
    parts = dict[Path, DTensor]()
    for pairs in found.values():
        if all(leaf.value.shape == parameter._local_tensor.shape for leaf, parameter in pairs):
            parts |= {leaf.path: parameter for leaf, parameter in pairs}
    return parts


def _inside(held: Any, at: Path, *only: Any) -> Iterator[Leaf]:
    """The leaves of nested dictionaries, and of lists that hold tensors, as torch's `flatten_state_dict` finds them."""
    items = held.items() if isinstance(held, Mapping) else enumerate(held)
    for key, value in [(key, held[key]) for key in only] if only else items:
        path = (*at, key if isinstance(held, list) else str(key))
        if isinstance(value, Mapping) or (isinstance(value, list) and _opens(value)):
            yield from _inside(value, path)
        else:
            yield Leaf(path, held, key)


def _opens(values: list[Any]) -> bool:
    return any(isinstance(v, Tensor | Mapping) or (isinstance(v, list) and _opens(v)) for v in values)
