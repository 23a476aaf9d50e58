"""MindSpeed's patch manager: hooks are registered with it as wrappers where it is loaded (docs/facts/megatron.md §4).

It applies a patch by building `wrapper(...wrapper(replacement or original))` anew and setting it in every module
that holds the function of before; names that end in `wrapper` stack, all others replace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lastgasp.adapter import Undo

MODULE = "mindspeed.patch_utils"


def manager() -> Any | None:
    """MindSpeedPatchesManager, or None if MindSpeed is not loaded or has an unknown interface."""
    found = getattr(sys.modules.get(MODULE), "MindSpeedPatchesManager", None)
    known = all(hasattr(found, name) for name in ("patches_info", "register_patch", "apply_patches"))
    return found if found is not None and known else None


def register(path: str, wrapper: Callable[[Any], Any]) -> None:
    """Register `wrapper` for the function at the dotted `path` and apply that one patch. Idempotent."""
    patches, (home, _, name) = manager(), path.rpartition(".")
    if patches is None or not callable(getattr(sys.modules.get(home), name, None)):
        return  # MindSpeed would create the name
    patch = patches.patches_info.get(path)
    if patch is not None and wrapper in patch.wrappers and patch.is_applied:
        return
    patches.register_patch(path, wrapper)
    patches.patches_info[path].apply_patch()


def unregister(path: str, wrapper: Callable[[Any], Any]) -> None:
    """Remove `wrapper` and apply the others."""
    patches = manager()
    patch = patches.patches_info.get(path) if patches is not None else None
    if patch is not None and wrapper in patch.wrappers:
        patch.wrappers.remove(wrapper)
        patch.is_applied = False
        patch.apply_patch()


def after_apply(then: Callable[[], None]) -> Undo:
    """Call `then` after each `apply_patches`, which undoes and redoes what others have put in place."""
    patches = manager()
    if patches is None:
        return lambda: None
    original, call = vars(patches)["apply_patches"], patches.apply_patches

    def apply_patches(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        then()
        return result

    ours = patches.apply_patches = staticmethod(apply_patches)

    def undo() -> None:
        if vars(patches).get("apply_patches") is ours:
            patches.apply_patches = original

    return undo
