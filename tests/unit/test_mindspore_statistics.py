"""Which parameters of others than the optimizer are captured in each step, and what that costs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from lastgasp_mindformers import aux_state
from lastgasp_mindformers.aux_state import AuxRecorder, Numbers, decode
from lastgasp_mindformers.frozen import Frozen

KB = 1 << 10


class Param:
    """A parameter of MindSpore's, by what is asked of it."""

    dtype, itemsize = "Float32", 4

    def __init__(self, name: str, size: int) -> None:
        self.name, self.value = name, numpy.zeros(size // 4, numpy.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """MindSpore's."""
        return self.value.shape

    def asnumpy(self) -> Any:
        """The live values."""
        return self.value


class Net:
    """A network whose optimizer has nothing of these."""

    def __init__(self, *params: Param) -> None:
        self._params = params

    def cells_and_names(self) -> list[Any]:
        """None."""
        return []

    def parameters_and_names(self) -> list[tuple[str, Param]]:
        """All of them."""
        return [(param.name, param) for param in self._params]


@pytest.fixture(autouse=True)
def mindspore(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of it."""
    monkeypatch.setitem(sys.modules, "mindspore", SimpleNamespace(nn=SimpleNamespace(Optimizer=type(None))))
    monkeypatch.setattr(aux_state, "_generator", lambda: (1, 2))


@pytest.fixture
def recorders() -> Iterator[list[AuxRecorder]]:
    """To be closed."""
    made: list[AuxRecorder] = []
    yield made
    for recorder in made:
        recorder.close()


def train(recorder: AuxRecorder, steps: int, *graph: Param, callback: tuple[Param, ...] = ()) -> None:
    """From the start; each step changes these."""
    recorder.capture(Numbers(step=0, epoch=1, within=0))
    for step in range(1, steps + 1):
        for param in graph:
            param.value += 1
        recorder.capture(at := Numbers(step=step, epoch=1, within=step))
        for param in callback:
            param.value += 1
        recorder.capture(at)


def captured(recorder: AuxRecorder, step: int) -> dict[str, float]:
    """By name, the first value."""
    return {one.name: float(one.array()[0]) for one in decode(recorder.read(step)).statistics}


def test_what_stays_as_it_is_is_captured_in_the_first_steps_only(recorders: list[AuxRecorder]) -> None:
    """40 frozen layers of 1 MiB cost 200 ms in each step."""
    layers = [Param(f"frozen.{number}", 1000 * KB) for number in range(3)]
    mean, average, noted = Param("moving_mean", 64 * KB), Param("average", 1000 * KB), Param("noted", 1000 * KB)
    recorder = AuxRecorder(Net(*layers, mean, average, noted))
    recorders.append(recorder)
    train(recorder, 3, mean, average, callback=(noted,))
    assert len(captured(recorder, 3)) == 6 and not recorder.still
    train(recorder, 6, mean, average, callback=(noted,))
    assert captured(recorder, 6) == {"moving_mean": 9, "average": 9, "noted": 9}
    assert set(recorder.still) == {layer.name for layer in layers}
    assert recorder.names >= set(recorder.still), "still none that replicas must have in common"
    frozen = Frozen({}, {}, recorder.still)
    assert frozen.changed() == ""
    layers[1].value += 1
    assert frozen.changed() == "frozen.1", "read in a graph it may be one step ahead"


def test_what_the_first_step_broadcasts_is_no_change(recorders: list[AuxRecorder]) -> None:
    ranks = [[Param("small", KB), Param("frozen", 1000 * KB), Param("another", 1000 * KB)] for _ in range(2)]
    for params in ranks:
        recorder = AuxRecorder(Net(*params))
        recorders.append(recorder)
        train(recorder, 0)
    ranks[0][1].value += 1
    for recorder in recorders:
        train(recorder, 5)
    assert all(set(recorder.still) >= {"frozen"} for recorder in recorders)
    told = [decode(recorder.read(5)).still for recorder in recorders]
    assert told[0] and told[1] and told[0] != told[1], "a survivor cannot write the files of a rank that holds others"


def test_a_few_small_ones_are_captured_whether_they_change_or_not(recorders: list[AuxRecorder]) -> None:
    params = [Param(f"late.{number}", 100 * KB) for number in range(5)]
    recorders.append(AuxRecorder(Net(*params)))
    train(recorders[0], 9)
    assert len(captured(recorders[0], 9)) == 5


def test_callbacks_that_change_nothing_cost_no_second_capture(
    recorders: list[AuxRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    mean = Param("moving_mean", KB)
    mean.value[1] = numpy.nan
    recorders.append(AuxRecorder(Net(mean)))
    written: list[int] = []
    original = recorders[0].buffer.begin

    def begin(step: int, *more: Any) -> Any:
        written.append(step)
        return original(step, *more)

    monkeypatch.setattr(recorders[0].buffer, "begin", begin)
    train(recorders[0], 3, mean)
    assert written == [0, 1, 2, 3]
    train(recorders[0], 2, mean, callback=(mean,))
    assert written == [0, 1, 2, 3, 0, 1, 1, 2, 2]
    assert captured(recorders[0], 2) == {"moving_mean": 7}


def test_all_that_change_have_a_limit(recorders: list[AuxRecorder]) -> None:
    params = [Param(f"average.{number:02}", 1000 * KB) for number in range(40)]
    recorders.append(AuxRecorder(Net(*params)))
    assert len(recorders[0].names) == 32 and len(recorders[0].frozen) == 8
