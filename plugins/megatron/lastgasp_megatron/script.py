"""What the user's script keeps in variables of its modules: a `pretrain` that is called again finds them as the first.

A restart does so, too. A survivor that went on with its own would disagree with the new process: in a counter, or in
random numbers that all ranks are to draw alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import _lru_cache_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any

from lastgasp.adapter.again import ONCE, Places, Root, UserValues, is_users_module


class ScriptValues(UserValues):
    """Of the script, and of the modules that stand beside it or below.

    Args:
        known: what is put back elsewhere, such as Megatron's arguments.
    """

    def __init__(self, known: Iterable[object]) -> None:
        self._modules = _modules()
        super().__init__([_root(name, module) for name, module in self._modules.items()], known, ONCE)
        self._unused = [one for one in _memoized(self._modules) if not one.cache_info().currsize]
        self.take()
        if self.big:  # is known by its content from the second look on
            self.take()

    def cannot(self) -> str:
        """As of the base; a module that was imported since may have left something in another one's variables."""
        late = sorted(_modules().keys() - self._modules.keys())
        return f"{late[0]} was imported after pretrain() was called" if late else super().cannot()

    def put_back(self, entered: bool = False, before: Places | None = None, now: Places | None = None) -> None:
        """As of the base; functions that remember results, such as a loss or a loader made once, begin without any."""
        super().put_back(entered, before, now)
        for one in self._unused:
            one.cache_clear()


def _root(name: str, module: ModuleType) -> Root:
    return Root(name, module, frozenset(one for one in vars(module) if one.startswith("__")) | {"__warningregistry__"})


def _memoized(modules: dict[str, ModuleType]) -> Iterator[_lru_cache_wrapper[Any]]:
    """The functions under functools.lru_cache of these modules and of their classes."""
    for name, module in modules.items():
        for one in list(vars(module).values()):
            own = list(vars(one).values()) if isinstance(one, type) and one.__module__ == name else [one]
            for value in own:
                found = getattr(value, "__func__", value)
                if isinstance(found, _lru_cache_wrapper) and getattr(found, "__module__", name) == name:
                    yield found


def _modules() -> dict[str, ModuleType]:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return {}
    folder = Path(script).absolute().parent
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and is_users_module(name) and folder in Path(file).absolute().parents:
            found[name] = module
    return found
