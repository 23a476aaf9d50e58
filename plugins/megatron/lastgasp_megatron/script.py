"""What the user's script keeps in variables of its modules: a `pretrain` that is called again finds them as the first.

A restart does so, too. A survivor that went on with its own would disagree with the new process: in a counter, or in
random numbers that all ranks are to draw alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from lastgasp.adapter.again import ONCE, Root, UserValues, is_users_module


class ScriptValues(UserValues):
    """Of the script, and of the modules that stand beside it or below.

    Args:
        known: what is put back elsewhere, such as Megatron's arguments.
    """

    def __init__(self, known: Iterable[object]) -> None:
        self._modules = _modules()
        super().__init__([_root(name, module) for name, module in self._modules.items()], known, ONCE)
        self.take()
        if self.big:  # is known by its content from the second look on
            self.take()

    def cannot(self) -> str:
        """As of the base; a module that was imported since may have left something in another one's variables."""
        late = sorted(_modules().keys() - self._modules.keys())
        return f"{late[0]} was imported after pretrain() was called" if late else super().cannot()


def _root(name: str, module: ModuleType) -> Root:
    return Root(name, module, frozenset(one for one in vars(module) if one.startswith("__")) | {"__warningregistry__"})


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
