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

        place = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lastgasp_mindio", "dropin")
        return PathFinder.find_spec(name, [place])


if os.environ.get("LASTGASP") != "0":
    sys.meta_path.insert(0, _Finder)
