"""Extra state of modules is that of the end of a step; where getting it takes long, it is had less often, and noted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from lastgasp import _clock  # noqa: E402
from lastgasp.pytorch.extrastate import EveryNth, ExtraStates, put  # noqa: E402
from lastgasp.pytorch.sharded_source import ShardedSource  # noqa: E402


class Time:
    """A clock that is told how long things take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(_clock, "monotonic", lambda: self.now)


class Scaled(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Keeps a number beside its parameters, and takes its time to say it."""

    def __init__(self, time: Time | None = None, seconds: float = 0.0) -> None:
        super().__init__()
        self.scale, self._time, self._seconds = [1.0], time, seconds

    def get_extra_state(self) -> Any:
        """The live object."""
        if self._time is not None:
            self._time.now += self._seconds
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        """It."""
        self.scale = state


@pytest.mark.parametrize(
    ("cost", "step", "every"),
    [(0.0005, 0.0001, 1), (0.002, 0.5, 1), (0.01, 0.09, 10), (0.01, 0.0, 100), (0.0051, 0.4949, 2)],
)
def test_it_takes_one_per_cent_of_the_time_at_most(
    cost: float, step: float, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, turns, made = Time(monkeypatch), EveryNth(), list[int]()

    def act() -> bool:
        time.now += cost
        return True

    for number in range(1, 209):
        time.now += step
        if turns.step_over(number, act):
            made.append(number)
            assert turns.step_over(number, lambda: True), "once more at the same step"
        else:
            assert turns.step_over(number, act) is None
    assert turns.every == every
    assert made == [*range(1, 9), *range(8 + every, 209, every)]


def test_what_becomes_cheap_is_had_at_each_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    time, turns = Time(monkeypatch), EveryNth()
    cost = 0.01

    def act() -> bool:
        time.now += cost
        return True

    for number in range(8):
        time.now += 0.09
        turns.step_over(number, act)
    assert turns.every == 10
    cost = 0.0001
    for number in range(8, 100):
        time.now += 0.09
        turns.step_over(number, act)
    assert turns.every == 1


def test_it_is_copied_and_put_under_each_of_its_names() -> None:
    shared = Scaled()
    model = torch.nn.ModuleDict({"a": shared, "b": shared, "plain": torch.nn.Linear(1, 1)})
    states = ExtraStates(model)
    taken = states.step_over(1)
    shared.scale[0] = 2.0
    assert taken == {"a._extra_state": [1.0], "b._extra_state": [1.0]}
    saved = model.state_dict()
    put(saved, taken)
    assert saved["a._extra_state"] == saved["b._extra_state"] == [1.0]
    assert (states.missing(taken), ExtraStates(torch.nn.Linear(1, 1)).missing({})) == ("", "")
    root = ExtraStates(Scaled())
    assert root.take() == {"_extra_state": [1.0]}


def test_a_step_that_was_left_out_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    states = ExtraStates(Scaled(time, 0.05))
    for step in range(8):
        time.now += 0.05
        assert states.step_over(step)
    taken = states.step_over(8)
    assert taken == {}
    assert "get_extra_state" in states.missing(taken) and "every 50th step" in states.missing(taken)


@pytest.mark.parametrize("left_out", [False, True])
def test_a_survivor_of_a_sharded_model_saves_that_of_the_step(
    left_out: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is the survivor's own, alive and in the middle of the next step; its arena is not asked."""
    time, notes, found = Time(monkeypatch), list[str](), list[Any]()
    module = Scaled(time, 0.05 if left_out else 0.0)
    source: Any = object.__new__(ShardedSource)
    source.shards = SimpleNamespace(
        extra_modules={("model", "x"): module}, look=lambda: None
    )
    source._extra_states = ExtraStates(source.shards.extra_modules)
    source._kept, source.arena, source.durable, source._completed, source.rank = {}, None, None, False, 0
    source._cannot, source._shared = "", SimpleNamespace(updated=lambda step, **_: None, alike=True)
    source.life = SimpleNamespace(session=SimpleNamespace(note=notes.append))
    for name in ("require", "capture", "buffers"):
        monkeypatch.setattr(source, name, lambda *_: b"")

    def write_own(*_: Any, extra: Any, **__: Any) -> bytes:
        found.append(extra)
        return b""

    monkeypatch.setattr(source, "write_own", write_own)
    monkeypatch.setattr("lastgasp.pytorch.sharded_source.part_of", lambda *_: b"")
    for step in range(9):
        source.keep(SimpleNamespace(step=step, groups=[]))
    module.scale[0] = 2.0
    wanted = SimpleNamespace(own=True, arenas={}, common=0)
    source._write(None, 8, wanted)
    assert found == [{} if left_out else {("model", "x"): [1.0]}]
    assert [("moment of the fault" in note) for note in notes] == ([True] if left_out else [])
