"""`TorchState.extra`: small things of the user's, copied at the end of each step."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lastgasp.errors import ConfigError
from lastgasp.pytorch.inner_schedules import load_schedules
from lastgasp.pytorch.owncopy import fill_in, own_copy, schedule_of

log = logging.getLogger("lastgasp")


class Extras:
    """Copies of `items`. What cannot be copied or saved costs that item, never the step.

    Args:
        items: name -> a dict, or an object with a `state_dict`.
    """

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items, self._first = items, True
        self._good: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._told: set[str] = set()

    def require(self) -> None:
        """Refuse what no checkpoint can hold.

        Raises:
            ConfigError: an item cannot be copied or pickled.
        """
        for name in self._items:
            try:
                self._good[name] = self._copy(name)
                _pickle(self._good[name])
            except Exception as error:
                remedy = ("Keep numbers, strings, tensors, and containers of them. Sharded tensors (an EMA of sharded "
                          "parameters) belong into a module of model={...}.")  # fmt: skip
                found, allowed = f"{type(error).__name__}: {error}", "what can be copied and pickled"
                raise ConfigError(f"extra[{name!r}]", found, allowed, remedy) from error

    def take(self) -> tuple[dict[str, Any], list[str]]:
        """Copies of all, and what to note on a checkpoint that holds them; only the first time `settle` is tried."""
        taken, notes = {}, list[str]()
        for name in self._items:
            try:
                taken[name] = self._copy(name)
            except Exception as error:
                taken[name] = self._as_it_was(name, error, notes)
        if self._first:
            self._first = False
            notes += self.settle(taken)
        self._last = taken
        return taken, notes

    def settle(self, taken: dict[str, Any]) -> list[str]:
        """What was taken goes to a file: put what could be pickled last for what cannot be. Returns further notes."""
        notes = list[str]()
        for name, copied in taken.items():
            if copied is self._good.get(name):
                continue
            try:
                _pickle(copied)
                self._good[name] = copied
            except Exception as error:
                taken[name] = self._as_it_was(name, error, notes)
        return notes

    def _as_it_was(self, name: str, error: Exception, notes: list[str]) -> Any:
        why = f"{type(error).__name__}: {error}"
        notes.append(f"extra[{name!r}] cannot be saved ({why}): this checkpoint has it as it was when it last could")
        if name not in self._told:
            log.warning("extra[%r] cannot be saved (%s): checkpoints have it as it was when it last could", name, why)
        self._told.add(name)
        before = self._last.get(name)
        if before is not self._good.get(name):  # not tried yet: no file was to hold it
            with contextlib.suppress(Exception):
                _pickle(before)
                self._good[name] = before
        return self._good.get(name)

    def _copy(self, name: str) -> Any:
        value = state_of(self._items[name])
        try:
            return copy.deepcopy(value)
        except RuntimeError:  # a tensor of a graph: a loss, the hidden state that the next step detaches
            return copy.deepcopy(own_copy(value))


def _pickle(copied: Any) -> None:
    """Raises what `torch.save` would, and TypeError for sharded tensors: the file would have one rank's part."""
    _Pickler(_Nowhere(), protocol=2).dump(copied)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and _is_a_part(value):
            raise TypeError("it holds a sharded tensor (DTensor), of which each rank has its own part")
        return NotImplemented


def _is_a_part(value: Any) -> bool:
    whole = all(one.is_replicate() for one in getattr(value, "placements", ()))
    return not whole and value.device_mesh.size() > 1


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def state_of(item: Any) -> Any:
    """What is saved of an item."""
    if isinstance(item, LRScheduler):
        return schedule_of(item)
    return item if isinstance(item, dict) else item.state_dict()


def fill(item: Any, stored: Any) -> None:
    """Have an item be as it was saved."""
    if isinstance(item, dict):
        fill_in(item, stored)
    elif isinstance(item, LRScheduler):
        load_schedules([(item, stored)])
    else:
        item.load_state_dict(stored)
