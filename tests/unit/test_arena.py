"""The arena: what it returns is what was copied for that step, or it returns nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgasp import arena as arenas
from lastgasp.arena import Arena, DamagedArena, reading, steps, verified
from lastgasp.arena_digest import ALONE, CHUNK, Check, Digest

BIG = 3 * arenas.CHUNK + 77


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.close()


def fill(arena: Arena, step: int, size: int = BIG) -> bytes:
    data = bytes([step % 251]) * (size - 9) + b"%09d" % step
    arena.reserve(size)
    arena.copy(step, [memoryview(data)[:100], memoryview(data)[100:]])
    return data


def read(arena: Arena, step: int) -> bytes:
    with verified(arena.fd, arena.identity, step) as payload:
        return bytes(payload)


def flip(arena: Arena, at: int) -> None:
    old = os.pread(arena.fd, 1, at)[0]
    os.pwrite(arena.fd, bytes([old ^ 4]), at)


def test_it_holds_the_last_two_steps(arena: Arena) -> None:
    assert steps(arena.fd, arena.identity) == ()
    data = {step: fill(arena, step) for step in range(1, 6)}
    assert steps(arena.fd, arena.identity) == (5, 4)
    assert read(arena, 5) == data[5] and read(arena, 4) == data[4]
    with pytest.raises(DamagedArena, match=r"does not hold step 3, but \[5, 4\]"):
        read(arena, 3)


def test_steps_for_the_buddy_have_slots_of_their_own(arena: Arena) -> None:
    arena.slots = arenas.BUDDY_SLOTS
    data = {}
    for step in range(1, 12):
        arena.reserve(BIG)
        data[step] = bytes([step]) * BIG
        arena.copy(step, [data[step]], buddy=step % 4 == 0)
    assert steps(arena.fd, arena.identity) == (11, 10, 8, 4)
    assert steps(arena.fd, arena.identity, buddy=True) == (8, 4)
    assert all(read(arena, step) == data[step] for step in (11, 10, 8, 4))
    for step in range(12, 20):  # where each copied step goes there, all slots are for these
        arena.copy(step, [data[1]], buddy=True)
    assert steps(arena.fd, arena.identity, buddy=True) == (19, 18, 17, 16)
    for step in (20, 21):
        arena.copy(step, [data[1]])
    assert steps(arena.fd, arena.identity) == (21, 20, 19, 18)


def test_a_copy_with_another_digest_is_not_taken(arena: Arena) -> None:
    data = fill(arena, 1)
    found = arenas.find(arena.fd, arena.identity, 1)
    assert found is not None and found.length == BIG and os.pread(arena.fd, BIG, found.at) == data
    copy = Arena(arena.identity)
    copy.reserve(found.capacity, touch=False)

    def fill_with(source: bytes) -> Callable[[memoryview], None]:
        left = memoryview(source)

        def fill(part: memoryview) -> None:
            nonlocal left
            part[:], left = left[: len(part)], left[len(part) :]

        return fill

    with pytest.raises(DamagedArena, match="of step 1 does not match"):
        copy.receive(1, BIG, found.digest, fill_with(data[:-1] + b"?"))
    assert steps(copy.fd, copy.identity) == () and arenas.find(copy.fd, copy.identity, 1) is None
    copy.receive(1, BIG, found.digest, fill_with(data))
    assert read(copy, 1) == data
    copy.close()


def test_a_copy_that_is_cut_short_leaves_the_other_slot(arena: Arena) -> None:
    fill(arena, 1)
    data = fill(arena, 2)

    def cut() -> Iterator[memoryview]:
        yield memoryview(bytes(1000))
        raise InterruptedError

    with pytest.raises(InterruptedError):
        arena.copy(3, cut())
    assert steps(arena.fd, arena.identity) == (2,)
    fill(arena, 4)  # over the torn slot, not over the only good one
    assert steps(arena.fd, arena.identity) == (4, 2) and read(arena, 2) == data


def test_too_much_is_refused_and_harms_nothing(arena: Arena) -> None:
    data = fill(arena, 1, 5000)
    with pytest.raises(ValueError, match="cannot hold"):
        arena.copy(2, [memoryview(bytes(arena.capacity)), memoryview(b"1")])
    assert steps(arena.fd, arena.identity) == (1,) and read(arena, 1) == data


def test_growing_starts_anew_and_shrinking_does_nothing(arena: Arena) -> None:
    fill(arena, 1, 5000)
    capacity = arena.capacity
    arena.reserve(10)
    assert arena.capacity == capacity and steps(arena.fd, arena.identity) == (1,)
    arena.reserve(3 * capacity)
    assert steps(arena.fd, arena.identity) == ()
    data = fill(arena, 2, 2 * capacity)
    assert read(arena, 2) == data
    arena.forget()
    assert steps(arena.fd, arena.identity) == ()


SIZES = st.sampled_from((1, 4095, arenas.CHUNK, CHUNK - 1, CHUNK, 2 * CHUNK + 3))


@settings(max_examples=20)
@given(st.lists(SIZES, min_size=1, max_size=5), st.booleans())
def test_the_digest_is_the_same_part_by_part_and_by_threads(sizes: list[int], threads: bool) -> None:
    length = sum(sizes) + threads * ALONE
    payload, digest, at = memoryview(bytes(range(256)) * (length // 256 + 1))[:length], Digest(b"id", 3), 0
    for size in (*sizes, threads * ALONE):
        digest.update(payload[at : at + size])
        at += size
    with Check(payload, b"id", 3) as check:
        assert check.result() == digest.end() == check.result()
    for other in (Check(payload[1:], b"id", 3), Check(payload, b"ie", 3), Check(payload, b"id", 4)):
        with other:
            assert other.result() != digest.end()


@pytest.mark.parametrize("size", [5000, ALONE + 5])
def test_one_that_is_read_before_it_is_verified_is_verified_at_the_end_in_any_case(arena: Arena, size: int) -> None:
    data = fill(arena, 1, size)
    with reading(arena.fd, arena.identity, 1) as found:
        assert found.payload == data
        found.verify()
    flip(arena, os.fstat(arena.fd).st_size - 5000)
    fill(arena, 2, size)
    flip(arena, os.fstat(arena.fd).st_size - 5000)
    with pytest.raises(DamagedArena, match="digest"), reading(arena.fd, arena.identity, 2) as found:
        assert found.payload != data
    with pytest.raises(KeyError), reading(arena.fd, arena.identity, 2):  # what was raised is not hidden
        raise KeyError


@given(st.integers(0, 5 * 4096 + 1), st.integers(0, 3))
def test_no_flipped_bit_is_returned(at: int, which: int) -> None:
    """Wherever it is: in the file's header, in a slot's, in the payload. Padding behind the payload is nobody's."""
    arena = Arena()
    try:
        data = {step: fill(arena, step, 4096) for step in (1, 2)}
        flip(arena, at % os.fstat(arena.fd).st_size)
        for step in (1, 2):
            try:
                assert read(arena, step) == data[step]
            except DamagedArena:
                pass
        assert set(steps(arena.fd, arena.identity)) <= {1, 2} or at % 12288 >= 4096
    finally:
        arena.close()


def test_wrong_step_and_other_arena_are_refused(arena: Arena) -> None:
    fill(arena, 7)
    other = Arena()
    fill(other, 7)
    with pytest.raises(DamagedArena, match="another arena"), verified(other.fd, arena.identity, 7):
        raise AssertionError("not reached")
    assert steps(other.fd, arena.identity) == ()
    where = next(at for at in (4096, 4096 * 2 + -(-BIG // 4096) * 4096) if os.pread(arena.fd, 16, at + 8)[0] == 7)
    os.pwrite(arena.fd, (8).to_bytes(8, "little"), where + 8)  # a step that it never had
    assert steps(arena.fd, arena.identity) == (8,)
    with pytest.raises(DamagedArena, match="digest"), verified(arena.fd, arena.identity, 8):
        raise AssertionError("not reached")
    other.close()


def test_a_writer_that_goes_on_is_noticed_at_the_end(arena: Arena) -> None:
    fill(arena, 1)
    reading = verified(arena.fd, arena.identity, 1)
    reading.__enter__()
    fill(arena, 2)
    fill(arena, 3)
    with pytest.raises(DamagedArena, match="overwritten while"):
        reading.__exit__(None, None, None)


@pytest.mark.parametrize("left", [1, 2])
def test_the_next_process_goes_on_with_the_memory_and_one_step_of_it(arena: Arena, left: int) -> None:
    data = {step: fill(arena, step) for step in (1, 2)}
    successor = Arena()
    with pytest.raises(DamagedArena, match="does not hold step 3"):
        successor.adopt(arena.fd, arena.identity, 3)
    fill(successor, 9, 5000)
    successor.adopt(os.dup(arena.fd), arena.identity, left)
    assert (successor.identity, successor.capacity) == (arena.identity, arena.capacity)
    assert steps(arena.fd, arena.identity) == (left,) and read(successor, left) == data[left]
    for step in (left + 1, left + 2):  # done again, it may have other numbers
        again = fill(successor, step)
        assert steps(successor.fd, successor.identity) == (step, step - 1) and read(arena, step) == again
    successor.close()


KILLED = """
import os, signal, sys
from lastgasp.arena import Arena
arena = Arena()
arena.reserve(1 << 20)
for step in (1, 2):
    arena.copy(step, [memoryview(bytes([step]) * (1 << 20))])
print(os.getpid(), arena.fd, arena.identity.hex(), flush=True)
sys.stdin.readline()
def pieces():
    yield memoryview(bytes([3]) * 5000)
    os.kill(os.getpid(), signal.SIGKILL)
arena.copy(3, pieces())
"""


def test_it_outlives_a_kill_in_the_middle_of_a_copy() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None and rank.stdin is not None
        pid, number, identity = rank.stdout.readline().split()
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
        rank.stdin.write("go\n")
        rank.stdin.flush()
        assert rank.wait(60) == -signal.SIGKILL
    try:
        assert steps(fd, bytes.fromhex(identity)) == (2,)
        with verified(fd, bytes.fromhex(identity), 2) as payload:
            assert bytes(payload) == bytes([2]) * (1 << 20)
    finally:
        os.close(fd)


def write_group(folder: Path, most: str, used: str, cached: str) -> None:
    """A control group; each text is a name and a value."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (most.split(), used.split(), ("memory.stat", f"anon 5\n{cached}")):
        (folder / name).write_text(f"{value}\n")


def test_what_it_needs_and_what_the_host_has(tmp_path: Path) -> None:
    arena = Arena()
    arena.reserve(100_000)
    assert os.fstat(arena.fd).st_size == arenas.needed(100_000)
    arena.close()
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 64 kB\nMemAvailable:   2048 kB\n")
    groups, mounted = tmp_path / "groups", tmp_path / "cgroup"

    def has() -> int | None:
        return arenas.available(meminfo, groups, mounted)

    assert has() == 2048 * 1024
    groups.write_text("0::/../job/step\n")  # as Slurm and systemd nest them; `..` is outside of this container
    write_group(mounted / "job", "memory.max 1000000", "memory.current 900000", "inactive_file 300000")
    write_group(mounted / "job/step", "memory.max max", "memory.current 1", "inactive_file 0")
    assert has() == 400_000
    (mounted / "job/memory.max").write_text("max\n")
    assert has() == 2048 * 1024
    groups.write_text("9:cpu:/\n4:memory:/job/step\n0::/\n")
    most, used = "memory.limit_in_bytes 600000", "memory.usage_in_bytes 100000"
    write_group(mounted / "memory/job/step", most, used, "total_inactive_file 4096")
    assert has() == 504_096
    assert arenas.available(tmp_path / "nothing", tmp_path / "nothing", mounted) is None
