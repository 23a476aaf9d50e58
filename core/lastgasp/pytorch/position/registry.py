"""Which loader is positioned how: adapters registered by type, looked up without importing what is not used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lastgasp.pytorch.position.loaders import MapPosition, StatefulPosition, StreamPosition, is_map, is_stateful
from lastgasp.pytorch.position.protocol import LoaderPosition
from lastgasp.pytorch.rng import RngRecorder

Factory = Callable[[Any, RngRecorder], LoaderPosition]

_registered: list[tuple[type | str, Factory]] = []


def register_loader(known: type | str, factory: Factory) -> None:
    """Have loaders of a type positioned by `factory(loader, recorder)`. A later registration goes before earlier ones.

    Args:
        known: the type of the loader, or of the dataset in a plain `torch.utils.data.DataLoader`; or its name,
            "module:Class", which is not imported: an object of that type exists only where it was.
        factory: makes the position; it may return what `position_of` would have made without it.
    """
    _registered.insert(0, (known, factory))


def position_of(loader: Any, recorder: RngRecorder, replay: bool = False) -> LoaderPosition:
    """The position of `loader`, by the adapter of its type or, without one, by what it can do.

    Args:
        recorder: captures the random state of this process.
        replay: draw the consumed batches of a map-style loader again, rather than skip them in its sampler.
    """
    for subject in (loader, getattr(loader, "dataset", None) if isinstance(loader, DataLoader) else None):
        kinds = [(kind, factory) for known, factory in _registered if (kind := _resolved(known)) is not None]
        found = [one for one in kinds if issubclass(type(subject), one[0])]
        # Others only say that they are of that type, by `__class__`: accelerate's that it is the loader that it holds.
        found += [one for one in kinds if isinstance(subject, one[0])]
        if found:
            return found[0][1](loader, recorder)
    return builtin_position(loader, recorder, replay)


def builtin_position(loader: Any, recorder: RngRecorder, replay: bool = False) -> LoaderPosition:
    """The position of `loader`, by what it can do: map-style, with a state of its own, or neither."""
    if is_stateful(loader):
        return StatefulPosition(loader, recorder)
    if is_map(loader) and not replay:
        return MapPosition(loader, recorder)
    return StreamPosition(loader, recorder)


def _resolved(known: type | str) -> type | None:
    if isinstance(known, type):
        return known
    module, _, name = known.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None
