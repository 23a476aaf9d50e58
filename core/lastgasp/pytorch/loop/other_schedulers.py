"""Learning-rate schedulers over optimizers of the `TorchState` that are not in it themselves.

A loop may make one while it trains: torchvision's reference of detection warms up by one that its first epoch makes. In
a resumed run it would begin anew, with learning rates of any size, as most of them multiply what they find.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from itertools import compress, islice
from types import NoneType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.optim.optimizer import Optimizer

from lastgasp.pytorch.inner_schedules import held_by, load_schedules
from lastgasp.pytorch.owncopy import schedule_of

log = logging.getLogger("lastgasp")

FORGOTTEN = (
    "a learning-rate scheduler ({}) that is not in TorchState sets the learning rates of its optimizer: no checkpoint "
    "holds where it is, and a resumed run begins its schedule anew. Make it before the session is opened, and give it "
    "to TorchState"
)
"""Note of one that is stepped and not saved."""
NOT_AGAIN = (
    "schedulers that the loop makes itself ({}) were not made again before the data at which this run resumes: their "
    "schedules begin anew, or are lost, and learning rates may differ from here on. Make them before the session is "
    "opened, and give them to TorchState"
)
"""Note of a resumed run."""
_MAKERS = (LRScheduler, SequentialLR, ChainedScheduler, ReduceLROnPlateau)
"""Classes of torch whose `__init__` calls no other of these."""
_DEEP, _WIDE, _MOST = 4, 100, 10_000
"""So deep are schedulers looked for in objects of the state, in so many items of each, and in so many in all."""
_PLAIN = (int, float, str, bytes, NoneType)
_Saved = tuple[str, dict[str, Any]]


class OtherSchedulers:
    """Saves those that are made while the session is open, and fills them when a resumed loop has made them again;
    names those that were there before, once they are stepped.

    Args:
        state: the `TorchState`.
        note: reports what people must know (`Session.note`).
        saved: checkpoints hold those that are made; else they are named, too.
    """

    def __init__(self, state: Any, note: Callable[[str], object], saved: bool) -> None:
        self._state, self._note, self._saved = state, note, saved
        self._made = list[ref[Any]]()
        self._forgotten = [(ref(one), counts(one)) for one in self._there()]
        self._states: dict[int, list[_Saved]] = {}
        self._due: list[_Saved] = []
        self._undo: list[Callable[[], object]] = [patched(kind, self._is_made) for kind in _MAKERS]

    def remove(self) -> None:
        """What is made from here on is not seen. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def _there(self) -> list[Any]:
        """Those that the script has made over our optimizers and has not given."""
        if self._state.engine is not None:  # which saves its own
            return []
        known = {id(one) for kept in (self._state.schedulers.values(), self._state.extra.values())
                 for one in within(list(kept), LRScheduler)}  # fmt: skip
        return _outermost(one for one in living(LRScheduler) if id(one) not in known and self._ours(one))

    def _ours(self, scheduler: Any) -> bool:
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
        return groups is not None and any(one.param_groups is groups for one in self._state.optimizers.values())

    def _is_made(self, scheduler: Any) -> None:
        if not self._saved:
            self._forgotten.append((ref(scheduler), counts(scheduler)))
        elif all(one() is not scheduler for one in self._made):
            self._made.append(ref(scheduler))

    def alive(self) -> list[Any]:
        """Those made while the session is open that still exist, in the order in which they were made."""
        self._made = [one for one in self._made if one() is not None]
        return _outermost(one for one in (known() for known in self._made) if one is not None and self._ours(one))

    def step_over(self, step: int) -> None:
        """`step` is complete, or its rest was made up for."""
        if self._due:  # the loop has trained without coming to its position
            self._note(NOT_AGAIN.format(_named(name for name, _ in self._due)))
            self._due = []
        last = {name: self._states[name] for name in [max(self._states, default=step)] if name != step}
        self._states = last | {step: self._states_now()}
        stepped = [one for known, before in self._forgotten if (one := known()) is not None and counts(one) > before]
        if stepped:
            self._forgotten = []
            self._note(FORGOTTEN.format(_named(type(one).__qualname__ for one in stepped if self._ours(one))))

    def _states_now(self) -> list[_Saved]:
        try:
            return [(type(one).__qualname__, schedule_of(one)) for one in self.alive()]
        except Exception as error:  # of the user's own kind
            log.debug("the states of schedulers that the loop makes cannot be had: %r", error)
            self._forgotten += [(known, counts(one)) for known in self._made if (one := known()) is not None]
            self._made, self._saved = [], False
            return []

    def record(self, step: int) -> bytes | None:
        """What `resumed` gets; None where there are none: `torch.load(weights_only=True)` takes no empty bytes."""
        found = self._states.get(step, [])
        try:
            return pickle.dumps(found) if found else None
        except Exception as error:  # of the user's own kind
            self._note(FORGOTTEN.format(_named(name for name, _ in found)))
            log.debug("schedulers that the loop makes cannot be pickled: %s", error)
            return None

    def resumed(self, record: bytes | None) -> None:
        """The state of a checkpoint is loaded; the loop is on its way to its position."""
        self._due = pickle.loads(record) if record else []

    def returned(self) -> None:
        """The loop is back at its position: what it has made on its way is as it was there."""
        due, self._due = self._due, []
        here = self.alive()[: len(due)]
        try:
            if [name for name, _ in due] != [type(one).__qualname__ for one in here]:
                raise LookupError
            load_schedules((one, values) for one, (_, values) in zip(here, due, strict=True))
        except Exception as error:  # of the user's own kind
            log.debug("schedulers that the loop makes were not filled: %r", error)
            self._note(NOT_AGAIN.format(_named(name for name, _ in due)))


def counts(scheduler: Any) -> int:
    """How often it was stepped. SequentialLR counts in `last_epoch` alone, ChainedScheduler in those that it chains."""
    while not hasattr(scheduler, "_step_count") and (chained := getattr(scheduler, "_schedulers", None)):
        if hasattr(scheduler, "last_epoch"):
            break
        scheduler = chained[0]
    return int(getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", 0)))


def patched(kind: type, made: Callable[[Any], object]) -> Callable[[], object]:
    """Have `made` called with each new object of `kind`. Returns what undoes it."""
    before, told = kind.__dict__["__init__"], [made]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        for one in told:
            with contextlib.suppress(Exception):  # the user's class, of which not all is made
                one(self)

    init.__wrapped__, init.__doc__ = before, before.__doc__  # type: ignore[attr-defined]
    kind.__init__ = init  # type: ignore[misc]

    def undo() -> None:
        told.clear()  # somebody else may have put another one around it, which stays
        if kind.__dict__["__init__"] is init:
            kind.__init__ = before  # type: ignore[misc]

    return undo


def kinds(kind: type) -> Iterator[type]:
    """A class and those that are derived from it."""
    yield kind
    derived: list[type] = kind.__subclasses__()
    for one in derived:
        yield from kinds(one)


def living(kind: type) -> list[Any]:
    """All objects of a class and those derived from it. Some 50 ns for each object of the process, of which data held
    in lists and dicts may make many millions.
    """
    objects, wanted = gc.get_objects(), set(kinds(kind))
    return list(compress(objects, map(wanted.__contains__, map(type, objects))))


def within(value: Any, wanted: type) -> Iterator[Any]:
    """Objects of a class in containers and attributes of the user's objects, and in each other; as far as `_DEEP` and
    `_MOST` allow.
    """
    waiting = deque([(value, _DEEP)])
    looked = set[int]()
    while waiting and len(looked) < _MOST:
        one, deep = waiting.popleft()
        if id(one) in looked:
            continue
        looked.add(id(one))
        if isinstance(one, wanted):
            yield one
        elif isinstance(one, Tensor | nn.Module | Optimizer | type | str | bytes):
            continue
        held: Any = one if isinstance(one, dict | list | tuple) else getattr(one, "__dict__", {})
        if deep > 0 and held:
            inside = islice(held.values() if isinstance(held, dict) else held, _WIDE)
            waiting.extend((each, deep - 1) for each in list(inside) if not isinstance(each, _PLAIN))


def _outermost(found: Iterator[Any]) -> list[Any]:
    """Without those that others of them hold, and step."""
    all_of_them = list(found)
    inner = {id(one) for outer in all_of_them for _, one in held_by(outer)}
    return [one for one in all_of_them if id(one) not in inner]


def _named(kinds: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(kinds))
