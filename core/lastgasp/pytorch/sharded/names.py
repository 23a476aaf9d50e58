"""Walks models and optimizers: where each tensor is now, and the name that `torch.distributed.checkpoint` gives it.

The names are those of `get_model_state_dict` and `get_optimizer_state_dict` (torch 2.13), found without a call of
`state_dict()`: that one reshards parameters, and must not run beside a training thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lastgasp.pytorch.sharded.table import Group, Path, Undescribable
from lastgasp.pytorch.zero import inside, is_zero

MODEL, OPTIMIZER = "model", "optimizer"
EXTRA = "_extra_state"
_CHECKPOINTED, _COMPILED, _DDP = "_checkpoint_wrapped_module", "_orig_mod", "module"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or another value of the state, and where it is kept now.

    Attributes:
        path: where it is in the state dictionary.
        holder, key: it is `holder[key]`; for a parameter of `fully_shard`, `holder.sharded_param` with an empty key.
        buffer: key in the `state_dict` of the container, for a module's buffer.
        alone: no other rank holds it, although it is no part of a larger tensor.
        part_of: a plain tensor that holds this rank's part alone, as this DTensor is spread over the ranks.
    """

    path: Path
    holder: Any
    key: Any = None
    buffer: str = ""
    alone: bool = False
    part_of: DTensor | None = None

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
            transparent = (
                name in (_CHECKPOINTED, _COMPILED) or (name == _DDP and isinstance(module, DistributedDataParallel))
            )
            yield from _walk(child, f"{raw}{name}.", clean if transparent else f"{clean}{name}.")


def model_leaves(root: nn.Module, prefix: str) -> tuple[list[Leaf], list[ExtraState]]:
    """Parameters, persistent buffers and extra states. Parameters of `fully_shard` are found while gathered, too.

    Args:
        prefix: begins the names of the buffers in the container (`TorchState.container`).

    Raises:
        Undescribable: this torch keeps them elsewhere.
    """
    managed, leaves, extra = _managed(root), list[Leaf](), list[ExtraState]()
    for raw, clean, module in modules_of(root):
        for name, value in module._parameters.items():
            if value is not None:
                owner = managed.get((id(module), name))
                path = (MODEL, clean + name)
                leaves.append(Leaf(path, module._parameters, name) if owner is None else Leaf(path, owner))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                leaves.append(Leaf((MODEL, clean + name), module._buffers, name, prefix + raw + name))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extra.append(ExtraState((MODEL, clean + EXTRA), module))
    return leaves, extra


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


def names_of(leaves: list[Leaf]) -> dict[int, str]:
    """`id` of a parameter -> its first name in the model."""
    found: dict[int, str] = {}
    for leaf in leaves:
        if not leaf.buffer:
            found.setdefault(id(leaf.value), str(leaf.path[-1]))
    return found


def optimizer_path(name: str, single: bool) -> Path:
    """Where an optimizer is in the state dictionary."""
    return (OPTIMIZER,) if single else (OPTIMIZER, name)


def optimizer_leaves(
    optimizer: Any, at: Path, names: Mapping[int, str], *, parts_too: bool = True
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
        params = []
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                shape = list(parameter.shape)
                raise Undescribable(f"a parameter of shape {shape} in {type(optimizer).__name__} that is not among the "
                                    "model's (was the optimizer made before fully_shard?)")  # fmt: skip
            params.append(name)
            state = states.get(parameter)
            if state:
                own = list(_inside(state, (*at, "state", name)))
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
