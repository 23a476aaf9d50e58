"""Temporary folders that imports make for their process: the warm process keeps none, each forked rank makes its own.

wandb has two, and so has each program that imports it. Ranks must not share one: the first that ends removes it.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from lastgasp.launch import warm_checks


@dataclass(frozen=True)
class _Again:
    """The first call of an object's initializer, without the object, which it would keep alive."""

    initializer: Callable[..., None]
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def of(self, folder: Any) -> None:
        """The finalizer of the old folder goes: it would remove the path of another process."""
        folder._finalizer.detach()
        self.initializer(folder, *self.arguments, **self.named)


FOUND: WeakKeyDictionary[Any, _Again] = WeakKeyDictionary()
"""What imports have made."""
PUT_AWAY: list[Any] = []
"""Those of them whose folder a forked rank makes anew."""


@contextmanager
def watching_folders() -> Iterator[None]:
    """Notice each `tempfile.TemporaryDirectory` in `FOUND`."""
    kind: Any = tempfile.TemporaryDirectory
    original = kind.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        FOUND[self] = _Again(original, arguments, named)

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = original


def put_away() -> None:
    """Remove those that can be made anew: empty ones, whose path nobody has taken out of the object.

    The others stay, and with them the reason not to fork (`warm_checks.unsafe`).
    """
    folders = {os.path.basename(folder.name): folder for folder in list(FOUND) if os.path.isdir(folder.name)}
    for name in _taken(folders) if folders else ():
        del folders[name]
    for folder in folders.values():
        with suppress(OSError):  # not empty
            os.rmdir(folder.name)
            PUT_AWAY.append(folder)


def renew_folders() -> None:
    """In a forked rank: as a fresh interpreter would have made them."""
    for folder in PUT_AWAY:
        FOUND[folder].of(folder)


def _taken(folders: dict[str, Any]) -> set[str]:
    """Of these names, the ones in any text that an object holds, but for the folder itself and its finalizer."""
    found: set[str] = set()
    own = {id(part) for folder in folders.values() for part in _own(folder)}
    own |= {id(folders), id(warm_checks.TEMPORARY)}
    for holder in gc.get_objects():
        if id(holder) not in own:
            found |= _in_texts(holder, folders, own)
    return found


def _own(folder: Any) -> Iterator[Any]:
    """The objects that know the path because it is theirs."""
    yield from (folder, vars(folder), folder._finalizer)
    info = folder._finalizer._registry[folder._finalizer]
    yield from (info, info.args, info.kwargs or {})


def _in_texts(holder: Any, names: Collection[str], own: Collection[int]) -> set[str]:
    """Containers of nothing but texts are not among those of the garbage collector: they are looked into from here."""
    found, todo = set(), gc.get_referents(holder)
    while todo:
        one = todo.pop()
        kind = type(one)  # not isinstance: an object's own __class__ may warn, or import
        if issubclass(kind, str):
            found |= {name for name in names if name in one}
        elif issubclass(kind, bytes):
            found |= {name for name in names if name.encode() in one}
        elif issubclass(kind, tuple | dict) and not gc.is_tracked(one) and id(one) not in own:
            todo += gc.get_referents(one)
    return found
