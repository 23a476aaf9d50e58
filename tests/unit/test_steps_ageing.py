"""Ageing: what goes, in which order, and what is never touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.steps import ageing
from lastgasp.steps.ageing import PERIOD_S, Aged, Ageing, file_max, to_delete
from lastgasp.steps.rankfiles import FILE_MAX

MB = 1 << 20


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Now."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def put(path: Path, size: int, age: int) -> Path:
    """A sparse file of that size, whose last write was `age` seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    os.utime(path, (2_000_000_000 - age, 2_000_000_000 - age))
    return path


def aged(count: int, size: int = MB) -> list[Aged]:
    return [Aged(1000 + i, Path(f"/b/t/0/{i:010d}"), size) for i in range(count)]


def test_at_the_limit_nothing_goes_and_a_byte_more_takes_the_oldest_fifth() -> None:
    files = aged(14)
    assert to_delete(files, total=10 * MB, limit=10 * MB, writing=None) == []
    assert to_delete(files, total=10 * MB + 1, limit=10 * MB, writing=None) == files[:2]
    assert to_delete(files[::-1], total=10 * MB + 1, limit=10 * MB, writing=files[0].path) == files[1:3]


def test_few_files_lose_one() -> None:
    files = aged(3)
    assert to_delete(files, total=10 * MB + 1, limit=10 * MB, writing=files[2].path) == files[:1]


def test_more_goes_where_a_fifth_would_not_do() -> None:
    files = aged(10)
    # This rank has 10 of the 40 MB; 20 are too much, of which its share is 5.
    assert to_delete(files, total=40 * MB, limit=20 * MB, writing=None) == files[:5]


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any),
    st.integers(1, 60),
    st.integers(0, 3000),
)
def test_all_ranks_together_come_below_the_limit_and_keep_what_they_write(
    counts: list[int], size: int, limit: int
) -> None:
    ranks = [aged(count, size) for count in counts]
    total = sum(counts) * size
    left = 0
    for files in ranks:
        writing = files[-1].path if files else None
        gone = to_delete(files, total, limit, writing)
        assert all(file.path != writing for file in gone)
        assert gone == files[: len(gone)]
        left += (len(files) - len(gone)) * size
    assert left <= limit + sum(size for files in ranks if files)


def test_only_old_files_with_ten_digits_in_folders_of_this_rank_go(tmp_path: Path, clock: Clock) -> None:
    base = tmp_path / "base"
    kept = [
        put(base / "task/0/notes.txt", MB, 900),
        put(base / "task/0/parallel_group.json", MB, 900),
        put(base / "task/0/lastgasp.json", MB, 900),
        put(base / "task/0/database.db", MB, 900),
        put(base / "task/0/123456789", MB, 900),
        put(base / "task/0/12345678901", MB, 900),
        put(base / "task/0/deeper/1700000000", MB, 900),
        put(base / "task/1/1700000000", MB, 900),
        put(base / "task/1700000000", MB, 900),
        put(base / "1700000000", MB, 900),
        put(base / "task/00/1700000000", MB, 900),
        put(base / "task/0/1700000004/1700000000", MB, 900),
    ]
    target = put(tmp_path / "elsewhere/0/1700000000", MB, 900)
    (base / "linked").symlink_to(tmp_path / "elsewhere")
    (base / "task/0/1700000003").symlink_to(target)
    writing = put(base / "task/0/1700000009", MB, 800)
    ours = [put(base / f"{task}/0/170000000{i}", MB, 100 - i) for task in ("task", "older") for i in range(3)]
    # 20 MB are there, and this rank has 7 of them: its share of the 10 that are too much is four files.
    assert set(Ageing(base, 0, 10, monotonic=clock).tick(writing)) == {ours[0], ours[1], ours[3], ours[4]}
    assert all(path.exists() for path in (*kept, target, writing))
    assert (base / "task/0/1700000003").is_symlink()


def test_the_oldest_by_modification_time_go_whatever_their_name(tmp_path: Path, clock: Clock) -> None:
    ages = [3, 9, 5, 7, 1, 8, 2, 6, 4, 10]
    files = {age: put(tmp_path / f"task/0/17000000{i:02d}", MB + MB // 8, age) for i, age in enumerate(ages)}
    removed = Ageing(tmp_path, 0, 10, monotonic=clock).tick(None)
    assert removed == [files[10], files[9]]
    assert all(files[age].exists() for age in range(1, 9))


def test_it_looks_at_the_start_and_every_minute(tmp_path: Path, clock: Clock) -> None:
    age = Ageing(tmp_path, 0, 10, monotonic=clock)
    assert age.tick(None) == []
    old, new = put(tmp_path / "task/0/1700000000", 11 * MB, 9), put(tmp_path / "task/0/1700000001", MB, 1)
    clock.now += PERIOD_S - 0.1
    assert age.tick(new) == []
    clock.now += 0.2
    assert age.tick(new) == [old]


def test_a_completed_file_is_a_reason_to_look(tmp_path: Path, clock: Clock) -> None:
    age = Ageing(tmp_path, 0, 10, monotonic=clock)
    age.tick(None)
    old = put(tmp_path / "task/0/1700000000", 11 * MB, 9)
    age.hasten()
    assert age.tick(None) == [old]


def test_a_large_base_is_looked_at_in_several_turns(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ageing, "ENTRIES_PER_TICK", 4)
    files = [put(tmp_path / f"task/0/170000000{i}", 3 * MB, 100 - i) for i in range(7)]
    age = Ageing(tmp_path, 0, 20, monotonic=clock)
    turns = [age.tick(None) for _ in range(4)]
    assert [turn for turn in turns if turn] == [files[:1]]
    assert turns[0] == []


def test_files_may_vanish_and_directories_too(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    old = put(tmp_path / "task/0/1700000000", 11 * MB, 9)
    real = Path.unlink

    def vanish(path: Path, missing_ok: bool = False) -> None:
        real(path)
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", vanish)
        assert Ageing(tmp_path, 0, 10, monotonic=clock).tick(None) == []
    assert not old.exists()
    assert Ageing(tmp_path / "nowhere", 0, 10, monotonic=clock).tick(None) == []


def test_a_base_full_of_other_files_is_one_warning(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "mine.bin", 11 * MB, 0)
    age = Ageing(tmp_path, 0, 10, monotonic=clock)
    for _ in range(3):
        assert age.tick(None) == []
        clock.now += PERIOD_S
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert (tmp_path / "mine.bin").exists()


@pytest.mark.parametrize("limit", range(10))
def test_a_limit_below_one_file_makes_small_files_and_one_warning(
    tmp_path: Path, clock: Clock, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    age = Ageing(tmp_path, 0, limit, monotonic=clock)
    assert 65536 <= file_max(limit) <= max(65536, limit * MB // 10)
    for turn in range(40):
        writing = put(tmp_path / f"task/0/17000000{turn:02d}", file_max(limit), 1000 - turn)
        age.hasten()
        age.tick(writing)
        assert writing.exists()
    total = sum(path.stat().st_size for path in (tmp_path / "task/0").iterdir())
    assert total <= max(limit * MB, file_max(limit))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_from_one_file_on_the_bound_is_the_documented_one() -> None:
    assert {file_max(limit) for limit in (10, 11, 5000, 10**9)} == {FILE_MAX} == {10485760}
