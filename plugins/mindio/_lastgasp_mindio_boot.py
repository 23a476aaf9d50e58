"""Loaded when Python starts, through `_lastgasp_mindio_boot.pth`: lets `import mindio_ttp` find the drop-in.

That lies inside of `lastgasp_mindio`, so that installing it overwrites nothing of the real package. Where that is
installed, too, the drop-in refuses when it is imported. `LASTGASP=0` takes this away.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# No annotations here: every start of Python would pay for importing typing.

import os
import sys

_NAME = "mindio_ttp"


class _Finder:
    """In front of all others, for one name."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != _NAME:
            return None
        from importlib.machinery import PathFinder
        from importlib.util import find_spec

        plugin = find_spec("lastgasp_mindio")  # in an editable installation it lies elsewhere than this file
        if plugin is None or plugin.submodule_search_locations is None:
            return None
        places = [os.path.join(place, "dropin") for place in plugin.submodule_search_locations]
        return PathFinder.find_spec(name, places)


if os.environ.get("LASTGASP") != "0":
    sys.meta_path.insert(0, _Finder)
