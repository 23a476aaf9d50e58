"""Objects in which a loop that draws its own batches counts where it is in its data (nanoGPT's `DataLoaderLite`).

No checkpoint has what they count, and a resumed run begins with the script's: it trains on the first data again.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from types import FrameType, GeneratorType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lastgasp.pytorch.uservalues import is_users
from lastgasp.pytorch.uservalues.kinds import is_users_module

NOTE = (
    "objects of this loop count from step to step what no checkpoint holds: {}. A resumed run begins with the "
    "script's: where these are positions in the data, it trains on other batches. Give the objects to "
    "TorchState(extra={{...}}), with state_dict and load_state_dict, or set them by s.step"
)
_NAMED = 4
_CALLERS = 8
_ASK = frozenset(("locals", "vars", "f_locals"))
_OWN = 3
"""References to a frame's dict if nobody else has it: of the frame, a variable, and the argument of `getrefcount`."""
_NOT = (nn.Module, Optimizer, DataLoader, type)
Counts = dict[str, int]


class PositionsOfItsOwn:
    """Those that a frame knows, and what they count.

    Args:
        frame: in which the loop reports its steps; that of its callers count, too, as far as they are the user's.
        saved: what checkpoints hold: neither these objects count, nor what they have as attributes.
    """

    def __init__(self, frame: FrameType, saved: Collection[object] = ()) -> None:
        held = [*saved, *(value for one in saved for value in _attributes(one).values())]
        self._saved = {id(one) for one in held}
        self._before: list[tuple[str, weakref.ref[Any], Counts]] = []
        for name, one in self._objects(_known_to(frame)):
            try:
                self._before.append((name, weakref.ref(one), _counts(one)))
            except Exception:  # the user's object
                continue

    def moved(self, step: int) -> str:
        """The note where they count on; empty where none does. What counts steps, as `step` does, is no position."""
        found: list[str] = []
        for name, known, before in self._before:
            if (one := known()) is not None:
                now = _counts(one)
                found += [f"{name}.{key}" for key, value in before.items()
                          if now.get(key, value) != value and abs(now[key] - step) > 1]  # fmt: skip
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return NOTE.format(", ".join(found[:_NAMED]) + more) if found else ""

    def _objects(self, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Those known by a name, and what they have as attributes."""
        seen = set(self._saved)
        named = [*known.items()]
        named += [(f"{name}.{key}", value) for name, one in known.items() if _is_one(one) and id(one) not in seen
                  for key, value in _attributes(one).items()]  # fmt: skip
        for name, one in named:
            if id(one) not in seen and _is_one(one):
                seen.add(id(one))
                yield name, one


def _known_to(frame: FrameType | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(_CALLERS):
        if frame is None or not is_users_module(frame.f_globals.get("__name__", "")):
            break
        found = dict(frame.f_globals) | locals_of(frame) | found
        frame = frame.f_back
    return found


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Before Python 3.13 a function's frame has one dict for whoever asks for its locals: the user's, if it has."""
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return dict(frame.f_locals)
    if not _ASK.isdisjoint(frame.f_code.co_names):
        return {}
    found = frame.f_locals
    held = dict(found)
    if sys.getrefcount(found) <= _OWN:
        found.clear()  # which the frame would keep, with the tensors in it
    return held


def _is_one(value: object) -> bool:
    if type(value) is GeneratorType:  # not isinstance: a lazy object is made by a question for its class
        return value.gi_frame is not None and is_users_module(value.gi_frame.f_globals.get("__name__", ""))
    return is_users(type(value)) and not issubclass(type(value), _NOT)


def _attributes(one: object) -> dict[str, Any]:
    try:
        return dict(getattr(one, "__dict__", {}))
    except Exception:  # the user's object
        return {}


def _counts(one: Any) -> Counts:
    held = locals_of(one.gi_frame) if type(one) is GeneratorType and one.gi_frame is not None else _attributes(one)
    return {name: value for name, value in held.items() if type(value) is int and name[0] != "_"}
