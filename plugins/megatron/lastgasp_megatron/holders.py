"""Which module attributes hold a function. Found by identity, since `from x import f` makes copies of the name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

Function = Any
"""A callable of Megatron's; its signature changes from version to version and is never declared here."""
Holder = tuple[ModuleType, str]
"""A module, and the name of one of its attributes."""

_OURS = "lastgasp_megatron"


def holders_of(targets: Iterable[Function]) -> dict[int, list[Holder]]:
    """Every module attribute that is one of `targets`, under whatever name; keyed by `id(target)`."""
    wanted = {id(target) for target in targets}
    found: dict[int, list[Holder]] = {key: [] for key in wanted}
    for module, name, value in _attributes():
        if id(value) in wanted:
            found[id(value)].append((module, name))
    return found


def _attributes() -> Iterator[tuple[ModuleType, str, object]]:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and not module.__name__.startswith(_OURS):
            yield from ((module, name, value) for name, value in list(vars(module).items()))


def wrapped_chain(function: Function) -> list[Function]:
    """`function` and what it wraps, outermost first, as far as `functools.wraps` tells."""
    chain: list[Function] = []
    while function is not None and not any(function is seen for seen in chain):
        chain.append(function)
        function = getattr(function, "__wrapped__", None)
    return chain
