"""What modules keep beside what checkpoints hold is named once training has changed it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lastgasp.pytorch.unsaved import Unsaved
from lastgasp.pytorch.uservalues import Root


class Keeps(nn.Module):
    """A bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.seen, self._calls, self.name = 1.0, list[float](), 0, "one"
        self.mean, self.table, self.nothing = torch.zeros(3), np.zeros(2), torch.zeros(0)
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("saved", torch.zeros(2))


class Saves(Keeps):
    """What it keeps is its extra state."""

    def get_extra_state(self) -> Any:
        """All."""
        return self.rate


CHANGES: dict[str, Any] = {
    "rate": lambda m: setattr(m, "rate", 0.5),
    "seen": lambda m: m.seen.append(1.0),
    "_calls": lambda m: setattr(m, "_calls", 1),
    "mean": lambda m: m.mean.add_(1),
    "table": lambda m: setattr(m, "table", m.table + 1),
    "passing": lambda m: m.passing.add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_named(name: str) -> None:
    module: Any = nn.ModuleDict({"model": nn.Sequential(Keeps())})
    unsaved = Unsaved(module)
    assert unsaved.note() == ""
    CHANGES[name](module["model"][0])
    assert f"beside their state: model.0.{name}. No checkpoint" in unsaved.note()


def test_what_is_saved_or_nobodys_is_not() -> None:
    module: Any = nn.ModuleDict({"keeps": Keeps(), "saves": Saves(), "plain": nn.Linear(1, 1)})
    unsaved = Unsaved(module)
    module["keeps"].saved.add_(1)
    module["saves"].rate = 3.0
    module["plain"].rate = 3.0
    module["keeps"].eval()
    module["keeps"].late = 1.0
    assert unsaved.note() == ""
    for change in CHANGES.values():
        change(module["keeps"])
    assert "and 2 more" in unsaved.note()


class Counts:
    """No module."""

    def __init__(self) -> None:
        self.calls, self.known = 0, 0


def test_of_other_objects_only_what_is_asked_for_counts() -> None:
    """Those of a framework's own classes never do; non-persistent buffers of the module always."""
    module, counts, foreign = Keeps(), Counts(), nn.Linear(1, 1)
    roots = [Root("Counts", counts, frozenset({"known"})), Root("foreign", foreign)]
    unsaved = Unsaved(module, roots, "somebody's state_dict")
    counts.known, module.rate = 1, 2.0
    foreign.rate = 3.0  # type: ignore[assignment]
    assert unsaved.note() == ""
    counts.calls, module.passing = 1, torch.ones(2)
    note = unsaved.note()
    assert "what objects keep beside their state: passing, Counts.calls. No checkpoint" in note
    assert note.endswith("what somebody's state_dict returns")


def test_what_cannot_be_looked_at_is_left_alone() -> None:
    """It may be anything that somebody has made of a tensor; training begins all the same."""
    module = Keeps()
    module.mean = torch.ones(2, dtype=torch.complex64).conj()
    unsaved = Unsaved(module)
    module.mean, module.rate = module.mean * 2, 0.5
    assert "beside their state: rate. No checkpoint" in unsaved.note()
