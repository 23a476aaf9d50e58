"""Parameters that change before the update: seen, copied at the end of each step, and forgotten when they rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lastgasp.pytorch import moving
from lastgasp.pytorch.buffers import Seen
from lastgasp.pytorch.moving import MovingParameters
from support.copiers import COPIERS, use


@pytest.fixture(params=COPIERS, autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who compares."""
    return use(request.param, monkeypatch)


def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def exchanged(model: nn.Module) -> None:
    for child in model.modules():
        for name, p in list(child._parameters.items()):
            if p is not None:
                child._parameters[name] = nn.Parameter(p.detach() * 0.5)


def both() -> nn.ModuleDict:
    return nn.ModuleDict({"trained": nn.Linear(2, 2), "other": nn.Linear(2, 2)})


@pytest.mark.parametrize("change", [by_data, through_data, in_place, exchanged])
def test_what_moves_is_kept_as_it_was_at_the_end_of_the_step(change: Callable[[nn.Module], None]) -> None:
    notes: list[str] = []
    model = both()
    found = MovingParameters(model, notes.append)
    for step in range(1, 5):
        if step > 1:
            change(model["other"])
        found.opens()
        through_data(model["trained"])  # the update
        if step == 2:
            assert "2 parameters were changed since the end of step 1" in found.missing(1)
            assert found.held(1) == {}
        found.closes(step)
        assert found.missing(step) == ""
    want = {name: p.clone() for name, p in model.state_dict().items() if name.startswith("other")}
    change(model["other"])
    held = found.held(4)
    assert held.keys() == want.keys()
    assert all(torch.equal(held[name], value) for name, value in want.items())
    assert (found.missing(4), found.held(3), notes) == ("", {}, [])


def test_one_that_begins_to_move_late_is_found() -> None:
    model = both()
    found = MovingParameters(model, pytest.fail)
    for step in range(1, 20):
        if step > 10:
            in_place(model["other"])
        found.opens()
        found.closes(step)
    assert sorted(found.held(19)) == ["other.bias", "other.weight"]


def test_what_rests_is_not_copied_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a script has loaded its best weights once."""
    monkeypatch.setattr(moving, "_PATIENCE", 5)
    model = both()
    found = MovingParameters(model, pytest.fail)
    for step in range(1, 12):
        if step == 2:
            by_data(model)
        found.opens()
        found.closes(step)
        if step == 3:
            assert len(found.held(3)) == 4
    assert found.held(11) == {}


def test_where_there_is_no_room_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    model = both()
    found = MovingParameters(model, notes.append)
    monkeypatch.setattr(torch.Tensor, "clone", _no_room)
    found._moving = {"other.weight": 2}
    found.closes(1)
    [note] = notes
    assert "cannot be copied (no memory)" in note
    found.opens()
    assert (found.held(1), found.missing(1)) == ({}, "")


def _no_room(self: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no memory")


@pytest.mark.parametrize("change", [by_data, through_data, in_place])
def test_what_a_validation_changes_is_kept_from_the_second_one_on(change: Callable[[nn.Module], None]) -> None:
    """Averaged weights are put into the model for it, and its own ones back; no step is to copy them for that."""
    model = both()
    found = MovingParameters(model, lambda _: None)
    for step in range(1, 5):
        found.opens()
        assert found.held(step) == {}
        found.closes(step)
        own = [p.detach().clone() for p in model.parameters()]
        found.aside()
        change(model["other"])
        found.in_aside()
        found.aside()  # the end of the epoch: those of the step stay what counts
        held, missing = found.held(step), found.missing(step)
        if step == 1:
            assert held == {}
            assert missing.startswith("2 parameters were changed since the end of step 1")
        else:
            assert missing == ""
            assert all(torch.equal(a, b) for a, b in zip(held.values(), own, strict=True))
        with torch.no_grad():
            for p, value in zip(model.parameters(), own, strict=True):
                p.data.copy_(value)


def test_a_validation_that_changes_nothing_costs_no_copies() -> None:
    model = both()
    found = MovingParameters(model, lambda _: None)
    for step in range(1, 4):
        found.opens()
        found.closes(step)
        found.aside()
        found.in_aside()
        assert (found.held(step), found.missing(step)) == ({}, "")


def test_nothing_has_moved_while_all_is_looked_at_before_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gasp may come at that very moment, on another thread."""
    model = both()
    found = MovingParameters(model, pytest.fail)
    found.opens()
    found.closes(1)
    noted: list[str] = []
    look = Seen.remember

    def looks(seen: Seen, live: torch.Tensor) -> None:
        noted.append(found.missing(1))
        look(seen, live)

    monkeypatch.setattr(Seen, "remember", looks)
    found.aside()
    assert noted == [""] * 4


@pytest.mark.parametrize("size", [1, 500, 4000])
@pytest.mark.parametrize("change", ["", "one byte", "in place", "other memory", "shorter", "freed", "empty", "strides"])
def test_a_tensor_is_seen_to_change(change: str, size: int) -> None:
    p = nn.Parameter(torch.arange(float(size)))
    seen = Seen()
    assert seen.differs_from(p)
    seen.remember(p)
    assert not seen.differs_from(p) and not seen.changed(p)
    if change == "one byte":
        p.data.view(torch.uint8)[-4 * size if size == 1 else 0] = 77
    elif change == "in place":
        with torch.no_grad():
            p.add_(0)
    elif change == "other memory":
        p.data = p.data.clone()
    elif change == "shorter":
        p.data = p.data[:1].clone()
    elif change == "freed":
        p.untyped_storage().resize_(0)
    elif change == "empty":
        p.data = torch.empty(0)
    elif change == "strides":
        p.data = torch.arange(2.0 * size)[::2]
    assert seen.differs_from(p) is bool(change)
    if change == "freed":
        return  # it cannot be looked at
    assert seen.changed(p) is bool(change)
    assert not seen.differs_from(p) and not seen.changed(p)
    other = Seen()
    other.remember(p)
    assert not seen.differs(other)
    with torch.no_grad():
        p.add_(1)
    other.remember(p)
    assert seen.differs(other)


def test_what_has_no_memory_yet_is_looked_at_once_it_has() -> None:
    model = nn.LazyLinear(2)
    found = MovingParameters(model, pytest.fail)
    for step in range(6):
        found.opens()
        assert found.missing(step) == ""
        if step == 3:
            model(torch.zeros(1, 3))
        found.closes(step)
    by_data(model)
    assert "1 parameters" in found.missing(5)


def test_a_tensor_that_is_seen_keeps_what_it_is_to_its_user() -> None:
    """Its memory may be given another size, as FSDP does."""
    p, seen = nn.Parameter(torch.zeros(4)), Seen()
    seen.remember(p)
    p.untyped_storage().resize_(0)
    p.untyped_storage().resize_(16)
    assert p.untyped_storage().resizable()
