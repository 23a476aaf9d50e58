"""Hooks of an adapter: every holder, late, nested, reversible, looked after, refused where they do not fit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from lastgasp.adapter.hooks import Hook, HookNotPlaced, Hooks, argument, arguments_of, replace_attribute

NAME, OTHER = "a_framework_of_this_test", "a_user_of_that_framework"


class Base:
    """What is wrapped."""

    def train(self, epoch: int, callbacks: object = None, **more: object) -> list[object]:
        """Returns what it got."""
        return [self.__class__.__name__, epoch, callbacks, more]


class Derived(Base):
    """Calls what is wrapped inside of what is wrapped."""

    def fit(self, epoch: int) -> list[object]:
        """As the base."""
        return self.train(epoch)


def save(iteration: int, model: object = None) -> int:
    """A plain function."""
    return iteration


@pytest.fixture
def framework() -> Iterator[ModuleType]:
    """A module with a fresh class and a function, and another one that holds the function under another name."""
    module, user = ModuleType(NAME), ModuleType(OTHER)
    vars(module)["Model"] = type("Model", (Derived,), {"train": Base.train, "fit": Derived.fit})
    vars(module)["save"] = vars(user)["keep"] = lambda iteration, model=None: save(iteration, model)
    sys.modules[NAME], sys.modules[OTHER] = module, user
    yield module
    del sys.modules[NAME], sys.modules[OTHER]


def hook(name: str, seen: list[str], needs: tuple[str, ...] = (), *, required: bool = True) -> Hook:
    """Records the call and passes it on."""

    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(name)
        return call(*args, **kwargs)

    return Hook(NAME, name, around, needs, required)


def test_methods_are_placed_once_and_undone_once_and_again(framework: ModuleType) -> None:
    seen: list[str] = []
    before = dict(vars(framework.Model))
    hooks = Hooks([hook("Model.train", seen, ("epoch",)), hook("Model.fit", seen, ("epoch",))])
    for _ in range(2):
        hooks.place()
        hooks.place()
        assert framework.Model().fit(3) == ["Model", 3, None, {}]
        assert framework.Model.train(framework.Model(), 4)[1] == 4, "called through the class"
        assert framework.Model.train("no Model", 5)[:2] == ["str", 5], "as Python lets it be"
        assert seen == ["Model.fit", *["Model.train"] * 3]
        assert hooks.lost() == []
        seen.clear()
        hooks.undo()
        hooks.undo()
        assert dict(vars(framework.Model)) == before
    assert framework.Model().train(3) and seen == []


def test_a_function_is_wrapped_in_every_holder(framework: ModuleType) -> None:
    seen: list[str] = []
    original, user = framework.save, sys.modules[OTHER]
    hooks = Hooks([hook("save", seen, ("iteration",))])
    hooks.place()
    assert (framework.save(3), user.keep(4)) == (3, 4)
    assert seen == ["save", "save"]
    assert framework.save.__wrapped__ is original
    hooks.undo()
    assert framework.save is user.keep is original


def test_a_function_is_wrapped_when_its_module_is_imported(framework: ModuleType) -> None:
    seen: list[str] = []
    hooks = Hooks([hook("save", seen), hook("missing", seen)])
    hooks.place_in(NAME)
    assert framework.save(1) == 1 and sys.modules[OTHER].keep(2) == 2 and seen == ["save", "save"]
    hooks.undo()


def test_a_call_inside_a_call_of_the_same_hook_passes(framework: ModuleType) -> None:
    seen: list[str] = []
    hooks = Hooks([hook("Model.train", seen)])
    original = framework.Model.train
    framework.Model.train = lambda self, epoch: original(self, epoch) if epoch == 1 else self.train(epoch - 1)
    hooks.place()
    assert framework.Model().train(4)[1] == 1
    assert seen == ["Model.train"]
    with pytest.raises(TypeError):
        framework.Model().train()
    assert framework.Model().train(1) and seen == ["Model.train"] * 3, "an exception leaves nothing behind"


def test_what_somebody_puts_on_top_is_left_and_what_replaces_ours_is_wrapped(framework: ModuleType) -> None:
    seen: list[str] = []
    hooks = Hooks([hook("Model.train", seen)])
    hooks.place()
    ours = framework.Model.train

    def on_top(self: Any, epoch: int) -> Any:
        return ours(self, epoch)

    vars(on_top)["__wrapped__"] = ours
    framework.Model.train = on_top
    hooks.place()
    assert framework.Model.train is on_top and hooks.lost() == []
    hooks.undo()
    assert framework.Model.train is on_top
    framework.Model.train = lambda self, epoch: ["theirs"]
    assert hooks.lost() == ["Model.train"]
    hooks.place()
    assert framework.Model().train(1) == ["theirs"] and seen == ["Model.train"]


@pytest.mark.parametrize(
    ("name", "needs", "found"),
    [
        ("Model.evaluate", (), "no such function"),
        ("Modell.train", (), "None as Modell"),
        ("Model.train", ("epoch", "sink_size"), "without sink_size"),
        ("load", (), "no such function"),
        ("save", ("iteration", "optimizer"), "without optimizer"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_placed(
    framework: ModuleType, name: str, needs: tuple[str, ...], found: str
) -> None:
    seen: list[str] = []
    before, function = dict(vars(framework.Model)), framework.save
    hooks = Hooks([hook("Model.fit", seen), hook(name, seen, needs)], remedy=lambda: "Install version 1.")
    expected = rf"expected {NAME}\.{re.escape(name)}\(.*{found}.*Install version 1\."
    with pytest.raises(HookNotPlaced, match=expected) as refused:
        hooks.place()
    assert not refused.value.restart_helps
    assert dict(vars(framework.Model)) == before and framework.save is function


def test_an_optional_one_may_be_missing(framework: ModuleType) -> None:
    seen: list[str] = []
    Hooks([hook("load", seen, required=False), Hook("no.such.module", "f", hook("f", seen).around, (), False)]).place()


class Manager:
    """Applies its patches anew whenever it likes, as MindSpeed's does."""

    def __init__(self) -> None:
        self.wrappers: dict[str, Callable[[Any], Any]] = {}

    def register(self, path: str, wrapper: Callable[[Any], Any]) -> None:
        """Applies it at once."""
        self.wrappers[path] = wrapper
        self.apply(path, getattr(sys.modules[NAME], path.rpartition(".")[2]))

    def unregister(self, path: str, wrapper: Callable[[Any], Any]) -> None:
        """Of this very one."""
        assert self.wrappers.pop(path) is wrapper

    def apply(self, path: str, function: Any) -> None:
        """Wrap `function` and put it in place."""
        setattr(sys.modules[NAME], path.rpartition(".")[2], self.wrappers[path](function))


def test_a_patch_manager_is_notified_and_wraps_only_once(framework: ModuleType) -> None:
    seen: list[str] = []
    manager, original = Manager(), framework.save
    hooks = Hooks([hook("save", seen)], manager=manager)
    hooks.place()
    assert manager.wrappers[f"{NAME}.save"].__name__.endswith("_wrapper")
    assert framework.save(1) == 1 and seen == ["save"]
    manager.apply(f"{NAME}.save", lambda iteration: -iteration)
    assert framework.save(1) == -1 and seen == ["save", "save"]
    hooks.place()
    hooks.undo()
    assert manager.wrappers == {}
    assert sys.modules[OTHER].keep is original


def test_an_attribute_of_one_object() -> None:
    one, other = Derived(), Derived()
    undo = replace_attribute(one, "train", lambda train: lambda epoch: [*train(epoch), "ours"])
    assert one.fit(2) == ["Derived", 2, None, {}, "ours"] and other.fit(2) == ["Derived", 2, None, {}]
    inner = replace_attribute(one, "train", lambda train: lambda epoch: ["inner"])
    undo()
    assert one.fit(1) == ["inner"], "somebody else's by now"
    inner()
    assert one.fit(1)[-1] == "ours"
    undo()
    undo()
    assert "train" not in vars(one)
    with pytest.raises(AttributeError):
        replace_attribute(one, "nothing", lambda it: it)


def test_what_a_call_gives() -> None:
    model = Derived()
    assert arguments_of(model.train, (3,), {"sink": 1}) == {"epoch": 3, "sink": 1}
    assert argument(save, "model", (1, "m"), {}) == "m"
    assert argument(save, "model", (1,), {}, "none") is None, "the function's own default"
    assert argument(save, "optimizer", (1,), {}, "none") == "none"
    with pytest.raises(TypeError):
        arguments_of(save, (1, 2, 3), {})
