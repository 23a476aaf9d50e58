"""Where the tests run must not matter: `git clone` calls a checkout `lastgasp`, and so may a home be called."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def without_places(output: str, *more: Path) -> str:
    """`output` without the folders of the checkout, of this Python and of `more`: for who looks for a word in it."""
    places = {str(path) for one in (ROOT, Path(sys.prefix), *more) for path in (one, one.absolute(), one.resolve())}
    for place in sorted(places, key=len, reverse=True):
        output = output.replace(place, "")
    return output
