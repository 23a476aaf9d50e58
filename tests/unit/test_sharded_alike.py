"""When ranks compare what several of them hold: all of them at the same steps, whatever one of them alone has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lastgasp.pytorch.sharded.shared import Kind, Shared
from lastgasp.pytorch.sharded_source import ShardedSource

LAYER = Shared(Kind.APART, bytes([Kind.APART]) + b"layer", b"values", ["layer"])


class Parts:
    """Of a rank whose optimizer has no state before `first_state`, and which is not describable in some steps."""

    extra_modules: dict[Any, Any] = {}  # noqa: RUF012

    def __init__(self, first_state: int = 1, cannot: tuple[int, ...] = ()) -> None:
        self.step, self._first_state, self._cannot = 0, first_state, cannot

    def look(self) -> bool:
        self.step += 1
        if self.step in self._cannot:
            raise ValueError("a view of a part")
        return self.step == self._first_state

    def shared(self) -> list[Shared]:
        return [LAYER]

    def states_of_one(self) -> dict[str, bytes]:
        return {"step": b"1"} if self.step >= self._first_state else {}


def trained(parts: Any, steps: list[int], finished: tuple[int, ...] = ()) -> list[tuple[str, Any]]:
    """What the rank has gathered; finished: steps that its fault handler completes, alone."""
    gathered = list[tuple[str, Any]]()

    def gather(tag: str, own: bytes) -> list[bytes]:
        gathered.append((tag.removeprefix("sharded/alike/"), msgspec.msgpack.decode(own)))
        return [own]

    source: Any = object.__new__(ShardedSource)
    session = SimpleNamespace(note=lambda note: None, gather=gather, place=SimpleNamespace(replicas=((0,), (1,))))
    vars(source).update(
        life=SimpleNamespace(session=session), arena=None, durable=None, _kept={}, _cannot="", _completed=False,
    )  # fmt: skip
    source.describe(parts)
    for step in steps:
        source.keep(SimpleNamespace(step=step, groups=[]), compare=step not in finished)
    return gathered


EACH = list(range(101, 2200))
DUE = ["loaded", *(str(100 + n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048))]


@pytest.mark.parametrize(
    "parts", [Parts(), Parts(first_state=3), Parts(cannot=(2, 3, 4, 700)), Parts(cannot=(1,))],
    ids=["as others", "state made late", "cannot", "cannot at once"],
)  # fmt: skip
def test_what_one_rank_has_does_not_change_when_it_compares(parts: Parts) -> None:
    gathered = trained(parts, EACH)
    assert [tag for tag, _ in gathered] == DUE


def test_a_rank_that_does_not_know_what_it_holds_says_nothing_of_it() -> None:
    gathered = dict(trained(Parts(cannot=(2,)), EACH[:4]))
    assert gathered["102"] == [{}, None]
    assert [list(gathered[tag][0].values()) for tag in ("101", "104")] == [[LAYER.digest]] * 2


def test_a_step_completed_behind_a_fault_is_counted_and_waits_for_nobody() -> None:
    gathered = trained(Parts(), EACH[:9], finished=(102, 103))
    assert [tag for tag, _ in gathered] == ["loaded", "101", "104", "108"]


def test_steps_that_count_each_optimizer_and_one_that_is_reported_at_the_resume() -> None:
    tags = [tag for tag, _ in trained(Parts(), [100, 102, 104, 106, 108, 110])]
    assert tags == ["loaded", "100", "102", "104", "108"]


def test_without_parts_of_several_ranks_states_alone_are_compared() -> None:
    parts: Any = Parts(first_state=3)
    parts.shared = list
    assert dict(trained(parts, EACH[:4])) == {
        "loaded": [{}, {}], "101": [{}, {}], "102": [{}, {}], "104": [{}, {"step": b"1"}],
    }  # fmt: skip
