"""`TorchState.extra`: small things of the user's, copied at the end of each step."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Mapping
from typing import Any

from lastgasp.errors import ConfigError
from lastgasp.pytorch.owncopy import fill_in, own_copy

log = logging.getLogger("lastgasp")

_TRIED = 1
"""Steps at whose end all is tried that a file may have to hold later."""


class Extras:
    """Copies of `items`. What cannot be copied or saved costs that item, never the step.

    Args:
        items: name -> a dict, or an object with a `state_dict`.
    """

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items, self._taken = items, 0
        self._last: dict[str, Any] = {}
        self._told: set[str] = set()

    def require(self) -> None:
        """Refuse what no checkpoint can hold.

        Raises:
            ConfigError: an item cannot be copied or pickled.
        """
        for name in self._items:
            try:
                self._last[name] = self._copy(name, True)
            except Exception as error:
                remedy = "Keep numbers, strings, tensors, and containers of them."
                found, allowed = f"{type(error).__name__}: {error}", "what can be copied and pickled"
                raise ConfigError(f"extra[{name!r}]", found, allowed, remedy) from error

    def take(self, saved: bool) -> tuple[dict[str, Any], list[str]]:
        """Copies of all, and what to note on a checkpoint that holds them.

        Args:
            saved: they go to a file now, so that what no file can hold has to be found.
        """
        self._taken += 1
        taken, notes = {}, []
        for name in self._items:
            try:
                taken[name] = self._copy(name, saved or self._taken <= _TRIED)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                notes.append(f"extra[{name!r}] cannot be saved ({why}): checkpoints have it as it was when it could")
                if name not in self._told:
                    log.warning("%s", notes[-1])
                self._told.add(name)
                taken[name] = self._last.get(name)
        self._last = taken
        return taken, notes

    def _copy(self, name: str, tried: bool) -> Any:
        value = state_of(self._items[name])
        try:
            copied = copy.deepcopy(value)
        except RuntimeError:  # a tensor of a graph: a loss, the hidden state that the next step detaches
            copied = copy.deepcopy(own_copy(value))
        if tried:
            pickle.Pickler(_Nowhere(), protocol=2).dump(copied)  # as torch.save does
        return copied


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def state_of(item: Any) -> Any:
    """What is saved of an item."""
    return item if isinstance(item, dict) else item.state_dict()


def fill(item: Any, stored: Any) -> None:
    """Have an item be as it was saved."""
    if isinstance(item, dict):
        fill_in(item, stored)
    else:
        item.load_state_dict(stored)
