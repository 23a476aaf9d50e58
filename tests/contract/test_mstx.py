"""Marks through mstx: the names and the switch of the embedded marks, on what torch_npu and MindSpore offer."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastgasp.backends.ascend import mstx
from lastgasp.backends.ascend.mstx import MstxMarks
from lastgasp.errors import ConfigError, MissingExtra
from lastgasp.pytorch.ranges import LiveRange, Range, range_of
from lastgasp.steps import bits
from lastgasp.steps.marks import Marks
from lastgasp.steps.settings import MarksConfig
from support.waiting import PATIENCE

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
    names = ("step 7", "forward", "step 8", "forward")
    assert starts(npu) == [(name, "default", True) for name in names], "torch_npu tells of the data loader itself"


def test_what_the_framework_reports_itself_is_left_to_it(npu: Any, marks: MstxMarks) -> None:
    for mark in (
        marks.define("{}", domain="communication", bit=bits.COMM, stream=True),
        marks.define("save_checkpoint", bit=bits.SAVE, stream=False),
        marks.mark("dataloader"),
    ):
        with mark:
            mark.value = 3
        assert not mark.cancel()
    assert npu.rows == []


@pytest.mark.parametrize(
    "name",
    ['say "hi"', "a\\b", "tab\tand\nline", "\N{SNOWMAN}", "x" * 2000, "\0" * 2000, "\N{SNOWMAN}" * 900, "odd\udcff"],
)
def test_any_name_reaches_the_file(npu: Any, marks: MstxMarks, name: str) -> None:
    """The profiler's C side drops what is not JSON, and what is too long, without a word."""
    with marks.mark(name):
        pass
    told = json.loads(f'"{starts(npu)[0][0]}"')
    assert told and name.encode(errors="backslashreplace").decode().startswith(told)
    assert told == name or len(name) > 500 or "\udcff" in name


def test_other_domains(npu: Any, marks: MstxMarks) -> None:
    with marks.define("copy", domain="mine", bit=bits.STEP, stream=True):
        pass
    assert npu.rows == [("start", 1, "copy", "mine", True), ("end", 1, "copy", "mine")]


def test_ranges_whose_number_is_known_at_their_end(npu: Any, marks: MstxMarks) -> None:
    """As the adapters have them (`lastgasp.pytorch.ranges`): here the number is one more than the last one's."""
    step = range_of(marks, marks.define("step {}", bit=bits.STEP, stream=True), bits.STEP, first=41)
    for number in (41, 42):
        step.begin()
        step.end(number)
    step.begin()
    assert step.cancel() and not step.cancel()
    assert [row[2] for row in npu.rows if row[0] == "start"] == ["step 41", "step 42", "step 43"]


def test_the_same_object_each_time(marks: MstxMarks) -> None:
    assert marks.mark("forward") is marks.mark("forward")


def test_the_switch(npu: Any, marks: MstxMarks) -> None:
    forward = marks.mark("forward")
    assert marks.switch(0, bits.FORWARD) == bits.STEP
    with forward:
        marks.switch(bits.FORWARD, 0)  # in the middle of a range that was not begun
    assert npu.rows == []
    with forward:
        marks.mask = 0  # in the middle of one that was
    assert [row[0] for row in npu.rows] == ["start", "end"]
    with pytest.raises(ConfigError):
        marks.mask = bits.ALL + 1


@pytest.mark.parametrize("theirs", [bits.COMM, bits.DATALOADER, bits.SAVE])
def test_what_the_framework_marks_itself_is_not_acknowledged(marks: MstxMarks, theirs: int) -> None:
    """Switching it here has no effect: TaskD does."""
    for on, off in ((theirs, 0), (0, theirs), (theirs | bits.STEP, 0)):
        with pytest.raises(ConfigError, match="switch-configmap"):
            marks.switch(on, off)
    assert marks.switch(0, 0) == bits.STEP | bits.FORWARD


def test_threads_and_nesting(npu: Any, marks: MstxMarks) -> None:
    forward, entered, leave = marks.mark("forward"), threading.Event(), threading.Event()

    def other() -> None:
        with forward:
            entered.set()
            leave.wait(PATIENCE)

    thread = threading.Thread(target=other)
    with forward:
        thread.start()
        assert entered.wait(PATIENCE)
        with forward:
            pass
    leave.set()
    thread.join(PATIENCE)
    ends = [("end", 3), ("end", 1), ("end", 2)]
    assert [row[:2] for row in npu.rows] == [("start", 1), ("start", 2), ("start", 3), *ends]


def test_an_end_without_a_begin_and_a_step_that_an_exception_left_open(npu: Any, marks: MstxMarks) -> None:
    marks.mark("forward").end()
    marks.step_begin(3)
    marks.step_begin(3)
    marks.step_end()
    assert [row[0] for row in npu.rows] == ["start", "end", "start", "end"]
    assert not marks.mark("forward").cancel()


def test_times_from_elsewhere_are_unknown(marks: MstxMarks) -> None:
    forward = marks.mark("forward")
    assert isinstance(forward, mstx.MstxMark)
    assert forward.put(1, 2, 0, 0, 0) is False


def test_what_adapters_call_is_there() -> None:
    """The marks of both engines are handed to the same adapters."""
    used = ("mark", "define", "step", "step_begin", "step_end", "mask", "switch", "path")
    assert [name for name in used if not hasattr(MstxMarks, name)] == []
    assert [name for name in used if not hasattr(Marks, name) and name not in Marks.__annotations__] == []


def test_each_engine_gets_the_ranges_that_suit_it(marks: MstxMarks) -> None:
    own = Marks.open(rank=0, world_size=1)
    try:
        kinds = [type(range_of(m, m.define("x", bit=bits.STEP, stream=True), bits.STEP)) for m in (own, marks)]
    finally:
        own.close(remove=True)
    assert kinds == [Range, LiveRange]


def test_groups_go_where_taskds_tool_looks(
    npu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, restored_environ: None
) -> None:
    monkeypatch.setenv("GROUP_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("MINDX_TASK_ID", "job-1")
    monkeypatch.setattr(mstx, "is_collected", lambda: True)
    found = mstx.open_recorder("pt", MarksConfig(), 3)
    assert found is not None
    found.set_groups({"g": {"group_name": "tp", "group_rank": 1, "global_ranks": [2, 3]}})
    text = (tmp_path / "job-1" / "3" / "parallel_group.json").read_text()
    assert json.loads(text) == {"g": {"group_name": "tp", "group_rank": 1, "global_ranks": [2, 3]}}
    assert found.flush(1) and found.close()
    with found.marks.mark("forward"):
        pass
    assert npu.rows == []


# -- MindSpore's, and who collects -----------------------------------------------------------------


def test_mindspores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`mindspore.profiler.mstx` and `mindspore.runtime.current_stream` (docs/facts/mindformers.md §6)."""
    (tmp_path / "mindspore" / "profiler").mkdir(parents=True)
    (tmp_path / "mindspore" / "__init__.py").touch()
    (tmp_path / "mindspore" / "runtime.py").write_text("def current_stream(): return 'stream'\n")
    (tmp_path / "mindspore" / "profiler" / "__init__.py").write_text(
        "rows = []\n"
        "class mstx:\n"
        "    @staticmethod\n"
        "    def range_start(message, stream=None, domain='default'): rows.append((message, stream)); return 0\n"
        "    @staticmethod\n"
        "    def range_end(range_id, domain='default'): raise AssertionError('0 is not a range')\n"
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


def test_somebody_collects(monkeypatch: pytest.MonkeyPatch, npu: Any, tmp_path: Path) -> None:
    """A preloaded library is seen where the loader has really loaded it."""
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 42 /opt/cann/lib64/libmspti.so\n")
    assert mstx.is_collected({}, maps)
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 42 /lib/libc.so.6\n")
    named = {"LD_PRELOAD": "/absent/libmspti.so"}
    assert not mstx.is_collected(named, maps), "named, not there, or too late"
    assert mstx.is_collected(named, tmp_path / "absent") and not mstx.is_collected({}, tmp_path / "absent")
    monkeypatch.setattr(mstx, "is_collected", lambda: True)
    found = mstx.open_marks("pt", bits.STEP)
    assert found is not None and found.mask == bits.STEP
