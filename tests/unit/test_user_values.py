"""Plain values of a user's objects: recorded at a boundary, put back in place after a step that was cut off."""

from __future__ import annotations

import array
import collections
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lastgasp.adapter.again import Limits, Places, Root, UserValues, fill, packed
from lastgasp.pytorch.uservalues import walk
from lastgasp.pytorch.uservalues.contents import Long
from support.value_graphs import NAMES, Script, form_of


class Holder:
    """A user's object."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def make(**values: Any) -> Any:
    """Such an object."""
    return Holder(**values)


class Slotted:
    """One without a dict."""

    __slots__ = ("count", "seen")

    def __init__(self) -> None:
        self.count, self.seen = 0, [0]


@dataclass
class Record:
    """A data class."""

    count: int = 0
    seen: list[int] = field(default_factory=list)


class Named(dict[str, int]):
    """A dict with an attribute."""

    changes = 0


def kept(holder: Any, limits: Limits | None = None, known: Any = ()) -> UserValues:
    """What is taken of it now."""
    values = UserValues([Root("holder", holder)], known, limits)
    values.take()
    return values


def advanced(named: Named) -> None:
    """Change both parts."""
    named["b"] = 2
    named.changes += 1


def counted(value: Any) -> None:
    """Change both parts."""
    value.count = 4
    value.seen.append(1)


ROTATED = collections.deque([1, 2, 3], maxlen=3)


@pytest.mark.parametrize(
    ("value", "change", "look"),
    [
        ([1, 2], lambda v: v.append(3), list),
        ([3, 1], lambda v: v.sort(), list),
        ({"a": 1}, lambda v: v.update(b=2), lambda v: list(v.items())),
        ({"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a")), lambda v: list(v.items())),
        (collections.OrderedDict(a=1, b=2), lambda v: v.move_to_end("a"), lambda v: list(v.items())),
        (collections.Counter("ab"), lambda v: v.update("b"), lambda v: list(v.items())),
        (collections.defaultdict(list, a=[1]), lambda v: (v["a"].append(2), v["b"]), lambda v: str(dict(v))),
        ({1, 2}, lambda v: v.add(3), sorted),
        (ROTATED, lambda v: v.append(4), list),
        (bytearray(b"ab"), lambda v: v.extend(b"c"), bytes),
        (array.array("i", [1]), lambda v: v.append(2), list),
        (torch.zeros(2, 3), lambda v: v.add_(1), lambda v: v.tolist()),
        (torch.zeros(2), lambda v: v.data.add_(1), lambda v: v.tolist()),
        (torch.zeros(2), lambda v: v.resize_(5).fill_(3), lambda v: v.tolist()),
        (torch.tensor(float("nan")), lambda v: v.fill_(1), str),
        (torch.ones(2, dtype=torch.bfloat16), lambda v: v.mul_(3), lambda v: v.tolist()),
        (torch.ones(3, requires_grad=True), lambda v: v.data.mul_(3), lambda v: v.tolist()),
        (np.zeros(3), lambda v: v.__iadd__(1), list),
        (np.zeros((2, 2), order="F"), lambda v: v.fill(2), lambda v: v.tolist()),
        (torch.Generator().manual_seed(1), lambda v: torch.rand(3, generator=v), lambda v: v.get_state().tolist()),
        (random.Random(1), lambda v: v.random(), lambda v: v.getstate()),
        (np.random.default_rng(1), lambda v: v.random(3), lambda v: str(v.bit_generator.state)),
        (np.random.RandomState(1), lambda v: v.rand(3), lambda v: str(v.get_state())),
        (Slotted(), counted, lambda v: (v.count, list(v.seen))),
        (Record(), counted, str),
        (Named(a=1), advanced, lambda v: (dict(v), v.changes)),
        (([1], {"a": [2]}), lambda v: (v[0].append(2), v[1]["a"].append(3)), str),
        ([[[{"a": [1]}]]], lambda v: v[0][0][0]["a"].append(2), str),
        (nn.Linear(2, 2), lambda v: v.weight.data.mul_(2), lambda v: v.weight.tolist()),
        (nn.BatchNorm1d(2), lambda v: v(torch.randn(4, 2)), lambda v: v.running_mean.tolist()),
    ],
)
def test_a_value_is_put_back_into_the_same_object(
    value: Any, change: Callable[[Any], object], look: Callable[[Any], object]
) -> None:
    holder = make(value=value, other=[value])
    before, values = look(value), kept(holder)
    change(value)
    assert look(value) != before
    assert values.cannot() == ""
    values.put_back()
    assert holder.value is value is holder.other[0]
    assert look(value) == before
    assert values.unknown == {}


def test_bindings_are_undone() -> None:
    seen, text = [1], "a"
    holder = make(seen=seen, text=text, count=1, gone=[2])
    values = kept(holder)
    holder.seen, holder.text, holder.count, holder.more = [1, 2], "b", 2, 5
    seen.append(3)
    del holder.gone
    values.put_back()
    assert vars(holder) == {"seen": [1], "text": "a", "count": 1, "gone": [2]}
    assert holder.seen is seen


def test_functions_and_what_is_skipped_are_left_alone() -> None:
    holder, child = make(count=1, trainer="first", call=len), nn.Linear(1, 1)
    holder.net = child
    values = UserValues([Root("holder", holder, frozenset(["trainer"]))], [child, *child.parameters()])
    values.take()
    holder.call, holder.patched, holder.trainer, holder.count = max, min, "second", 2
    with torch.no_grad():
        child.weight.fill_(7)
    values.put_back()
    assert (holder.call, holder.patched, holder.trainer, holder.count) == (max, min, "second", 1)
    assert child.weight.item() == 7


def test_aliases_and_cycles_stay() -> None:
    shared: list[Any] = [1]
    one, two = make(seen=shared), make(all={"x": shared})
    shared.append(shared)
    values = UserValues([Root("one", one), Root("two", two)])
    values.take()
    shared[:] = [5]
    two.all = {"x": [0]}
    values.put_back()
    assert one.seen is two.all["x"] is shared
    assert shared[0] == 1 and shared[1] is shared


def test_a_list_that_grows_is_not_copied_in_each_step() -> None:
    limits = Limits(entries=200)
    holder = make(losses=[], by_name={})
    values = UserValues([Root("holder", holder)], (), limits)
    for step in range(5000):
        holder.losses.append(torch.tensor(float(step)))
        holder.by_name[f"step {step}"] = [step]
        values.take()
    assert values.refused == ""
    losses, by_name = list(holder.losses), dict(holder.by_name)
    holder.losses.append(torch.tensor(1.0))
    holder.by_name["more"] = [1]
    assert values.cannot() == ""
    values.put_back()
    assert len(holder.losses) == 5000 and all(map(lambda a, b: a is b, holder.losses, losses))
    assert holder.by_name == by_name


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.__setitem__(50, torch.tensor(0.5)),
        lambda v: v[50].fill_(9),
        lambda v: v[50].data.fill_(9),
        lambda v: v.pop(50),
        lambda v: v.clear(),
        lambda v: v.insert(3, torch.tensor(1.0)),
    ],
)
def test_a_long_list_that_changes_elsewhere_cannot_be_put_back(change: Callable[[Any], object]) -> None:
    holder = make(losses=[torch.tensor(float(i)) for i in range(100)])
    values = kept(holder)
    assert values.cannot() == ""
    change(holder.losses)
    assert "holder.losses, a list of 100 entries, was changed other than at its end" in values.cannot()


@pytest.mark.parametrize("others", [False, True])
def test_what_is_slow_to_verify_is_refused_but_not_for_the_time_of_other_threads(
    monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    holder, now = make(losses=[str(i) for i in range(100)]), [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.thread_time", lambda: 0.0 if others else now[0])
    compared = Long.changed

    def slowly(self: Long) -> str:
        now[0] += 0.1
        return compared(self)

    monkeypatch.setattr(Long, "changed", slowly)
    values = kept(holder)
    for _ in range(Limits().patience + 1):
        assert values.cannot() == ""
        values.verify()
        values.take()
    slow = "recording the values of the user's objects takes 100 ms of each step"
    assert values.cannot() == "" if others else slow in values.cannot()


def test_what_the_end_of_an_epoch_clears_is_put_back_where_it_was_verified_before() -> None:
    holder = make(losses=[torch.tensor(float(i)) for i in range(100)])
    losses, values = holder.losses, kept(holder)
    values.verify()
    losses.clear()
    losses.append(torch.tensor(5.0))
    assert values.cannot() == ""
    values.put_back()
    assert [int(one) for one in holder.losses] == list(range(100)) and holder.losses is losses
    values.take()
    losses[40] = torch.tensor(0.0)
    assert values.cannot() != ""


def test_long_lists_begin_anew_and_may_change_as_a_whole() -> None:
    holder = make(averages=[torch.zeros(3) for _ in range(50)], window=list(range(100)))
    values = kept(holder)
    for step in range(4):
        for one in holder.averages:
            one.add_(1)
        holder.window.pop(0)
        holder.window.append(100 + step)
        values.take()
    assert values.refused == ""
    averages, window = holder.averages, list(holder.window)
    for one in averages:
        one.add_(1)
    assert values.cannot() == ""
    values.put_back()
    assert [one.tolist() for one in averages] == [[4.0] * 3] * 50 and holder.window == window


@pytest.mark.parametrize(
    ("value", "limits", "why"),
    [
        ([set(range(100))], Limits(entries=50), "more than 50 values"),
        ([torch.zeros(1000) for _ in range(20)], Limits(nbytes=50_000), "more than 0.05 MB"),
        (collections.deque(range(100)), Limits(entries=50), "holder.value"),
    ],
)
def test_beyond_its_limits_nothing_is_kept_and_it_says_so(value: Any, limits: Limits, why: str) -> None:
    values = kept(make(value=value), limits)
    assert why in values.cannot() and values.refused == values.cannot()
    values.take()
    values.put_back()


def test_large_numbers_that_do_not_change_cost_nothing_and_are_verified() -> None:
    holder = make(table=torch.zeros(100_000), array=np.zeros(100_000), memory=[torch.zeros(100_000)])
    values = kept(holder)
    values.take()
    assert (values.refused, values.cannot()) == ("", "")
    holder.table.data[5] = 1
    assert "holder.table (0.4 MB, too large to be copied in each step) has changed" in values.cannot()
    holder.table.data[5] = 0
    assert values.cannot() == ""
    holder.array[7] = 3
    assert "holder.array" in values.cannot()


def test_a_file_that_training_only_reads_is_not_read_by_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.zeros(1 << 20, np.uint8).tofile(tmp_path / "tokens")
    tokens = np.memmap(tmp_path / "tokens", np.uint8, mode="r")
    monkeypatch.setattr(walk, "digest_of", lambda value: pytest.fail("it was read"))
    values = kept(make(tokens=tokens, part=tokens[1 << 18 :]))
    values.take()
    values.take()
    assert (values.refused, values.cannot()) == ("", "")


def test_a_large_tensor_that_changes_in_each_step_is_too_much() -> None:
    holder = make(average=torch.zeros(100_000))
    values = kept(holder)
    holder.average.add_(1)
    values.take()
    assert "holder.average changes, and has 0.4 MB" in values.refused


def test_a_large_tensor_that_is_replaced_is_not_kept_alive() -> None:
    holder = make(features=torch.zeros(100_000))
    values = kept(holder)
    holder.features = torch.ones(100_000)
    assert "was replaced by another one in the step" in values.cannot()


def test_what_is_not_known_is_named_once() -> None:
    holder = make(count=itertools.count(), inner={"text": iter([1])}, numbers=torch.eye(2).to_sparse(), seen=[1])
    values = kept(holder)
    values.take()
    assert values.unknown == {
        "holder.count": "count", "holder.inner": "list_iterator", "holder.numbers": "Tensor"
    }  # fmt: skip
    assert "holder.count (count)" in values.note()
    values.put_back()


def test_objects_that_raise_end_nothing() -> None:
    class Odd(dict[str, int]):
        def __len__(self) -> int:
            raise ValueError("odd")

    values = kept(make(odd=Odd(a=1)))
    assert values.refused == "" or "ValueError: odd" in values.refused


def test_hooks_that_made_things_anew() -> None:
    """A list that `setup` makes gets what the old one had; a file or an optimizer that it has opened stays."""
    opened, opened_anew = nn.Linear(1, 1), nn.Linear(1, 1)
    old, inner = [1, 2], {"count": 3}
    holder = make(seen=old, parts=inner, made={"it": iter(""), "n": 1}, net=opened, pair=(iter(""),), n=4, g=None)
    holder.g = torch.Generator().manual_seed(5)
    roots = [Root("holder", holder)]
    values, before = kept(holder, known=[opened, opened_anew]), Places.of(roots)
    drawn = torch.rand(2, generator=holder.g)
    values.put_back()
    new, made, pair = list[int](), {"it": iter(""), "n": 0}, (iter(""),)
    holder.seen, holder.made, holder.net, holder.pair, holder.n, holder.late = new, made, opened_anew, pair, 0, 1
    holder.g = torch.Generator()
    values.put_back(True, before, Places.of(roots))
    assert holder.seen is new and new == [1, 2] and holder.parts is inner
    assert holder.made is made and made["n"] == 1 and holder.made["it"] is made["it"]
    assert holder.net is opened_anew and holder.pair is pair and (holder.n, holder.late) == (4, 1)
    assert torch.equal(torch.rand(2, generator=holder.g), drawn)


def test_another_process_gets_them_in_its_own_objects() -> None:
    shared = [1.5]
    one = make(n=3, seen=shared, also=shared, net=nn.Linear(1, 1), record=Record(2, [7]), t=torch.ones(2))
    one.it, one.pair, one.queue = iter(""), ([1], "x"), collections.deque([1, 2], maxlen=2)
    one.g = torch.Generator().manual_seed(9)
    torch.rand(5, generator=one.g)
    data = packed([Root("holder", one)], (), Places.of([Root("holder", one)]))
    seen, net, t = list[float](), nn.Linear(1, 1), torch.zeros(2)
    two = make(n=0, seen=seen, also=seen, net=net, record=Record(), t=t, it="mine", g=torch.Generator())
    two.queue = collections.deque(maxlen=2)
    named = fill([Root("holder", two)], data, Places.of([Root("holder", two)]))
    assert (two.n, two.seen, two.record, two.net, two.it) == (3, [1.5], Record(2, [7]), net, "mine")
    assert two.seen is two.also is seen and two.t is t and t.tolist() == [1, 1]
    assert torch.equal(torch.rand(3, generator=two.g), torch.rand(3, generator=one.g))
    assert (two.pair, two.queue, two.queue.maxlen) == (([1], "x"), collections.deque([1, 2]), 2)
    assert set(named) == {f"holder.{name}" for name in ("seen", "record", "t", "g", "pair", "queue")}


def test_memory_in_common_is_not_torn_apart_in_another_process() -> None:
    def begun() -> tuple[Any, list[Root], list[Any]]:
        net, seen = nn.Linear(2, 2), list[Any]()
        one = make(net=net, w=net.weight.detach(), ring=np.zeros((2, 2)), last=None, n=0, bias=None)
        one.seen = one.also = seen
        return one, [Root("holder", one)], [*net.parameters()]

    (one, roots, known), (two, others, _) = begun(), begun()
    before, there = Places.of(roots, known), Places.of(others)
    with torch.no_grad():
        one.net.weight.add_(1)
    one.ring[0], one.last, one.n = 3, one.ring[0], 1
    one.seen += [torch.ones(1), one.net.bias.data]
    one.bias = one.net.bias.detach()
    named = fill(others, packed(roots, known, before), there)
    assert two.n == 1 and two.ring.tolist() == [[3, 3], [0, 0]]
    assert two.w.data_ptr() == two.net.weight.data_ptr() and torch.equal(two.w, one.net.weight)
    assert two.last is two.bias is None and two.seen == []
    assert {"holder.last", "holder.bias", "holder.seen", "holder.also"} <= set(named)


ZERO = torch.zeros(())


def averages() -> Any:
    """Begins with one tensor in all places, as people write it."""
    return make(zero=ZERO, run=dict.fromkeys(("loss", "acc"), ZERO), means=[ZERO] * 3)


def move(one: Any) -> None:
    """A step."""
    one.run["loss"], one.run["acc"] = one.run["loss"] + 1, one.run["acc"] + 10
    one.means[0] = one.means[0] + 2


def test_one_object_in_many_places_gets_the_values_of_each_in_another_process() -> None:
    one, two = averages(), averages()
    before = Places.of([Root("holder", one)])
    move(one)
    run = two.run
    fill([Root("holder", two)], packed([Root("holder", one)], (), before), Places.of([Root("holder", two)]))
    assert two.run is run and run == {"loss": 1, "acc": 10} and two.means == [2, 0, 0]
    assert two.means[1] is two.zero is ZERO and ZERO == 0


def test_one_object_in_many_places_gets_the_values_of_each_where_hooks_make_it_anew() -> None:
    one = averages()
    before = Places.of([Root("holder", one)])
    move(one)
    values = kept(one)
    move(one)
    values.put_back()
    vars(one).update(vars(averages()))
    run = one.run
    values.put_back(True, before, Places.of([Root("holder", one)]))
    assert one.run is run and run == {"loss": 1, "acc": 10} and one.means == [2, 0, 0]
    assert one.means[1] is one.zero is ZERO and ZERO == 0


def test_factories_and_lengths_are_handed_over() -> None:
    def make_one() -> Any:
        return make(counts=collections.defaultdict(int), odd=collections.defaultdict(lambda: 3), named=Named(a=1))

    one, two = make_one(), make_one()
    before = Places.of([Root("holder", one)])
    one.counts["a"] += 1
    one.counts = collections.defaultdict(float, one.counts)
    one.odd["b"] += 1
    one.queue = collections.deque([1, 2], maxlen=2)
    advanced(one.named)
    fill([Root("holder", two)], packed([Root("holder", one)], (), before), Places.of([Root("holder", two)]))
    assert (two.counts, two.counts.default_factory) == ({"a": 1}, float)
    assert (two.odd, two.odd["new"], two.queue.maxlen, two.named.changes) == ({"b": 4, "new": 3}, 3, 2, 1)
    one.odd = collections.defaultdict(lambda: 5)
    data = packed([Root("holder", one)], (), before)
    assert "holder.odd" in fill([Root("holder", two)], data, Places.of([Root("holder", two)]))


def of(script: Script) -> list[Root]:
    """Its roots."""
    return [Root(f"h{i}", one) for i, one in enumerate(script.holders)]


@pytest.mark.parametrize("seed", range(20))
def test_random_objects_go_to_another_process_as_they_are(seed: int) -> None:
    one, two = Script(seed, odd=False), Script(seed + seed % 3, odd=False)  # ranks may begin with other values
    before = Places.of(of(one))
    one.train(seed + 1)
    fill(of(two), packed(of(one), (), before), Places.of(of(two)))
    assert form_of(*two.holders) == form_of(*one.holders)


@pytest.mark.parametrize("seed", range(20))
def test_random_objects_are_put_back_where_hooks_have_made_some_anew(seed: int) -> None:
    one, anew, draw = Script(seed, odd=False), Script(seed, odd=False), random.Random(seed)
    before, values = Places.of(of(one)), UserValues(of(one))
    values.take()
    one.train(seed + 1)
    values.take()
    was = form_of(*one.holders)
    one.train(seed + 2)
    values.put_back()
    assert form_of(*one.holders) == was
    for name in NAMES:
        for holder, other in zip(one.holders, anew.holders, strict=True):
            if draw.random() < 0.5:
                setattr(holder, name, getattr(other, name))
    values.put_back(True, before, Places.of(of(one)))
    assert form_of(*one.holders) == was
