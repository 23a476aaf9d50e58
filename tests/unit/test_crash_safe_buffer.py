"""The crash-safe buffer: complete records only, the right one of a step, and readable after SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lastgasp.crash_safe_buffer import CrashSafeBuffer


@pytest.fixture
def buffer() -> Iterator[CrashSafeBuffer]:
    buffer = CrashSafeBuffer(100)
    yield buffer
    buffer.close()


def write(buffer: CrashSafeBuffer, step: int, settled: bool, data: bytes) -> None:
    payload = buffer.begin(step, settled)
    payload[: len(data)] = data
    buffer.end(len(data))


def test_empty_box_has_no_record(buffer: CrashSafeBuffer) -> None:
    assert CrashSafeBuffer.read(buffer.fd, 0) is None
    assert CrashSafeBuffer.read(buffer.fd, 1) is None


def test_settled_beats_unsettled_whatever_the_order(buffer: CrashSafeBuffer) -> None:
    write(buffer, 7, True, b"settled")
    write(buffer, 7, False, b"unsettled")
    assert CrashSafeBuffer.read(buffer.fd, 7) == b"settled"


def test_the_newer_settled_record_wins(buffer: CrashSafeBuffer) -> None:
    write(buffer, 7, True, b"first")
    write(buffer, 7, True, b"second")
    assert CrashSafeBuffer.read(buffer.fd, 7) == b"second"


def test_a_torn_record_is_not_returned(buffer: CrashSafeBuffer) -> None:
    write(buffer, 7, False, b"whole")
    buffer.begin(7, True)[:4] = b"torn"
    assert CrashSafeBuffer.read(buffer.fd, 7) == b"whole"


def test_two_steps_are_kept_with_unsettled_records_between(buffer: CrashSafeBuffer) -> None:
    for step in range(1, 20):
        write(buffer, step, False, b"u%d" % step)
        write(buffer, step, True, b"s%d" % step)
        write(buffer, step + 1, False, b"u%d" % (step + 1))
        assert CrashSafeBuffer.read(buffer.fd, step) == b"s%d" % step
        assert CrashSafeBuffer.read(buffer.fd, step + 1) == b"u%d" % (step + 1)


def test_growing_keeps_the_descriptor(buffer: CrashSafeBuffer) -> None:
    fd = buffer.fd
    write(buffer, 1, True, b"x")
    buffer.grow(100_000)
    assert buffer.fd == fd
    assert CrashSafeBuffer.read(fd, 1) is None
    write(buffer, 2, True, b"y" * 100_000)
    assert CrashSafeBuffer.read(fd, 2) == b"y" * 100_000


@example(records=[(n == 3, True, bytes([n]), False) for n in range(6)] + [(1, False, b"", False)])
@example(records=[(0, True, b"", False), (0, True, b"new", False), *[(1, False, b"", False)] * 2])
@given(
    records=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.binary(max_size=60), st.booleans()), max_size=12)
)
def test_reading_agrees_with_a_model(records: list[tuple[int, bool, bytes, bool]]) -> None:
    """The last four records where all are settled, else at least the last two of each kind; torn ones do not count."""
    buffer = CrashSafeBuffer(60)
    for step, settled, data, torn in records:
        payload = buffer.begin(step, settled)
        payload[: len(data)] = data
        if not torn:
            buffer.end(len(data))
    numbered = list(enumerate(records))
    kept = numbered[-4:] if all(record[1] for record in records) else []
    kept = kept or [one for kind in (True, False) for one in [n for n in numbered if n[1][1] == kind][-2:]]
    for step in range(4):
        known = {(settled, n): data for n, (s, settled, data, torn) in numbered if s == step and not torn}
        sure = [(settled, n) for n, (s, settled, _, torn) in kept if s == step and not torn]
        found = CrashSafeBuffer.read(buffer.fd, step)
        best = [data for key, data in known.items() if not sure or key >= max(sure)]  # an older one may still be there
        assert found in best or (not sure and found is None)
    buffer.close()


def test_many_unsettled_records_cost_no_settled_one_and_not_the_one_before(buffer: CrashSafeBuffer) -> None:
    write(buffer, 1, True, b"s1")
    for step in range(2, 9):
        for part in range(5):
            write(buffer, step, False, b"u%d" % part)
        buffer.begin(step, False)[:4] = b"torn"
        assert CrashSafeBuffer.read(buffer.fd, step - 1) == b"s%d" % (step - 1)
        assert CrashSafeBuffer.read(buffer.fd, step) == b"u4"
        write(buffer, step, True, b"s%d" % step)
        assert step == 2 or CrashSafeBuffer.read(buffer.fd, step - 1) == b"s%d" % (step - 1)


def test_bytes_that_are_no_box_have_no_record() -> None:
    fd = os.memfd_create("other")
    assert CrashSafeBuffer.read(fd, 1) is None
    os.write(fd, b"\1" * 8192)
    assert CrashSafeBuffer.read(fd, 1) is None
    os.close(fd)


@pytest.mark.parametrize(("capacity", "slots"), [(-1, 4), (10, 1)])
def test_impossible_sizes_are_refused(capacity: int, slots: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        CrashSafeBuffer(capacity, slots)


CHILD = """
import sys
from lastgasp.crash_safe_buffer import CrashSafeBuffer
box = CrashSafeBuffer(4096)
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
    """A child is killed while it writes at full speed; what is read afterwards is complete."""
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
    found = [CrashSafeBuffer.read(fd, step) for step in range(last - 1, last + 1)]
    for step, data in zip(range(last - 1, last + 1), found, strict=True):
        assert data is None or data == step.to_bytes(8, "little") * 512
    assert any(found)
    os.close(fd)


def newest_step(fd: int) -> int:
    """The greatest step that any slot names: header word 2 of each slot (lastgasp/crash_safe_buffer.py)."""
    size = int.from_bytes(os.pread(fd, 8, 16), "little")
    return max(int.from_bytes(os.pread(fd, 8, 4096 + size * i + 16), "little") for i in range(4))
