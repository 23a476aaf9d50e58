"""A look at values that begins with what the last one found: it finds what a look at all of them finds."""

from __future__ import annotations

import collections
import gc
import random
import weakref
from collections.abc import Callable
from operator import is_
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lastgasp.adapter.again import Limits, Root, UserValues
from lastgasp.pytorch.compiled import changes_of
from lastgasp.pytorch.uservalues.contents import Big, Long, Row
from lastgasp.pytorch.uservalues.walk import Walk
from support.copiers import COPIERS, use
from support.value_graphs import Script


@pytest.fixture(params=COPIERS, autouse=True)
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who compares; returns how often all was looked at."""
    use(request.param, monkeypatch)
    found, look = list[str](), Walk.all

    def counted(self: Walk, roots: Any) -> Any:
        found.append("all")
        return look(self, roots)

    monkeypatch.setattr(Walk, "all", counted)
    return found


class Holder:
    """A user's object."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Other(Holder):
    """Another class."""


class Slotted:
    """One without a dict."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Named(dict[str, int]):
    """A dict with an attribute."""

    changes = 0


def make(**values: Any) -> Any:
    """A user's object."""
    return Holder(**values)


def same(kind: str, one: Any, other: Any) -> bool:
    """Two contents are alike: the very values, or copies of the same numbers."""
    if isinstance(one, Long):
        one, other = one.items, other.items
    if kind == "tensor":
        return one[0] == other[0] and torch.equal(one[1], other[1])
    if kind in ("ndarray", "generator"):
        return bool((one == other).all())
    if isinstance(one, dict):
        one, other = ({k: v.found() if isinstance(v, Big) else v for k, v in row.items()} for row in (one, other))
        return len(one) == len(other) and all(key in other and other[key] is value for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_, one, other))
    return bool(one == other)


def as_at_first_sight(values: UserValues) -> None:
    """What was recorded is what a look at all finds."""
    fresh = UserValues(values.roots, values.left_out, values.limits)
    fresh.take()
    assert (values.refused, fresh.refused) == ("", "")
    assert [(id(row.value), row.kind, row.label) for row in values.rows] == [
        (id(row.value), row.kind, row.label) for row in fresh.rows
    ]
    for row, other in zip(values.rows, fresh.rows, strict=True):
        assert same(row.kind, row.content, other.content), (row, other)
        if row.kind == "dict":
            assert list(row.content if isinstance(row.content, dict) else row.content.items) == list(row.value)


@pytest.mark.parametrize("seed", range(40))
def test_random_objects_are_found_as_they_are(seed: int, looks: list[str]) -> None:
    script, draw = Script(seed, odd=False), random.Random(seed)
    values = UserValues([Root(f"h{i}", one) for i, one in enumerate(script.holders)])
    for step in range(8):
        if draw.random() < 0.8:
            script.train(seed + step)
        values.take()
        as_at_first_sight(values)


def emptied(holder: Any) -> None:
    """Fewer plain values."""
    holder.plain.clear()


def reordered(holder: Any) -> None:
    """Another order."""
    holder.table["a"] = holder.table.pop("a")


def another_key(holder: Any) -> None:
    """The same values, by other names."""
    holder.table["c"] = holder.table.pop("a")


def bound_by_another_name(holder: Any) -> None:
    """What may change has another name."""
    holder.later = vars(holder).pop("parts")


def instead_of_a_function(holder: Any) -> None:
    """A value where a function was."""
    holder.function = 5


def grown_long(holder: Any) -> None:
    """A list is long now."""
    holder.plain.extend(range(50))


def a_part_more(holder: Any) -> None:
    """What may change comes in."""
    holder.table["more"] = [1]


def another_class(holder: Any) -> None:
    """The same object is of another class."""
    holder.inner.__class__ = Other
    holder.inner.count += 1


def a_dict_of_its_own(holder: Any) -> None:
    """Other attributes at once."""
    holder.inner.__dict__ = {"count": 7, "x": [2]}


def larger(holder: Any) -> None:
    """A tensor of another size."""
    holder.tensor.data = torch.zeros(5)


def exchanged(holder: Any) -> None:
    """Two parts have each other's names."""
    holder.parts, holder.others = holder.others, holder.parts


def another_tensor(holder: Any) -> None:
    """One of another size in its place."""
    holder.tensor = torch.ones(7)


def another_array_too(holder: Any) -> None:
    """Both, and a number."""
    holder.tensor, holder.array, holder.count = torch.ones(3), np.ones(2), 5


def a_tensor_in_two_places(holder: Any) -> None:
    """The new one has another name already."""
    holder.tensor = holder.inner.tensor


def a_tensor_from_two_places(holder: Any) -> None:
    """The old one has another name still."""
    holder.shared = torch.ones(3)


def a_tensor_comes(holder: Any) -> None:
    """In the place of a number."""
    holder.count = torch.ones(1)


def a_known_tensor(holder: Any) -> None:
    """One that is restored elsewhere."""
    holder.tensor = holder.weight


def a_large_tensor(holder: Any) -> None:
    """One that is not copied."""
    holder.tensor = torch.zeros(100_000)


def known_now(holder: Any) -> None:
    """What is restored elsewhere in the place of a value."""
    holder.plain.append(holder.weight)


@pytest.mark.parametrize(
    ("change", "all_again"),
    [
        (lambda h: None, False),
        (lambda h: setattr(h, "count", h.count + 1), False),
        (lambda h: h.plain.append(3), False),
        (lambda h: h.table.update(a=9), False),
        (lambda h: setattr(h.inner, "count", 4), False),
        (lambda h: h.numbers.add(4), False),
        (lambda h: h.recent.append(4), False),
        (lambda h: h.tensor.add_(1), False),
        (lambda h: h.tensor.data.add_(1), False),
        (lambda h: h.array.__setitem__(0, 8), False),
        (lambda h: h.generator.manual_seed(6), False),
        (lambda h: h.named.__setitem__("z", 1), False),
        (lambda h: setattr(h.named, "changes", 3), False),
        (lambda h: setattr(h.slotted, "count", 3), False),
        (lambda h: h.long.append([]), False),
        (lambda h: setattr(h, "new", 1), False),
        (lambda h: delattr(h, "count"), False),
        (lambda h: setattr(h, "function", print), False),
        (instead_of_a_function, False),
        (emptied, False),
        (reordered, False),
        (another_key, False),
        (bound_by_another_name, True),
        (grown_long, True),
        (a_part_more, True),
        (another_class, True),
        (a_dict_of_its_own, True),
        (larger, False),
        (another_tensor, False),
        (another_array_too, False),
        (a_tensor_in_two_places, True),
        (a_tensor_from_two_places, True),
        (a_tensor_comes, True),
        (a_known_tensor, True),
        (a_large_tensor, True),
        (exchanged, True),
        (known_now, True),
    ],
)
def test_a_change_is_found_and_where_it_can_be_alone(
    change: Callable[[Any], object], all_again: bool, looks: list[str]
) -> None:
    weight = nn.Parameter(torch.zeros(2))
    holder = make(
        count=0, plain=[1, 2], table={"a": 1, "b": [2]}, parts=[[1], {"x": ()}], others=[[3]],
        inner=make(count=1, x=[1], tensor=torch.zeros(3)), numbers={1, 2}, recent=collections.deque([1], maxlen=3),
        tensor=torch.zeros(3), array=np.zeros(2), generator=torch.Generator(), named=Named(a=1), slotted=Slotted(),
        long=[[] for _ in range(40)], shared=(shared := torch.zeros(3)), other=[shared],
        function=len, weight=weight, skipped=0,
    )  # fmt: skip
    values = UserValues([Root("holder", holder, frozenset({"skipped"}))], [weight])
    values.take()
    for _ in range(3):
        holder.skipped += 1
        values.take()
        as_at_first_sight(values)
    looks.clear()
    change(holder)
    before = [row for row in values.rows if not isinstance(row.content, Long)]  # those grow, and know what was new
    known = [repr(row.content) for row in before]
    values.take()
    assert bool(looks) is all_again
    assert [repr(row.content) for row in before] == known  # a saver may be reading it
    as_at_first_sight(values)


def test_what_has_not_changed_is_not_recorded_again(looks: list[str]) -> None:
    holder = make(count=0, plain=[1], table={"a": [2]}, inner=make(x=1))
    values = UserValues([Root("holder", holder)])
    values.take()
    rows = values.rows
    values.take()
    assert values.rows is rows and looks == ["all"]


def test_large_tensors_are_looked_at_in_each_step_and_not_kept_alive(looks: list[str]) -> None:
    holder = make(count=0, table=torch.zeros(100_000))
    values = UserValues([Root("holder", holder)])
    for _ in range(3):
        values.take()
    assert len(looks) == 3
    holder.table.add_(1)
    values.take()
    assert "holder.table changes" in values.refused


def test_what_a_root_had_before_is_not_kept_alive(looks: list[str]) -> None:
    """A loss has a way to what its graph has saved."""
    holder = Holder(loss=torch.zeros(2), history=[1.0])
    values = UserValues([Root("holder", holder)])
    values.take()
    values.take()
    before = weakref.ref(vars(holder)["loss"])
    vars(holder)["loss"] = torch.ones(2)
    values.take()
    gc.collect()
    assert before() is None and len(looks) == 1


def test_where_all_changes_each_time_no_trace_is_kept_but_tried_again(looks: list[str]) -> None:
    holder = make(found={})
    values = UserValues([Root("holder", holder)])
    traced = []
    for step in range(80):
        if step < 60:
            holder.found = {"loss": torch.zeros(1)}
        values.take()
        as_at_first_sight(values)
        traced.append(values._trace is not None)
    assert traced[:3] == [True] * 3 and sum(traced[3:60]) == 1 and traced[31]
    looks.clear()
    for _ in range(40):
        values.take()
    assert len(looks) < 20 and values._trace is not None


def test_tensors_are_counted_where_they_take_the_place_of_others() -> None:
    holder = make(last=torch.zeros(10))
    values = UserValues([Root("holder", holder)], (), Limits(nbytes=4000))
    values.take()
    for size in (500, 20, 900):
        holder.last = torch.zeros(size)
        values.take()
    assert values.refused == ""
    holder.last = torch.zeros(1100)
    values.take()
    assert "more than 0.004 MB" in values.refused


def test_attributes_that_raise_end_nothing_and_are_told() -> None:
    class Odd:
        """A user's object."""

        broken = False

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            if Odd.broken:
                raise RuntimeError("no attributes today")
            return {}

    values = UserValues([Root("holder", make(odd=Odd()))])
    values.take()
    values.take()
    Odd.broken = True
    values.take()
    assert "no attributes today" in values.refused


def test_checks_are_no_other_thing() -> None:
    changes = changes_of()
    value = [1]
    assert changes([(value, list, None, [1], 0), (value, tuple, None, [1], 0), (value, list, None, None, 0)]) == [1, 2]
    assert changes([]) is None
    rows = [Row(value, "list", [1], "x")]
    assert rows[0].content == value


def test_once_it_is_let_go_of_nothing_of_the_training_is_held_and_values_can_be_put_back() -> None:
    """A hook that was wrapped for a fit holds the fit, and with it the memory of the model."""
    model = torch.zeros(2)
    fit: Any = Holder(model=model)
    user: Any = Holder(count=1, hook=lambda held=fit: held)
    values = UserValues([Root("user", user)], [model])
    values.take()
    values.take()
    gone = [weakref.ref(fit), weakref.ref(model)]
    values.let_go()
    del fit, model, user.hook
    gc.collect()
    assert [one() for one in gone] == [None, None]
    user.count = 2
    values.put_back()
    assert user.count == 1
    values.take()
    assert not values.refused
