"""The black box: whole records only, the right one of a step, and readable after SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lastgasp.blackbox import BlackBox


@pytest.fixture
def box() -> Iterator[BlackBox]:
    box = BlackBox(100)
    yield box
    box.close()


def write(box: BlackBox, step: int, settled: bool, data: bytes) -> None:
    payload = box.begin(step, settled)
    payload[: len(data)] = data
    box.end(len(data))


def test_empty_box_has_no_record(box: BlackBox) -> None:
    assert BlackBox.read(box.fd, 0) is None
    assert BlackBox.read(box.fd, 1) is None


def test_settled_beats_unsettled_whatever_the_order(box: BlackBox) -> None:
    write(box, 7, True, b"settled")
    write(box, 7, False, b"unsettled")
    assert BlackBox.read(box.fd, 7) == b"settled"


def test_the_newer_settled_record_wins(box: BlackBox) -> None:
    write(box, 7, True, b"first")
    write(box, 7, True, b"second")
    assert BlackBox.read(box.fd, 7) == b"second"


def test_a_torn_record_is_not_returned(box: BlackBox) -> None:
    write(box, 7, False, b"whole")
    box.begin(7, True)[:4] = b"torn"
    assert BlackBox.read(box.fd, 7) == b"whole"


def test_two_steps_are_kept_with_unsettled_records_between(box: BlackBox) -> None:
    for step in range(1, 20):
        write(box, step, False, b"u%d" % step)
        write(box, step, True, b"s%d" % step)
        write(box, step + 1, False, b"u%d" % (step + 1))
        assert BlackBox.read(box.fd, step) == b"s%d" % step
        assert BlackBox.read(box.fd, step + 1) == b"u%d" % (step + 1)


def test_growing_keeps_the_descriptor(box: BlackBox) -> None:
    fd = box.fd
    write(box, 1, True, b"x")
    box.grow(100_000)
    assert box.fd == fd
    assert BlackBox.read(fd, 1) is None
    write(box, 2, True, b"y" * 100_000)
    assert BlackBox.read(fd, 2) == b"y" * 100_000


@example(records=[(n == 3, True, bytes([n]), False) for n in range(6)] + [(1, False, b"", False)])
@example(records=[(0, True, b"", False), (0, True, b"new", False), *[(1, False, b"", False)] * 2])
@given(
    records=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.binary(max_size=60), st.booleans()), max_size=12)
)
def test_reading_agrees_with_a_model(records: list[tuple[int, bool, bytes, bool]]) -> None:
    """The last four records where all are settled, else at least the last two of each kind; torn ones do not count."""
    box = BlackBox(60)
    for step, settled, data, torn in records:
        payload = box.begin(step, settled)
        payload[: len(data)] = data
        if not torn:
            box.end(len(data))
    numbered = list(enumerate(records))
    kept = numbered[-4:] if all(record[1] for record in records) else []
    kept = kept or [one for kind in (True, False) for one in [n for n in numbered if n[1][1] == kind][-2:]]
    for step in range(4):
        known = {(settled, n): data for n, (s, settled, data, torn) in numbered if s == step and not torn}
        sure = [(settled, n) for n, (s, settled, _, torn) in kept if s == step and not torn]
        found = BlackBox.read(box.fd, step)
        best = [data for key, data in known.items() if not sure or key >= max(sure)]  # an older one may still be there
        assert found in best or (not sure and found is None)
    box.close()


def test_many_unsettled_records_cost_no_settled_one_and_not_the_one_before(box: BlackBox) -> None:
    write(box, 1, True, b"s1")
    for step in range(2, 9):
        for part in range(5):
            write(box, step, False, b"u%d" % part)
        box.begin(step, False)[:4] = b"torn"
        assert BlackBox.read(box.fd, step - 1) == b"s%d" % (step - 1)
        assert BlackBox.read(box.fd, step) == b"u4"
        write(box, step, True, b"s%d" % step)
        assert step == 2 or BlackBox.read(box.fd, step - 1) == b"s%d" % (step - 1)


def test_bytes_that_are_no_box_have_no_record() -> None:
    fd = os.memfd_create("other")
    assert BlackBox.read(fd, 1) is None
    os.write(fd, b"\1" * 8192)
    assert BlackBox.read(fd, 1) is None
    os.close(fd)


@pytest.mark.parametrize(("capacity", "slots"), [(-1, 4), (10, 1)])
def test_impossible_sizes_are_refused(capacity: int, slots: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        BlackBox(capacity, slots)


CHILD = """
import sys
from lastgasp.blackbox import BlackBox
box = BlackBox(4096)
print(box.fd, flush=True)
sys.stdin.readline()
step = 0
while True:
    step += 1
    payload = box.begin(step, True)
    payload[:4096] = step.to_bytes(8, "little") * 512
    box.end(4096)
    if step == 2000:
        print("running", flush=True)
"""


def test_records_outlive_sigkill() -> None:
    """A child is killed while it writes at full speed; what is read afterwards is whole."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdin is not None
        fd = os.open(f"/proc/{child.pid}/fd/{int(child.stdout.readline())}", os.O_RDONLY)
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "running\n"
        child.send_signal(signal.SIGKILL)
    last = newest_step(fd)
    found = [BlackBox.read(fd, step) for step in range(last - 1, last + 1)]
    for step, data in zip(range(last - 1, last + 1), found, strict=True):
        assert data is None or data == step.to_bytes(8, "little") * 512
    assert any(found)
    os.close(fd)


def newest_step(fd: int) -> int:
    """The greatest step that any slot names: header word 2 of each slot (lastgasp/blackbox.py)."""
    size = int.from_bytes(os.pread(fd, 8, 16), "little")
    return max(int.from_bytes(os.pread(fd, 8, 4096 + size * i + 16), "little") for i in range(4))
