"""Wrapped methods without MindSpore: order, nesting, undo, drift; what a call gives; who is who."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from lastgasp.errors import ConfigError
from lastgasp_mindformers import ranks
from lastgasp_mindformers.patches import Hook, HookNotPlaced, Patches, bound

NAME = "a_framework_of_this_test"


class Base:
    """What is wrapped."""

    def train(self, epoch: int, callbacks: object = None, **more: object) -> list[object]:
        """Tells what it got."""
        return [self.__class__.__name__, epoch, callbacks, more]


class Derived(Base):
    """Calls what is wrapped inside of what is wrapped."""

    def fit(self, epoch: int) -> list[object]:
        """As the base."""
        return self.train(epoch)


@pytest.fixture
def framework() -> Iterator[ModuleType]:
    """A module with a fresh class."""
    module = ModuleType(NAME)
    vars(module)["Model"] = type("Model", (Derived,), {"train": Base.train, "fit": Derived.fit})
    sys.modules[NAME] = module
    yield module
    del sys.modules[NAME]


def hook(name: str, seen: list[str], needs: tuple[str, ...] = ("epoch",), owner: str = "Model") -> Hook:
    """Takes a note and goes on."""

    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(name)
        return call(*args, **kwargs)

    return Hook(NAME, owner, name, around, needs)


def test_placed_once_undone_once_and_again(framework: ModuleType) -> None:
    seen: list[str] = []
    before = dict(vars(framework.Model))
    patches = Patches([hook("train", seen), hook("fit", seen)])
    for _ in range(2):
        patches.place()
        patches.place()
        assert framework.Model().fit(3) == ["Model", 3, None, {}]
        assert seen == ["fit", "train"]
        seen.clear()
        patches.undo()
        patches.undo()
        assert dict(vars(framework.Model)) == before
    assert framework.Model().train(3) and seen == []


def test_a_call_inside_a_call_of_the_same_hook_passes(framework: ModuleType) -> None:
    seen: list[str] = []
    patches = Patches([hook("train", seen)])
    original = framework.Model.train
    framework.Model.train = lambda self, epoch: original(self, epoch) if epoch == 1 else self.train(epoch - 1)
    patches.place()
    assert framework.Model().train(4)[1] == 1
    assert seen == ["train"]
    with pytest.raises(TypeError):
        framework.Model().train()
    assert framework.Model().train(1) and seen == ["train", "train", "train"], "an exception leaves nothing behind"


def test_what_somebody_puts_on_top_is_left_and_what_replaces_ours_is_wrapped(framework: ModuleType) -> None:
    seen: list[str] = []
    patches = Patches([hook("train", seen)])
    patches.place()
    ours = framework.Model.train

    def on_top(self: Any, epoch: int) -> Any:
        return ours(self, epoch)

    vars(on_top)["__wrapped__"] = ours
    framework.Model.train = on_top
    patches.place()
    assert framework.Model.train is on_top
    patches.undo()
    assert framework.Model.train is on_top
    framework.Model.train = lambda self, epoch: ["theirs"]
    patches.place()
    assert framework.Model().train(1) == ["theirs"] and seen == ["train"]


@pytest.mark.parametrize(
    ("name", "owner", "needs", "found"),
    [
        ("evaluate", "Model", (), "no such method"),
        ("train", "Modell", (), "None as Modell"),
        ("train", "Model", ("epoch", "sink_size"), "without sink_size"),
    ],
)
def test_drift_is_an_error_before_anything_is_changed(
    framework: ModuleType, name: str, owner: str, needs: tuple[str, ...], found: str
) -> None:
    before = dict(vars(framework.Model))
    with pytest.raises(HookNotPlaced) as caught:
        Patches([hook("fit", []), hook(name, [], needs, owner)]).place()
    assert found in caught.value.found and f"{NAME}.{owner}.{name}(self" in caught.value.expected
    assert not caught.value.restart_helps
    assert dict(vars(framework.Model)) == before


def test_what_a_call_gives_by_name() -> None:
    assert bound(Base.train, (Base(), 3), {"other": 1}) == {"epoch": 3, "other": 1}
    assert bound(Base.train, (Base(),), {"callbacks": None, "epoch": 2}) == {"callbacks": None, "epoch": 2}
    with pytest.raises(TypeError):
        bound(Base.train, (Base(),), {})


# -- ranks -----------------------------------------------------------------------------------------

VARIABLES = ("MS_WORKER_NUM", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE", "RANK_ID", "MS_NODE_ID", "OMPI_COMM_WORLD_RANK")


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, (0, 1)),
        ({"MS_WORKER_NUM": "4", "RANK_ID": "3", "RANK_SIZE": "8"}, (3, 4)),
        ({"RANK_SIZE": "8", "MS_NODE_ID": "5"}, (5, 8)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, (1, 2)),
    ],
)
def test_ranks_before_communication_is_up(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], wanted: tuple[int, int]
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert ranks.rank_and_size() == wanted


def test_a_rank_that_nobody_tells_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK_ID"):
        ranks.rank_and_size()
    monkeypatch.setenv("RANK_ID", "one")
    with pytest.raises(ConfigError, match="a number"):
        ranks.rank_and_size()
