"""Resilience for scripts that import `pytorch_lightning`: `Trainer(callbacks=[LastGasp("ckpts")])`.

Lightning is published under two names, `lightning.pytorch` and `pytorch_lightning`, each with classes of its own, from
the same source. So is this plugin: the modules of this package are those of `lastgasp_lightning`, with the other names.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lastgasp_lightning import LastGasp, last_good

__all__ = ["LastGasp", "last_good"]

_SOURCE = "lastgasp_lightning"
_NAMES = (
    (re.compile(rf"\b{_SOURCE}\b"), __name__),
    (re.compile(r"\blightning\.pytorch\b"), "pytorch_lightning"),
    (re.compile(r"\blightning\.fabric\b"), "lightning_fabric"),
    (re.compile(r"^import lightning$", re.MULTILINE), "import pytorch_lightning as lightning"),
)


class _Loader(SourceFileLoader):
    """Compiles a module of the other package; nothing is cached, as its cache is that of the other names."""

    def get_code(self, fullname: str) -> CodeType:
        """With the names of this one; lines stay where they are."""
        text = Path(self.path).read_text(encoding="utf-8")
        for name, other in _NAMES:
            text = name.sub(other, text)
        code: CodeType = compile(text, self.path, "exec", dont_inherit=True)
        return code


class _Finder(MetaPathFinder):
    """Knows the modules of this package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where the module of that name is in the other package."""
        package, _, name = fullname.rpartition(".")
        if package != __name__:
            return None
        for folder in __path__:
            if (file := Path(folder) / f"{name}.py").is_file():
                return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, str(file)))
        return None


def _folders() -> list[str]:
    found = importlib.util.find_spec(_SOURCE)
    assert found is not None and found.submodule_search_locations is not None  # one distribution
    return [*found.submodule_search_locations]


__path__ = _folders()
sys.meta_path.insert(0, _Finder())
_Loader(__name__, str(Path(__path__[0]) / "__init__.py")).exec_module(sys.modules[__name__])
