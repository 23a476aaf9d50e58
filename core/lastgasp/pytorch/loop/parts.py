"""The objects given as model, optimizer or scheduler: one, several, or several with names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastgasp.errors import ConfigError


@dataclass(frozen=True)
class Parts:
    """Objects of one role, by name.

    Args:
        role: `model`, `optimizer`, ... : the key in the checkpoint.
        items: name -> object.
        single: one object was given without a name; its state is stored without one as well.
    """

    role: str
    items: dict[str, Any]
    single: bool = False

    @classmethod
    def of(cls, role: str, given: Any, needs: str) -> Parts:
        """Normalise what was given; None means no objects.

        Args:
            needs: the attribute that each object must have.

        Raises:
            ConfigError: an object without `needs`, or the same object twice.
        """
        if given is None:
            return cls(role, {})
        if isinstance(given, Mapping):
            items, single = {str(name): item for name, item in given.items()}, False
        elif isinstance(given, list | tuple):
            items, single = {str(i): item for i, item in enumerate(given)}, False
        else:
            items, single = {role: given}, True
        for name, item in items.items():
            if not hasattr(item, needs) or "." in name:
                allowed = f"an object with {needs}(), a list of them or a dict of them (names without dots)"
                raise ConfigError(role, f"{name}: {type(item).__name__}", allowed, "See docs/plain-loop.md.")
        if len({id(item) for item in items.values()}) < len(items):
            raise ConfigError(role, list(items), "each object once", "Remove the second one.")
        return cls(role, items, single)

    def __bool__(self) -> bool:
        return bool(self.items)

    def label(self, name: str) -> str:
        """An object by its name, for people."""
        return self.role if self.single else f"{self.role} {name}"

    def values(self) -> Iterable[Any]:
        """The objects, in the order they were given."""
        return self.items.values()

    def pack(self, values: Iterable[Any]) -> Any:
        """One value per object, as stored in a checkpoint; None if there is no object."""
        found = dict(zip(self.items, values, strict=True))
        if not found:
            return None
        return next(iter(found.values())) if self.single else found

    def unpack(self, stored: Any) -> dict[str, Any] | None:
        """The stored values by name; None if they belong to other objects."""
        if self.single:
            return None if stored is None else {self.role: stored}
        found = stored if isinstance(stored, dict) else {}
        return found if set(found) == set(self.items) else None


def inner(given: Any, attribute: str, needs: str) -> Any:
    """`given`, with what `Accelerator.prepare` and others wrap around an object taken off: it has the hooks and counts.

    Args:
        given: one object, a list or a dict of them, or None.
        attribute: of a wrapper, where it has the object.
        needs: the attribute that a wrapper lacks and that the object has. Where nothing has it, `given` is returned.
    """
    if isinstance(given, Mapping):
        return {name: inner(item, attribute, needs) for name, item in given.items()}
    if isinstance(given, list | tuple):
        return [inner(item, attribute, needs) for item in given]
    found = given
    while found is not None and not hasattr(found, needs):
        found = getattr(found, attribute, None)
    return given if found is None else found


_FABRIC = {"_FabricModule": "_forward_module", "_FabricOptimizer": "optimizer"}
"""Classes of Lightning Fabric's wrappers, and where each has the object that it wraps."""


def without_fabric(given: Any) -> Any:
    """`given`, one object, a list or a dict of them, without what Lightning's `Fabric.setup` wraps around each."""
    if isinstance(given, Mapping):
        return {name: without_fabric(item) for name, item in given.items()}
    if isinstance(given, list | tuple):
        return [without_fabric(item) for item in given]
    attribute = _fabric_attribute(given)
    return getattr(given, attribute) if attribute else given


def fabric_scaler(given: Any) -> Any:
    """The `GradScaler` that Fabric makes for precision "16-mixed"; None if there is none."""
    for one in given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else [given]:
        if _fabric_attribute(one):
            return getattr(one._strategy.precision, "scaler", None)
    return None


def _fabric_attribute(given: Any) -> str:
    return next((_FABRIC[kind.__name__] for kind in type(given).__mro__ if kind.__name__ in _FABRIC), "")


def without_containers(given: Any) -> tuple[Any, list[Any]]:
    """`given`, with the optimizers that others hold in `optimizers` in place of those (torchtitan's
    `OptimizersContainer`), and those: the ones inside make the updates and have all states.

    One that trains parameters besides theirs stays.

    Args:
        given: one optimizer, a list or a dict of them, or None.
    """
    if not isinstance(given, Mapping | list | tuple):
        held = _held_by(given)
        return (held[0] if len(held) == 1 else held, [given]) if held else (given, [])
    found, outer = list[tuple[Any, Any]](), list[Any]()
    for name, item in given.items() if isinstance(given, Mapping) else enumerate(given):
        held = _held_by(item)
        outer += [item] if held else []
        found += [(f"{name}[{i}]", one) for i, one in enumerate(held)] if len(held) > 1 else [(name, *(held or [item]))]
    return dict(found) if isinstance(given, Mapping) else [one for _, one in found], outer


def _held_by(optimizer: Any) -> list[Any]:
    held = getattr(optimizer, "optimizers", None)
    if not isinstance(held, list | tuple) or not all(hasattr(one, "param_groups") for one in held):
        return []
    theirs = {id(p) for one in held for group in one.param_groups for p in group["params"]}
    groups = getattr(optimizer, "param_groups", ())
    whole = all(id(p) in theirs for group in groups for p in group["params"] if p.requires_grad)
    return list(held) if theirs and whole else []


def unwrapped(module: Any) -> nn.Module:
    """The user's module inside DDP and `torch.compile`."""
    while True:
        module = without_fabric(module)  # compiled behind its `setup`
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            assert isinstance(module, nn.Module)
            return module


def ddp_of(module: Any) -> DistributedDataParallel | None:
    """The DDP wrapper of a module, if it has one."""
    while not isinstance(module, DistributedDataParallel):
        if not hasattr(module, "_orig_mod"):
            return None
        module = without_fabric(module._orig_mod)
    return module


def under_join(state: Any) -> bool:
    """Whether a loop trains inside of torch's `Join`, or has. Ranks have different numbers of batches then.

    Args:
        state: the `TorchState`.
    """
    joinable = [*map(ddp_of, state.models.values()), *state.optimizers.values()]
    return any(one._join_config.enable for one in joinable if hasattr(one, "_join_config"))
