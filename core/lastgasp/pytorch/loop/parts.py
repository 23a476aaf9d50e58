"""What a user gives as model, optimizer, scheduler: one object, several, or several with names."""

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
        single: one object was given without a name; its state then stands in the checkpoint without one, too.
    """

    role: str
    items: dict[str, Any]
    single: bool = False

    @classmethod
    def of(cls, role: str, given: Any, needs: str) -> Parts:
        """Sort out what was given; None is nothing.

        Args:
            needs: an attribute that each object must have.

        Raises:
            ConfigError: something that has no `needs`, or one object twice.
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
        """One value per object, as it stands in a checkpoint; None where there is no object."""
        found = dict(zip(self.items, values, strict=True))
        if not found:
            return None
        return next(iter(found.values())) if self.single else found

    def unpack(self, stored: Any) -> dict[str, Any] | None:
        """The stored values by name; None where they are those of other objects."""
        if self.single:
            return None if stored is None else {self.role: stored}
        found = stored if isinstance(stored, dict) else {}
        return found if set(found) == set(self.items) else None


def unwrapped(module: Any) -> nn.Module:
    """The user's own module inside of DDP and `torch.compile`."""
    while True:
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
        module = module._orig_mod
    return module
