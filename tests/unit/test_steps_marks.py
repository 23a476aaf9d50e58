"""Marks, written by C and by Python alike: each test runs with both, and decodes with `format` what they wrote."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from lastgasp.errors import ConfigError
from lastgasp.steps import bits, writer
from lastgasp.steps import format as layout
from lastgasp.steps.marks import KEPT_SLOTS, Mark, Marks
from lastgasp.steps.ring import Name

DEPTH = 64
"""Ranges of one mark that may be open at once."""


class Record(NamedTuple):
    """`format.RECORD`."""

    begin: int
    end: int
    id: int
    value: int
    device_begin: int
    device_end: int
    name: int
    thread: int


@pytest.fixture(params=["c", "python"])
def marks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Marks]:
    choose(request.param, monkeypatch)
    opened = Marks.open(rank=3, world_size=8, mask=bits.ALL, capacity=256, directory="/runs/x", device=2)
    yield opened
    opened.close(remove=True)


def choose(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `kind` the writer of the marks that are opened from now on."""
    monkeypatch.setenv(writer.SWITCH, "1" if kind == "python" else "0")
    if kind == "c" and writer.choose().__name__ != "lastgasp.steps._ring":
        pytest.skip("the extension lastgasp.steps._ring is not built: pip install -e . where there is a C compiler")


def records(marks: Marks) -> list[Record]:
    """All that wait in the ring, oldest first."""
    return [Record(*fields) for fields in layout.RECORD.iter_unpack(marks.records(layout.DEFAULT_CAPACITY))]


def named(marks: Marks) -> list[str]:
    """Their names, with the values in place."""
    names = marks.names()
    return [names[record.name].text.replace("{}", str(record.value)) for record in records(marks)]


def in_thread(work: Callable[[], object]) -> int:
    """Run it on another thread; returns that thread's number."""
    numbers: list[int] = []

    def run() -> None:
        numbers.append(threading.get_native_id())
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert numbers and not thread.is_alive()
    return numbers[0]


def in_it(mark: Mark) -> None:
    """One range."""
    with mark:
        pass


def test_the_writer_is_the_one_that_was_asked_for(marks: Marks, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["marks"]
    assert type(marks.mark("x")).__module__ == {"c": "lastgasp.steps._ring", "python": "lastgasp.steps.pyring"}[kind]


@pytest.mark.parametrize("way", ["with", "begin and end", "exit stack", "class"])
def test_a_range_is_recorded_with_times_id_name_and_thread(marks: Marks, way: str) -> None:
    mark = marks.mark("forward")
    before = time.monotonic_ns()
    if way == "with":
        with mark:
            inside = time.monotonic_ns()
    elif way == "begin and end":
        mark.begin()
        inside = time.monotonic_ns()
        mark.end()
    elif way == "exit stack":
        with contextlib.ExitStack() as stack:
            stack.enter_context(mark)
            inside = time.monotonic_ns()
    else:
        type(mark).__enter__(mark)
        inside = time.monotonic_ns()
        type(mark).__exit__(mark, None, None, None)
    after = time.monotonic_ns()
    (record,) = records(marks)
    assert before <= record.begin <= inside <= record.end <= after
    assert (record.id, record.value, record.device_begin, record.device_end) == (1, 0, 0, 0)
    assert record.thread == threading.get_native_id()
    assert marks.names()[record.name] == Name("forward", "default", bits.FORWARD, stream=True)


def test_marks_of_ones_own_are_outside_of_the_domain_in_which_steps_are_looked_for(marks: Marks) -> None:
    for name in ("substep {}", "step 3", "forward", "step"):
        with marks.mark(name):
            pass
    names = [marks.names()[record.name] for record in records(marks)]
    assert [name.domain for name in names] == ["user", "user", "default", "default"]
    assert {name.bit for name in names[:2]} == {bits.STEP}


def test_a_range_may_get_its_value_at_its_end(marks: Marks) -> None:
    mark = marks.define("step {}", bit=bits.STEP, stream=True)
    mark.value = 7
    for value in (41, -1, 2**63 - 1):
        mark.begin()
        mark.end_as(value)
    mark.begin()
    mark.end()
    mark.end_as(8)  # without a begin
    assert named(marks) == ["step 41", "step -1", f"step {2**63 - 1}", "step 7"]


def test_an_exception_ends_the_range_and_continues(marks: Marks) -> None:
    with pytest.raises(ZeroDivisionError), marks.mark("forward"):
        1 / 0  # noqa: B018
    assert named(marks) == ["forward"]


def test_a_mark_is_always_the_same_object_and_has_its_bit(marks: Marks) -> None:
    assert marks.mark("forward") is marks.mark("forward")
    defined = marks.define("dataloader", bit=bits.DATALOADER, stream=False)
    assert marks.mark("dataloader") is defined
    assert {name: marks.mark(name).bit for name in (*bits.BIT_OF_MARK, "my own")} == {
        **bits.BIT_OF_MARK,
        "my own": bits.STEP,
    }
    streams = {name.text: name.stream for name in marks.names()}
    assert streams["my own"] and streams["backward"] and streams["optimizer"] and streams["step"]
    assert not streams["dataloader"] and not streams["save_checkpoint"]


def test_a_name_that_is_no_string_is_refused(marks: Marks) -> None:
    with pytest.raises(TypeError, match=r"mark\('forward'\)"):
        marks.mark(7)  # type: ignore[arg-type]


def test_ids_are_taken_when_a_range_begins_and_records_come_when_it_ends(marks: Marks) -> None:
    with marks.mark("outer"), marks.mark("inner"):
        pass
    assert marks.take_id() == 3
    marks.mark("inner").begin()
    marks.mark("inner").end()
    assert [(record.id, name) for record, name in zip(records(marks), named(marks), strict=True)] == [
        (2, "inner"),
        (1, "outer"),
        (4, "inner"),
    ]


def test_the_value_is_taken_when_the_range_begins(marks: Marks) -> None:
    mark = marks.define("{} elements", domain="communication", bit=bits.COMM, stream=True)
    mark.value = -(2**63)
    with mark:
        mark.value = 2**63 - 1
        with mark:
            pass
    assert [record.value for record in records(marks)] == [2**63 - 1, -(2**63)]


def test_ranges_of_one_mark_nest(marks: Marks) -> None:
    mark = marks.mark("nested")
    with mark, mark, mark:
        pass
    found = records(marks)
    assert [record.id for record in found] == [3, 2, 1]
    assert all(a.begin >= b.begin and a.end <= b.end for a, b in itertools.pairwise(found))


def test_an_end_without_a_begin_does_nothing(marks: Marks) -> None:
    mark = marks.mark("forward")
    mark.end()
    with mark:
        pass
    mark.end()
    assert len(records(marks)) == 1


def test_a_cancelled_range_is_forgotten(marks: Marks) -> None:
    mark = marks.mark("forward")
    assert not mark.cancel()
    with mark:
        mark.begin()
        assert mark.cancel()
    assert [record.id for record in records(marks)] == [1]


def test_too_deep_is_dropped_and_counted_and_the_ends_still_fit(marks: Marks) -> None:
    mark = marks.mark("deep")
    for _ in range(DEPTH + 3):
        mark.begin()
    assert marks.dropped == 3
    for _ in range(DEPTH + 3):
        mark.end()
    assert [record.id for record in records(marks)] == list(range(DEPTH, 0, -1))
    with mark:
        pass
    assert marks.dropped == 3
    assert len(records(marks)) == DEPTH + 1


# -- the switch -------------------------------------------------------------------------------------


def test_what_is_off_is_not_recorded(marks: Marks) -> None:
    marks.mask = bits.FORWARD
    assert marks.mask == bits.FORWARD
    for name in ("step", "forward", "dataloader", "save_checkpoint"):
        with marks.mark(name):
            pass
    assert named(marks) == ["forward"]


def test_switched_off_in_between_the_range_is_complete_and_switched_on_in_between_it_is_none(marks: Marks) -> None:
    mark = marks.mark("forward")
    with mark:
        marks.mask = 0
    assert len(records(marks)) == 1
    with mark:
        marks.mask = bits.ALL
    assert len(records(marks)) == 1


def test_an_end_belongs_to_its_own_begin_whatever_was_off_meanwhile(marks: Marks) -> None:
    mark = marks.mark("forward")
    with mark:  # 1: recorded
        marks.mask = 0
        with mark:  # not recorded
            marks.mask = bits.ALL
            with mark:  # 2: recorded
                pass
            assert [record.id for record in records(marks)] == [2]
        assert [record.id for record in records(marks)] == [2]
    assert [record.id for record in records(marks)] == [2, 1]


def test_another_threads_end_does_not_take_this_threads_begin(marks: Marks) -> None:
    mark = marks.mark("forward")
    mark.begin()
    in_thread(mark.end)
    assert records(marks) == []
    other = in_thread(lambda: in_it(mark))
    mark.end()
    assert [(record.id, record.thread) for record in records(marks)] == [(2, other), (1, threading.get_native_id())]


def test_threads_that_ended_inside_a_range_do_not_fill_the_mark_for_ever(marks: Marks) -> None:
    mark = marks.mark("forward")
    for _ in range(DEPTH + 5):
        in_thread(mark.begin)
    with mark:
        pass
    assert (marks.dropped, len(records(marks))) == (0, 1)


def test_many_threads_at_once_lose_and_mix_nothing(marks: Marks) -> None:
    each, threads = 400, 4
    taken: list[Record] = []
    several = [marks.mark(f"thread {number}") for number in range(threads)]
    start = threading.Barrier(threads)

    def work(mark: Mark) -> None:
        start.wait(30)
        for number in range(each):
            mark.value = number
            while marks.head - marks.tail > 200:
                time.sleep(0)
            with mark:
                pass

    workers = [threading.Thread(target=work, args=(mark,)) for mark in several]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers) or marks.head > marks.tail:
            found = records(marks)
            marks.consumed(len(found))
            taken += found
    finally:
        sys.setswitchinterval(interval)
    for worker in workers:
        worker.join(30)
    assert marks.dropped == 0
    for mark in several:
        assert [record.value for record in taken if record.name == mark.name] == list(range(each))
    assert sorted(record.id for record in taken) == list(range(1, each * threads + 1))
    assert all(0 < record.begin <= record.end for record in taken)


@pytest.mark.parametrize("mask", [-1, bits.ALL + 1, "step"])
def test_a_wrong_mask_is_refused(marks: Marks, mask: int) -> None:
    with pytest.raises(ConfigError, match="mask="):
        marks.mask = mask
    assert marks.mask == bits.ALL


# -- steps ------------------------------------------------------------------------------------------


def test_step_ends_the_one_before(marks: Marks) -> None:
    for number in (6, 7, 8):
        marks.step(number)
    assert named(marks) == ["step 6", "step 7"]
    marks.step_end()
    marks.step_end()
    assert named(marks) == ["step 6", "step 7", "step 8"]
    assert {record.name for record in records(marks)} == {0}


def test_a_step_that_an_exception_left_open_is_forgotten(marks: Marks) -> None:
    marks.step_begin(6)
    marks.step_begin(6)
    marks.step_end()
    marks.step_begin(7)
    marks.step_end()
    assert [(record.id, name) for record, name in zip(records(marks), named(marks), strict=True)] == [
        (2, "step 6"),
        (3, "step 7"),
    ]


# -- a range timed elsewhere --------------------------------------------------------------------------


def test_put_records_what_it_is_given_even_while_off(marks: Marks) -> None:
    mark = marks.define("{}", domain="communication", bit=bits.COMM, stream=True)
    marks.mask = 0
    assert marks.put(mark, 100, 200, -5, (120, 190))
    assert marks.put(mark, 300, 2**64 - 1)
    thread = threading.get_native_id()
    assert records(marks) == [
        Record(100, 200, 1, -5, 120, 190, mark.name, thread),
        Record(300, 2**64 - 1, 2, 0, 0, 0, mark.name, thread),
    ]


def test_a_slot_with_device_times_is_clean_in_its_next_life(marks: Marks) -> None:
    mark = marks.mark("forward")
    for _ in range(256):
        marks.put(mark, 1, 2, 3, (4, 5))
    marks.consumed(256)
    with mark:
        pass
    assert (records(marks)[0].device_begin, records(marks)[0].device_end) == (0, 0)


# -- a full ring ------------------------------------------------------------------------------------


def test_a_full_ring_drops_counts_and_continues(marks: Marks) -> None:
    mark = marks.mark("forward")
    for _ in range(256):
        assert marks.put(mark, 1, 2)
    with mark:
        pass
    assert not marks.put(mark, 1, 2)
    assert (marks.head, marks.tail, marks.dropped) == (256, 0, 2)
    marks.consumed(10)
    with mark:
        pass
    assert (marks.head, marks.tail, marks.dropped) == (257, 10, 2)
    assert [record.id for record in records(marks)] == [*range(11, 257), 259]


def test_records_come_in_order_across_the_end_of_the_memory(marks: Marks) -> None:
    mark = marks.mark("forward")
    seen: list[int] = []
    for number in range(700):
        mark.value = number
        with mark:
            pass
        if number % 70 == 69:
            found = [Record(*fields) for fields in layout.RECORD.iter_unpack(marks.records(50))]
            marks.consumed(len(found))
            seen += [record.value for record in found]
    assert seen + [record.value for record in records(marks)] == list(range(700))
    assert marks.dropped == 0


@pytest.mark.parametrize("count", [-1, 2])
def test_more_on_disk_than_there_is_is_refused(marks: Marks, count: int) -> None:
    marks.put(marks.mark("forward"), 1, 2)
    with pytest.raises(ValueError, match="1 that there are"):
        marks.consumed(count)
    assert marks.tail == 0


# -- names ------------------------------------------------------------------------------------------


def test_names_run_out_into_other(marks: Marks) -> None:
    several = [marks.mark(f"name {number}") for number in range(2 * layout.NAMES_MAX)]
    assert len({mark.name for mark in several}) == layout.NAMES_MAX - KEPT_SLOTS
    last = several[-1]
    assert last is several[-2] is marks.mark("other")
    assert marks.names()[last.name] == Name("other", "default", bits.STEP, stream=True)
    comm = marks.define("{}", domain="communication", bit=bits.COMM, stream=True)
    assert comm is not last
    assert marks.names()[comm.name] == Name("other", "default", bits.COMM, stream=True)
    with last, several[0]:
        pass
    assert named(marks) == ["name 0", "other"]


@pytest.mark.parametrize(
    ("text", "stored"),
    [("", ""), ("Ünïcode\n\"'", "Ünïcode\n\"'"), ("x" * 600, "x" * 500), ("€" * 200, "€" * 166), ("\ud800", "?")],
)
def test_odd_names(marks: Marks, text: str, stored: str) -> None:
    mark = marks.mark(text)
    assert marks.names()[mark.name].text == stored
    assert marks.mark(text) is mark


def test_names_from_a_slot_on(marks: Marks) -> None:
    marks.mark("a"), marks.mark("b")
    assert [name.text for name in marks.names(1)] == ["a", "b"]
    assert marks.names(3) == []


# -- the end ----------------------------------------------------------------------------------------


def test_closed_marks_are_off_for_good_and_keep_their_counters(marks: Marks) -> None:
    mark, path = marks.mark("forward"), marks.path
    assert path is not None
    with mark:
        mark.begin()
        mark.end()
        marks.close(remove=True)
        mark.begin()
    marks.mask = bits.ALL
    with mark, marks.mark("a new one"):
        pass
    marks.step(1)
    marks.set_directory("/y")
    marks.consumed(1)
    assert not path.exists()
    assert (marks.mask, marks.head, marks.tail, marks.dropped) == (0, 1, 0, 0)
    assert marks.records(9) == b""
    assert not marks.put(mark, 1, 2)
    assert marks.take_id() == 0
    marks.close(remove=True)


def test_a_forked_child_writes_nothing_into_its_parents_ring(marks: Marks) -> None:
    mark = marks.mark("forward")
    path = marks.path
    assert path is not None
    mark.begin()
    child = os.fork()
    if child == 0:
        os._exit(_in_the_child(marks, mark))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (marks.head, marks.mask) == (0, bits.ALL)
    mark.end()
    assert [record.id for record in records(marks)] == [1]
    assert path.exists()


def test_a_fork_of_a_process_without_marks_loads_nothing() -> None:
    """Where another thread loads something at that moment, the child would wait for it for ever."""
    code = """
import os, sys
import lastgasp.steps.marks
before = set(sys.modules)
child = os.fork()
if child == 0:
    os._exit(len(set(sys.modules) - before))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")


def _in_the_child(marks: Marks, mark: Mark) -> int:
    try:
        own = os.getpid() == threading.get_native_id()
        mark.end()
        marks.mask = bits.ALL
        with mark:
            marks.step(3)
        marks.step_end()
        marks.consumed(0)
        marks.close(remove=True)
        other = Marks.open(rank=0, world_size=1, mask=bits.ALL)
        with other.mark("forward"):
            pass
        (record,) = records(other)
        other.close(remove=True)
        return 0 if own and record.thread == os.getpid() and marks.mask == 0 and marks.head == 0 else 1
    except BaseException:
        return 2


def test_nothing_is_leaked(marks: Marks) -> None:
    def use() -> None:
        opened = Marks.open(rank=0, world_size=1, capacity=16)
        with opened.mark("forward"), contextlib.suppress(TypeError):
            opened.mark(1)  # type: ignore[arg-type]
        opened.step(1)
        opened.close(remove=True)

    use()
    gc.collect()
    mark = marks.mark("forward")
    others = {id(found) for found in gc.get_objects() if isinstance(found, Marks)}

    def counts() -> tuple[int, int]:
        gc.collect()
        return sys.getrefcount(None), sys.getrefcount(mark)

    def grown() -> int:
        """References more after each call was made 200 times or more; other threads have some meanwhile, too."""
        before = counts()
        for _ in range(200):
            use()
        for _ in range(1000):
            with mark:
                marks.put(mark, 1, 2)
            mark.begin()
            mark.end()
            mark.cancel()
        return max(abs(a - b) for a, b in zip(counts(), before, strict=True))

    open_files = len(os.listdir("/proc/self/fd"))
    assert any(grown() < 200 for _ in range(3)), "what leaks does so in each round"
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert not [found for found in gc.get_objects() if isinstance(found, Marks) and id(found) not in others]


@pytest.mark.parametrize("kind", ["0", "1"])
def test_the_interpreter_ends_well_with_marks_open(kind: str) -> None:
    code = """
import atexit, sys, threading
from lastgasp.steps.marks import Marks
marks = Marks.open(rank=0, world_size=1)
mark = marks.mark("forward")
class Late:
    def __del__(self, mark=mark):
        with mark: pass
late = sys.late = Late()
late.itself = late
event = threading.Event()
def work():
    while True:
        with mark: event.set()
threading.Thread(target=work, daemon=True).start()
event.wait(30)
mark.begin()
marks.path.unlink()
"""
    environ = {**os.environ, writer.SWITCH: kind}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
