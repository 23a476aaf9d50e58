"""Stand-in for MindSpeed's patch manager: what it does to modules, in our own words (docs/facts/megatron.md §4)."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar


def _stacks(function: Any) -> bool:
    return str(getattr(function, "__name__", "")).endswith(("wrapper", "decorator"))


class Patch:
    """One function: a replacement, and wrappers around it."""

    def __init__(self, path: str, function: Any) -> None:
        self.home, _, self.name = path.rpartition(".")
        self.path = path
        self.original: Any = None
        self.replacement: Any = None
        self.final: Any = None
        self.wrappers: list[Any] = []
        self.is_applied = False
        self.set_patch_func(function)

    def set_patch_func(self, function: Any, force: bool = False) -> None:
        """A wrapper stacks, anything else replaces; a second replacement is an error."""
        if _stacks(function):
            if function not in self.wrappers:
                self.wrappers.append(function)
        elif self.replacement is not None and not force:
            raise RuntimeError(f"the patch of {self.name} exist !")
        else:
            self.replacement = function
        self.is_applied = False

    def apply_patch(self) -> None:
        """Build the function anew and put it wherever the current one is held under its name."""
        if self.is_applied:
            return
        module = importlib.import_module(self.home)
        current = getattr(module, self.name)
        self.original = self.original or current
        final = self.replacement or self.original
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(module, self.name, final)
        _swap(self.name, current, final, lambda module: True)
        self.final, self.is_applied = final, True

    def remove_patch(self) -> None:
        """Put the original back where the built one is held; MindSpeed's own modules keep what they have."""
        _swap(self.name, self.final, self.original, lambda module: "mindspeed" not in module)
        self.replacement = self.final = None
        self.is_applied = False


def _swap(name: str, old: Any, new: Any, where: Callable[[str], bool]) -> None:
    for key, module in list(sys.modules.items()):
        if where(key) and isinstance(module, ModuleType) and old is not None and vars(module).get(name) is old:
            setattr(module, name, new)


class MindSpeedPatchesManager:
    """All patches."""

    patches_info: ClassVar[dict[str, Patch]] = {}

    @staticmethod
    def register_patch(path: str, function: Any = None, force_patch: bool = False, create_dummy: bool = False) -> None:
        """Takes effect with `apply_patches`."""
        if path in MindSpeedPatchesManager.patches_info:
            MindSpeedPatchesManager.patches_info[path].set_patch_func(function, force_patch)
        else:
            MindSpeedPatchesManager.patches_info[path] = Patch(path, function)

    @staticmethod
    def apply_patches() -> None:
        """Apply what is new."""
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.apply_patch()

    @staticmethod
    def remove_patches() -> None:
        """Remove all, with all wrappers."""
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove_patch()
            patch.wrappers.clear()
