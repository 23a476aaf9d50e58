"""Marks through mstx: the names and the switch of the embedded marks, on what torch_npu and MindSpore offer."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastgasp.backends.ascend import mstx
from lastgasp.backends.ascend.mstx import MstxMarks
from lastgasp.errors import ConfigError, MissingExtra
from lastgasp.steps import bits
from lastgasp.steps.marks import Marks

STANDINS = Path(__file__).parent / "ascend_standins"


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in of torch_npu."""
    monkeypatch.syspath_prepend(STANDINS)
    found = importlib.import_module("torch_npu")
    yield found
    assert found.open_ranges == {}, "a range was never ended"
    del sys.modules["torch_npu"]


@pytest.fixture
def marks(npu: Any) -> MstxMarks:
    return MstxMarks(*mstx.torch_mstx(), mask=bits.ALL)


def starts(npu: Any) -> list[tuple[str, str, bool]]:
    """Message, domain and whether a stream was given."""
    return [(row[2], row[3], row[4]) for row in npu.rows if row[0] == "start"]


def test_names_as_taskd_knows_them(npu: Any, marks: MstxMarks) -> None:
    for number in (7, 8):
        marks.step(number)
        with marks.mark("dataloader"):
            pass
        with marks.mark("forward"):
            pass
    marks.step_end()
    expected = [("step 7", True), ("dataloader", False), ("forward", True), ("step 8", True), ("dataloader", False)]
    assert starts(npu) == [(name, "default", stream) for name, stream in (*expected, ("forward", True))]


def test_other_domains(npu: Any, marks: MstxMarks) -> None:
    with marks.define("copy", domain="communication", bit=bits.COMM, stream=True):
        pass
    assert npu.rows == [("start", 1, "copy", "communication", True), ("end", 1, "copy", "communication")]


def test_the_same_object_each_time(marks: MstxMarks) -> None:
    assert marks.mark("forward") is marks.mark("forward")


def test_the_switch(npu: Any, marks: MstxMarks) -> None:
    forward = marks.mark("forward")
    assert marks.switch(0, bits.FORWARD) == bits.ALL & ~bits.FORWARD
    with forward:
        marks.switch(bits.FORWARD, 0)  # in the middle of a range that was not begun
    assert npu.rows == []
    with forward:
        marks.mask = 0  # in the middle of one that was
    assert [row[0] for row in npu.rows] == ["start", "end"]
    with pytest.raises(ConfigError):
        marks.mask = bits.ALL + 1


def test_threads_and_nesting(npu: Any, marks: MstxMarks) -> None:
    forward, entered, leave = marks.mark("forward"), threading.Event(), threading.Event()

    def other() -> None:
        with forward:
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    with forward:
        thread.start()
        assert entered.wait(20)
        with forward:
            pass
    leave.set()
    thread.join(20)
    ends = [("end", 3), ("end", 1), ("end", 2)]
    assert [row[:2] for row in npu.rows] == [("start", 1), ("start", 2), ("start", 3), *ends]


def test_an_end_without_a_begin_and_a_step_that_an_exception_left_open(npu: Any, marks: MstxMarks) -> None:
    marks.mark("forward").end()
    marks.step_begin(3)
    marks.step_begin(3)
    marks.step_end()
    assert [row[0] for row in npu.rows] == ["start", "end", "start", "end"]
    assert not marks.mark("forward").cancel()


def test_times_from_elsewhere_cannot_be_told(marks: MstxMarks) -> None:
    assert marks.mark("forward").put(1, 2, 0, 0, 0) is False


def test_what_adapters_call_is_there() -> None:
    """The marks of both engines are handed to the same adapters."""
    used = ("mark", "define", "step", "step_begin", "step_end", "mask", "switch", "path")
    assert [name for name in used if not hasattr(MstxMarks, name)] == []
    assert [name for name in used if not hasattr(Marks, name) and name not in Marks.__annotations__] == []


# -- MindSpore's, and who collects -----------------------------------------------------------------


def test_mindspores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`mindspore.profiler.mstx` and `mindspore.runtime.current_stream` (facts/mindformers.md §6)."""
    (tmp_path / "mindspore" / "profiler").mkdir(parents=True)
    (tmp_path / "mindspore" / "__init__.py").touch()
    (tmp_path / "mindspore" / "runtime.py").write_text("def current_stream(): return 'stream'\n")
    (tmp_path / "mindspore" / "profiler" / "__init__.py").write_text(
        "rows = []\n"
        "class mstx:\n"
        "    @staticmethod\n"
        "    def range_start(message, stream=None, domain='default'): rows.append((message, stream)); return 0\n"
        "    @staticmethod\n"
        "    def range_end(range_id, domain='default'): raise AssertionError('0 is no range')\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindspore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    marks = MstxMarks(*mstx.mindspore_mstx())
    with marks.mark("forward"):
        pass
    assert sys.modules["mindspore.profiler"].rows == [("forward", "stream")]
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindspore"]:
        del sys.modules[name]


def test_without_the_package() -> None:
    with pytest.raises(MissingExtra, match="torch_npu"):
        mstx.torch_mstx()


def test_nobody_collects(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, npu: Any) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert mstx.open_marks("pt", bits.ALL) is None
    assert "libmspti.so is not preloaded" in caplog.text
    assert mstx.open_marks("pt", None) is None


def test_somebody_collects(monkeypatch: pytest.MonkeyPatch, npu: Any) -> None:
    monkeypatch.setitem(os.environ, "LD_PRELOAD", "/opt/libmspti.so")
    found = mstx.open_marks("pt", bits.STEP)
    assert found is not None and found.mask == bits.STEP
    assert mstx.is_collected({"LD_PRELOAD": ""}, Path("/nonexistent")) is False
