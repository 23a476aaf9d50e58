"""Loaded when Python starts, through `_lastgasp_boot.pth`: waits for somebody to import MindSpore, and costs nothing.

Only then is the plugin imported, so that `lastgasp: {enable: True}` in MindFormers' YAML is seen with no edit of any
script. A process that never imports MindSpore loads nothing else of lastgasp's. `LASTGASP=0` takes even this away.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="assignment, arg-type"
# No annotations here: every start of Python would pay for importing typing.

import os
import sys

_NAME = "mindspore"


class _Watch:
    """A finder in front of all others that knows one name; it removes itself once that has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != _NAME:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)  # old ones have none
            spec = find(name, path, target) if find else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader:
    """The real loader, with the plugin after it; leaves no trace in the module."""

    def __init__(self, real, watch):
        self._real, self._watch = real, watch

    def __getattr__(self, name):
        return getattr(self._real, name)

    def create_module(self, spec):
        return self._real.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._real
        self._real.exec_module(module)
        if self._watch in sys.meta_path:
            sys.meta_path.remove(self._watch)
        _install()


def _install() -> None:
    """Nothing that goes wrong here may stop a program that did not ask for lastgasp."""
    try:
        from lastgasp_mindformers import install

        install()
    except Exception as error:
        if os.environ.get("LASTGASP"):
            raise
        sys.stderr.write(f"lastgasp: MindSpore jobs of this process are not protected: {error!r}\n")


if os.environ.get("LASTGASP") != "0":
    sys.meta_path.insert(0, _Watch())
