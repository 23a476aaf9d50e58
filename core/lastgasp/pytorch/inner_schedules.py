"""Objects that a scheduler holds: another one that it goes over to (GradualWarmupScheduler), a model, an optimizer.

The `state_dict` of most schedulers has the very objects, and a file has copies of them: a scheduler that comes out of
one sets the rates of a copy of its optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from lastgasp.pytorch.owncopy import own_copy

log = logging.getLogger("lastgasp")

_OBJECTS = (LRScheduler, nn.Module, Optimizer)
_WIDE = 100
"""Of longer lists and dicts nothing is looked at."""
_Path = tuple[Any, ...]


@contextmanager
def kept_inside(schedulers: Iterable[Any]) -> Iterator[None]:
    """Have these schedulers hold the same objects afterwards, whatever is loaded meanwhile.

    Other schedulers in them get the state of what was loaded in their place.
    """
    own = [one if isinstance(one, LRScheduler) else getattr(one, "__dict__", {}).get("scheduler") for one in schedulers]
    known = [(one, path, held) for one in own if isinstance(one, LRScheduler) for path, held in held_by(one)]
    yield
    for scheduler, path, held in known:  # those of an object come behind it
        parts = _parts(scheduler)
        try:
            for key in path[:-1]:
                parts = _parts(parts[key])
            now = parts[path[-1]]
        except (LookupError, TypeError):
            continue
        if now is held:
            continue
        parts[path[-1]] = held
        if not isinstance(held, LRScheduler):
            continue
        if type(now) is type(held):
            held.load_state_dict(vars(now) if "optimizer" not in vars(now) else now.state_dict())
        else:
            log.warning("a %s in the place of a %s was saved in a %s: it begins anew", type(now).__name__,
                        type(held).__name__, type(scheduler).__name__)  # fmt: skip


def load_schedules(rows: Iterable[tuple[Any, Any]]) -> None:
    """Have each of some schedulers be as its `state_dict` was."""
    loaded = list(rows)
    with kept_inside(one for one, _ in loaded):
        for one, state in loaded:
            one.load_state_dict(own_copy(state))  # some take a part out of it


def held_by(scheduler: Any) -> list[tuple[_Path, Any]]:
    """The objects that it holds, also in each other: where, and what; those in an object come behind it."""
    found, seen = list[tuple[_Path, Any]](), {id(scheduler)}
    waiting: list[tuple[_Path, Any]] = [((), scheduler)]
    while waiting:
        path, value = waiting.pop(0)
        parts = _parts(value)
        for key, one in list(enumerate(parts) if isinstance(parts, list) else parts.items()):
            deeper = type(one) in (list, dict) and len(one) <= _WIDE
            if isinstance(one, _OBJECTS):
                found.append(((*path, key), one))
                deeper = isinstance(one, LRScheduler)
            if deeper and id(one) not in seen:
                seen.add(id(one))
                waiting.append(((*path, key), one))
    return found


def _parts(value: Any) -> Any:
    return vars(value) if isinstance(value, LRScheduler) else value
