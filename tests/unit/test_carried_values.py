"""What training has changed of a user's values goes into bytes, and from there into the objects of a new process."""

from __future__ import annotations

import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from lastgasp.adapter.again import Began, Carried, Places, Root, UserValues, changed
from lastgasp.pytorch.ondemand import OnDemand
from lastgasp.pytorch.uservalues.contents import content_of
from lastgasp.pytorch.uservalues.portable import NotPortable, decode, encode
from lastgasp.trailer import split_trailer, with_trailer
from support.value_graphs import Script, form_of

CPU = torch.device("cpu")


class Holder:
    """A user's object."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


@dataclass
class Record:
    """A data class."""

    count: int = 0
    seen: list[int] = field(default_factory=list)


def there_and_back(value: Any, here: Mapping[int, Any] | None = None) -> Any:
    found, fill, _ = decode(encode(value, content_of)[0], CPU, here or {})
    fill()
    return found


PLAIN: list[Any] = [
    None, True, 3, -(1 << 80), 1 << 63, 0.1, float("inf"), "text", b"bytes", 1 + 2j, [1, [2]], (1, (2, [3])), {1, 2},
    frozenset({"a"}), {"a": {1: (2,)}, 3: []}, OrderedDict(a=1), Counter("abca"), Counter[str]("ab"),
    deque([1, 2], 4), deque([1]),
    np.float32(0.1), [],
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_are_the_same(value: Any) -> None:
    found = there_and_back(value)
    assert found == value and type(found) is type(value)
    assert not isinstance(value, deque) or found.maxlen == value.maxlen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensors_and_arrays_are_the_same(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (2, 3)):
        tensor = torch.ones(shape, dtype=dtype)
        found = there_and_back([tensor])[0]
        assert found.dtype == dtype and found.shape == tensor.shape and torch.equal(found, tensor)
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert (there_and_back(array) == array).all()


def test_a_value_that_is_there_twice_stays_one() -> None:
    part = [1]
    found = there_and_back({"a": part, "b": (part,)})
    found["a"].append(2)
    assert found == {"a": [1, 2], "b": ([1, 2],)}
    part.append(part)  # type: ignore[arg-type]
    found = there_and_back(part)
    assert found[1] is found


def test_objects_and_generators_get_their_content_where_they_are() -> None:
    for made in (lambda: torch.Generator().manual_seed(3), lambda: random.Random(4), lambda: np.random.default_rng(5)):
        one, other = made(), made()
        draw(one)
        data = encode(one, content_of)[0]
        decode(data, CPU, {0: other})[1]()
        assert draw(one) == draw(other)
        with pytest.raises(NotPortable):
            decode(data, CPU, {})
    record, holder = Record(3, [1]), {"r": Record()}
    held = holder["r"]
    there_and_back({"r": record}, {0: holder, 1: held})
    assert holder["r"] is held and held == record


def draw(value: Any) -> float:
    if isinstance(value, torch.Generator):
        return torch.rand((), generator=value).item()
    return float(value.random())


@pytest.mark.parametrize("value", [lambda: 0, torch.nn.Linear(1, 1), [object()], torch.float32, np.array(["a"])])
def test_other_things_are_not_written(value: Any) -> None:
    with pytest.raises(NotPortable):
        encode(value, content_of)


def test_nothing_is_imported_for_what_a_file_names() -> None:
    with pytest.raises(NotPortable):
        decode(msgspec.msgpack.encode(["object", "os.system", [], None]), CPU, {})
    with pytest.raises(NotPortable):
        decode(msgspec.msgpack.encode(["dict", "collections.defaultdict", [], "os.system"]), CPU, {})
    assert there_and_back(defaultdict(list, a=[1])).default_factory is list


def test_too_much_is_not_written() -> None:
    with pytest.raises(NotPortable):
        encode([0] * 100, content_of, limit=100)
    with pytest.raises(NotPortable):
        encode(torch.zeros(100), content_of, limit=100)


# -- from one process to the next --------------------------------------------------------------------------


def roots_of(holder: Holder) -> list[Root]:
    return [Root("holder", holder, frozenset({"left"}))]


class Process:
    """One that trains from what `make` gives; the parameters of its `net` are restored elsewhere."""

    def __init__(self, make: Callable[[], Holder]) -> None:
        self.holder = make()
        self.known = [*net.parameters()] if (net := vars(self.holder).get("net")) is not None else []
        self.began = Began.of(roots_of(self.holder), self.known)
        self.start = self.began
        self.values = UserValues(roots_of(self.holder), self.known)

    def starts(self, **values: Any) -> None:
        """A hook has set them before the first step."""
        vars(self.holder).update(values)
        self.start = Began.of(roots_of(self.holder), self.known)

    def gives(self, train: Callable[[Any], object], ranks: int = 1) -> bytes:
        train(self.holder)
        self.values.take()
        return self.gives_now(ranks)

    def gives_now(self, ranks: int = 1) -> bytes:
        return changed(self.values, self.began, self.start, ranks)

    def takes(self, data: Mapping[int, bytes], rank: int = 0, ranks: int = 1) -> str:
        carried = Carried(data, ranks)
        return carried.restore([carried.prepare(rank, roots_of(self.holder), self.began, CPU)])


def holder() -> Holder:
    return Holder(outs=[], count=0, rate=0.5, best=None, left=1, shadow=torch.zeros(2), recent=deque(maxlen=2))


def train(one: Any) -> None:
    one.outs.append(torch.ones(()))
    one.count, one.best, one.left = 3, {"loss": 0.5}, 7
    one.shadow.add_(1)
    one.recent = deque([1.0], maxlen=2)


def test_only_what_training_has_changed_is_restored() -> None:
    data = Process(holder).gives(train)
    after = Process(holder)
    after.holder.rate, outs, shadow = 0.9, after.holder.outs, after.holder.shadow  # type: ignore[attr-defined]
    assert Carried({0: data}, 1).names == {f"holder.{name}" for name in ("outs", "count", "best", "shadow", "recent")}
    assert after.takes({0: data}) == ""
    found: Any = after.holder
    assert (found.count, found.best, found.rate, found.left) == (3, {"loss": 0.5}, 0.9, 1)
    assert found.outs is outs and outs == [torch.ones(())]
    assert found.shadow is shadow and shadow.tolist() == [1, 1]
    assert list(found.recent) == [1.0] and found.recent.maxlen == 2


def test_what_came_since_the_boundary_is_not_there() -> None:
    before = Process(holder)
    before.gives(train)
    before.holder.outs.append(2)  # type: ignore[attr-defined]
    before.holder.count = 9  # type: ignore[attr-defined]
    after = Process(holder)
    after.takes({0: before.gives_now()})
    assert (len(after.holder.outs), after.holder.count) == (1, 3)  # type: ignore[attr-defined]


def test_what_a_hook_has_set_before_the_first_step_is_the_new_process_s_own() -> None:
    before, after = Process(holder), Process(holder)
    before.starts(process=7, best={"loss": 9.0})
    data = before.gives(train)
    after.starts(process=8, best={"loss": 9.0})
    assert after.takes({0: data}) == ""
    assert (after.holder.process, after.holder.best) == (8, {"loss": 0.5})  # type: ignore[attr-defined]


def test_what_the_script_begins_with_otherwise_stays_and_is_named() -> None:
    data = Process(holder).gives(train)

    def other() -> Holder:
        found = holder()
        found.count = 10  # type: ignore[attr-defined]
        return found

    after = Process(other)
    note = after.takes({0: data})
    assert "holder.count: the script begins with another value" in note and "outs" not in note
    assert (after.holder.count, len(after.holder.outs)) == (10, 1)  # type: ignore[attr-defined]


def test_a_dead_rank_gets_what_two_others_had_alike() -> None:
    data = Process(holder).gives(train, 3)

    def otherwise(one: Any) -> None:
        train(one)
        one.count = 4

    for ranks, by_rank, names in (
        (3, {0: data, 2: data}, 5), (2, {0: data}, 0), (3, {0: data, 2: Process(holder).gives(otherwise, 3)}, 0),
    ):  # fmt: skip
        assert len(Carried(by_rank, ranks).names) == names
        after = Process(holder)
        note = after.takes(by_rank, 1, ranks)
        assert ("holder.count: rank 1 left none" in note) == (not names)
        assert after.holder.count == (3 if names else 0)  # type: ignore[attr-defined]
    assert len(Carried({0: data}, 2, ["holder"]).names) == 5, "what ranks have alike"


def test_what_another_rank_refuses_is_restored_nowhere() -> None:
    data, after = Process(holder).gives(train), Process(holder)
    carried = Carried({0: data, 1: data}, 2)
    own = carried.prepare(0, roots_of(after.holder), after.began, CPU)
    note = carried.restore([own, msgspec.msgpack.encode({"holder.outs": "why not"})])
    assert "holder.outs: why not" in note
    assert (len(after.holder.outs), after.holder.count) == (0, 3)  # type: ignore[attr-defined]


def test_one_thing_in_two_places_and_what_cannot_be_written_are_named_and_nothing_of_their_object_is_restored() -> None:
    """Whoever has set a flag when it opened a file would find the one without the other."""

    def train(one: Any) -> None:
        one.best = one.outs
        one.outs.append(1)
        one.recent = [object()]
        one.count = 1

    data = Process(holder).gives(train)
    assert Carried({0: data}, 1).names == frozenset()
    process = Process(holder)
    note = process.takes({0: data})
    assert "holder.count: holder.best was lost" in note
    assert all(f"holder.{name}: it cannot be written" in note for name in ("best", "outs", "recent"))


class Phase(Enum):
    """Of a curriculum."""

    WARMUP = 1
    MAIN = 2


def test_a_change_of_what_cannot_be_written_is_lost_with_all_of_its_object() -> None:
    """An Enum comes from nowhere in a new process: counters beside it would go on, and it would stay behind."""
    logger = object()

    def make() -> Holder:
        outs = [0]
        return Holder(phase=Phase.WARMUP, seen={"at": Path("a"), "n": 0}, file=iter(()), lines=bytearray(b"a"),
                      runs=(Phase.MAIN, outs), outs=outs, logger=[logger], data=["x" * 100] * 60_000, count=0)

    def counts(one: Any) -> object:
        one.count += 1
        return one.outs.append(1)

    changes: dict[str, Callable[[Any], object]] = {
        "phase": lambda one: vars(one).update(phase=Phase.MAIN),
        "seen": lambda one: one.seen.update(n=1),
        "file": lambda one: vars(one).update(file=iter(())),
        "lines": lambda one: one.lines.append(1),
        "logger": lambda one: vars(one).update(logger=[object()]),
        "data": lambda one: one.data.append("y"),
    }
    for name, change in changes.items():
        before = Process(make)
        note = Process(make).takes({0: before.gives(lambda one: (counts(one), change(one)))})  # noqa: B023
        assert f"holder.{name}: it cannot be written" in note and f"holder.count: holder.{name} was lost" in note
        alone = Process(make).takes({0: Process(make).gives(change)})
        assert f"holder.{name}: it cannot be written" in alone
    after = Process(make)
    assert after.takes({0: Process(make).gives(counts)}) == ""
    found: Any = after.holder
    assert (found.count, found.outs, found.runs) == (1, [0, 1], (Phase.MAIN, [0, 1]))


def test_a_large_constant_keeps_nothing_of_its_object_from_being_restored() -> None:
    def make() -> Holder:
        return Holder(table=torch.arange(100_000.0), array=np.arange(100_000.0), count=0)

    def count(one: Any) -> None:
        one.count = 3

    one = Process(make)
    one.values.take()
    after = Process(make)
    assert after.takes({0: one.gives(count)}) == "" and vars(after.holder)["count"] == 3

    data = [one.gives_now()]
    live = vars(one.holder)["array"]
    live[5] = -1
    data.append(one.gives_now())
    assert [Carried({0: given}, 1).names for given in data] == [{"holder.count"}, set()]


def moving(holder: Any) -> None:
    """What people write: each step binds another tensor."""
    holder.run["loss"] = 0.9 * holder.run["loss"] + 1
    holder.run["acc"] = holder.run["acc"] + 10
    holder.means[0], holder.means[1] = holder.means[0] + 1, holder.means[1] + 2
    holder.known["x"] = np.array([7.0])


def test_what_begins_as_one_object_in_many_places_gets_the_values_of_each() -> None:
    constant, array = torch.zeros(()), np.zeros(1)

    def make() -> Holder:
        run = dict.fromkeys(("loss", "acc"), constant)
        return Holder(zero=constant, run=run, means=[constant] * 3, known={"x": array})

    data, after = Process(make).gives(moving), Process(make)
    run: Any = after.holder.run  # type: ignore[attr-defined]
    assert after.takes({0: data}) == ""
    found: Any = after.holder
    assert found.run is run and run == {"loss": 1, "acc": 10}
    assert found.means == [1, 2, 0] and found.known["x"].tolist() == [7.0]
    assert found.means[2] is found.zero is constant and constant == 0 and array.tolist() == [0.0]


def test_tensors_that_attributes_have_in_common_stay_one() -> None:
    def train(one: Any) -> None:
        one.best = torch.ones(())
        one.outs.append(one.best)

    data, after = Process(holder).gives(train), Process(holder)
    assert after.takes({0: data}) == ""
    found: Any = after.holder
    assert found.best is found.outs[0] and found.best == 1
    other = Process(lambda: Holder(**vars(holder()) | {"best": 1}))
    note = other.takes({0: data})
    assert "holder.outs: it has something in common with holder.best" in note
    assert (other.holder.best, other.holder.outs) == (1, [])  # type: ignore[attr-defined]


def with_net() -> Holder:
    found = Holder(net=torch.nn.Linear(2, 2), ring=torch.zeros(2, 2), count=0, outs=[])
    vars(found)["first"] = vars(found)["ring"][0]
    return found


def step(one: Any) -> None:
    """Of a training."""
    with torch.no_grad():
        one.net.weight.add_(1)
    one.ring[0], one.count = 3, one.count + 1


@pytest.mark.parametrize("view", [lambda p: p.detach(), lambda p: p.data[0], lambda p: p.detach().numpy()])
def test_a_view_of_what_is_restored_elsewhere_stays_one(view: Callable[[Any], Any]) -> None:
    """A hook has taken it to log the norm, say: a copy of it would never change again."""
    before, after = Process(with_net), Process(with_net)
    for process in (before, after):
        weight = vars(process.holder)["net"].weight
        process.starts(w=view(weight), seen=[view(weight)])
    data = before.gives(step)
    found: Any = after.holder
    w, inner = found.w, found.seen[0]
    assert after.takes({0: data}) == ""
    assert found.w is w and found.seen[0] is inner and (found.count, found.first.tolist()) == (1, [3, 3])
    assert found.first.untyped_storage().data_ptr() == found.ring.data_ptr()
    data = before.gives(lambda one: vars(one).update(w=view(one.net.bias)))
    note = after.takes({0: data})
    assert "holder.w: it cannot be written" in note and "holder.count: holder.w was lost" in note


def test_memory_that_tensors_have_in_common_is_not_torn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lastgasp.pytorch.uservalues.carried._NAMED", 1000)

    def hook(process: Process) -> Process:
        ring = np.zeros((2, 2))
        process.starts(late=ring, row=ring[0])
        return process

    def of_one_tensor(one: Any) -> None:
        step(one)
        one.outs += torch.arange(3.0).unbind()  # memory side by side is none in common

    assert (after := hook(Process(with_net))).takes({0: hook(Process(with_net)).gives(of_one_tensor)}) == ""
    assert after.holder.outs == [0, 1, 2]  # type: ignore[attr-defined]

    def same_content(one: Any) -> None:
        one.first = one.ring[1]

    changes: list[tuple[Callable[[Any], object], list[str]]] = [
        (lambda one: vars(one).update(outs=[one.ring[1:]]), ["outs"]),
        (same_content, ["first"]),
        (lambda one: one.late.fill(1), ["late", "row"]),
        (lambda one: one.late[1].fill(1), ["late"]),
    ]
    for change, names in changes:
        before = hook(Process(with_net))
        before.gives(step)
        note = hook(Process(with_net)).takes({0: before.gives(change)})
        assert all(f"holder.{name}: it cannot be written" in note for name in names), note
        assert "holder.count: holder." in note


@pytest.mark.parametrize("make", [deque, set, dict])
def test_tensors_that_have_no_place_of_their_own_stay_different_ones(make: type) -> None:
    def begin() -> Holder:
        return Holder(made=(made := make()), same=made, other=make())

    def train(one: Any) -> None:
        for new in (torch.tensor(float(i)) for i in range(5)):
            for container in (one.made, one.other):
                if isinstance(container, dict):
                    container[float(new)] = new
                else:
                    (container.add if isinstance(container, set) else container.append)(new)

    data, after = Process(begin).gives(train), Process(begin)
    assert after.takes({0: data}) == ""
    found: Any = after.holder
    made, other = (one.values() if isinstance(one, dict) else one for one in (found.made, found.other))
    assert found.made is found.same and sorted(map(float, made)) == [0, 1, 2, 3, 4]
    assert set(map(id, made)) == set(map(id, other))


def test_attributes_that_have_much_in_common_are_written_once() -> None:
    def make() -> Holder:
        many = [[0] for _ in range(1000)]
        return Holder(outs=many, other=[*many])

    def train(one: Any) -> None:
        one.outs[3].append(1)

    data, after = Process(make).gives(train), Process(make)
    assert msgspec.msgpack.decode(data)[-1] == [["holder.other", "holder.outs"]]
    assert after.takes({0: data}) == ""
    assert after.holder.other[3] is after.holder.outs[3] == [0, 1]  # type: ignore[attr-defined]


def test_which_is_one_thing_counts_as_well_as_what_is_in_it() -> None:
    def make() -> Holder:
        return Holder(a=torch.zeros(1), b=torch.zeros(1), c=[0], d=[0])

    def train(one: Any) -> None:
        one.a = one.b

    data, after = Process(make).gives(train), Process(make)
    assert after.takes({0: data}) == ""
    assert after.holder.a is after.holder.b  # type: ignore[attr-defined]

    def make_one() -> Holder:
        found = make()
        vars(found).update(d=found.c)  # type: ignore[attr-defined]
        return found

    def part(one: Any) -> None:
        one.d = [0]

    data, after = Process(make_one).gives(part), Process(make_one)
    assert after.takes({0: data}) == ""
    assert after.holder.c is not after.holder.d  # type: ignore[attr-defined]


def test_what_a_script_frees_is_not_kept_in_memory() -> None:
    """Raw data, say, from `setup` until the loaders have been made."""
    larges: list[Callable[[], list[Any]]] = [
        lambda: [np.zeros(25_000) for _ in range(50)], lambda: ["x" * (5 << 20)], lambda: [[0] * 600_000]
    ]  # fmt: skip
    for large in larges:
        rows, shared = [np.zeros(2), *large()], np.zeros(2)
        owner = Holder(rows=[*rows, shared], part=[shared])
        began, places = Began.of(roots_of(owner), []), Places.of(roots_of(owner))
        first, del_rows = weakref.ref(rows[0]), vars(owner).pop("rows")
        for found in (began.places, places):
            assert len(found.paths(shared)) == 2 and not found.paths(del_rows)
        del rows, del_rows
        assert first() is None


def test_keys_may_be_tuples() -> None:
    def train(one: Any) -> None:
        one.best = Counter({("a", ("b", 1)): 2})
        one.outs.append({(1, 2): "x", frozenset({3}): (4,)})
        one.count = 3

    after = Process(holder)
    assert after.takes({0: Process(holder).gives(train)}) == ""
    found: Any = after.holder
    assert found.best == Counter({("a", ("b", 1)): 2}) and found.outs == [{(1, 2): "x", frozenset({3}): (4,)}]
    assert found.count == 3


def test_members_of_a_set_are_told_apart() -> None:
    one, other = ("b", 1), ("a", 1)
    found = there_and_back([{one, other}, one, other])
    assert found == [{one, other}, one, other]
    cycle: Any = ([],)
    cycle[0].append(cycle)
    with pytest.raises(NotPortable):
        there_and_back(cycle)


def test_what_training_has_removed_is_lost() -> None:
    def train(one: Any) -> None:
        del one.best
        one.count = 3

    assert "holder.best: it cannot be written" in Process(holder).takes({0: Process(holder).gives(train)})


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("seed", range(0, 4000, 400))
def test_random_objects_are_restored_as_they_were_or_not_at_all(
    seed: int, hook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lastgasp.pytorch.uservalues.carried._NAMED", 1000)
    for each in range(seed, seed + 20):
        restored = saved_and_restored(each, hook)
        assert restored in (True, False), f"seed {each}: {restored}"


def saved_and_restored(seed: int, hook: bool) -> Any:
    """Whether all was restored; what is wrong otherwise."""

    def begun() -> tuple[Script, Began, Began, list[Root]]:
        script = Script(seed)
        roots = [Root(f"h{i}", one) for i, one in enumerate(script.holders)]
        began = Began.of(roots, [script.weight])
        if hook:
            script.hook(seed)
        return script, began, Began.of(roots, [script.weight]), roots

    before, began, start, roots = begun()
    values = UserValues(roots, [before.weight])
    before.train(seed + 1)
    values.take()
    carried = Carried({0: changed(values, began, start, 1)}, 1)
    after, again, _, new = begun()
    untouched = begun()[0]
    for one in (after, untouched):
        one.weight.copy_(before.weight)
    note = carried.restore([carried.prepare(0, new, again, CPU)])

    def form(script: Script, which: list[int]) -> Any:
        return form_of(script.weight, *(vars(script.holders[i]) for i in which))

    good = [i for i in (0, 1) if f"h{i}." not in note]
    if form(after, good) != form(before, good):
        return f"{form(before, good)} became {form(after, good)}"
    if not good and form(after, [0, 1]) != form(untouched, [0, 1]):
        return f"{form(untouched, [0, 1])} became {form(after, [0, 1])}"
    return bool(good)


def test_values_that_were_not_kept_are_a_reason() -> None:
    before = Process(holder)
    before.gives(train)
    before.values.refused = "they take too long"
    data = before.gives_now(2)
    assert "holder.count: rank 1 left none (they take too long)" in Process(holder).takes(
        {0: Process(holder).gives(train, 2), 1: data}, 0, 2
    )
    assert not Carried({1: data}, 2).any
    assert not Carried({0: b"\xff"}, 1).any


def test_bytes_behind_a_state() -> None:
    for state in (b"", b"state"):
        assert split_trailer(with_trailer(state, b"more")) == (state, b"more")
        assert split_trailer(with_trailer(state, b"")) == (state, b"")
    assert split_trailer(b"\xff" * 8 + b"LGTRAIL1") == (b"\xff" * 8 + b"LGTRAIL1", b"")


@pytest.mark.parametrize("apart", [True, False])
def test_what_is_made_on_demand_is_made_once_a_step(apart: bool) -> None:
    made: list[int] = []

    def make(step: int) -> bytes:
        made.append(step)
        return b"%d" % step

    values = OnDemand(make, apart)
    assert [values.wait(3), values.wait(3), values.poll(3), values.wait(4)] == [b"3", b"3", b"3", b"4"]
    assert made == [3, 4]
