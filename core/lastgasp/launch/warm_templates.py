"""torch 2.7 writes code for its remote modules when it is imported, into a temporary folder of the process.

torch's compiler brings that import, and the first step of any optimizer brings the compiler. Ranks that are forked must
not share the folder: the first one that ends removes it. So the warm process keeps none, and each rank makes its own.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lastgasp.gasp.imported import TEMPLATES, templates_in
from lastgasp.launch.warm_checks import importing

_GENERATED = "_remote_module_non_scriptable"
_FROM_TEMPFILE = ("_name_sequence", "tempdir")


@contextmanager
def without_templates(modules: Collection[str]) -> Iterator[None]:
    """That folder, made by an import inside, is gone at the end, and `tempfile` is as if it had never been made.

    Args:
        modules: names of what will be imported.
    """
    if TEMPLATES not in modules:
        yield
        return
    import tempfile

    kind = tempfile.TemporaryDirectory
    original = kind.__init__

    def init(self: Any, *args: Any, **more: Any) -> None:
        if importing(sys._getframe(1)) != TEMPLATES:
            return original(self, *args, **more)
        before = {name: vars(tempfile)[name] for name in _FROM_TEMPFILE}
        try:
            original(self, *args, **more)
        finally:
            vars(tempfile).update(before)

    kind.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__init__ = original  # type: ignore[method-assign]
        if templates_in(sys.modules):
            folder = vars(sys.modules[TEMPLATES])["_TEMP_DIR"]
            atexit.unregister(folder.cleanup)
            folder.cleanup()


def renew_templates(modules: Mapping[str, Any]) -> None:
    """In a forked rank: make the folder that a fresh interpreter would have made, in the same place of the path."""
    if not (old := templates_in(modules)):
        return
    module = importlib.reload(modules[TEMPLATES])
    new = sys.path.pop()
    sys.path[:] = [new if one == old else one for one in sys.path]
    if (generated := modules.get(_GENERATED)) is not None:
        module.instantiate_non_scriptable_remote_module_template()
        generated.__file__ = generated.__spec__.origin = os.path.join(new, f"{_GENERATED}.py")
