"""Each worker begins with its share of the long tests, and none is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.durations import ENVIRON, SHOWN, TABLE
from support.shares import LONG, parts, shares

Test = tuple[int, str, float]
FILES = st.sampled_from(["a", "b1", "b2", "c"])


def seconds(test: Test) -> float:
    return test[2]


def family(test: Test) -> tuple[str, str]:
    """Files of one letter belong together."""
    return test[1][0], test[1]


@given(st.lists(st.tuples(FILES, st.sampled_from([0.0, 2.0, 30.0])), max_size=60), st.integers(1, 5))
def test_each_part_begins_with_long_tests(drawn: list[tuple[str, float]], workers: int) -> None:
    tests = [(number, *each) for number, each in enumerate(drawn)]
    ordered = shares(tests, workers, seconds, family)
    assert sorted(ordered) == tests
    long = [seconds(test) >= LONG for test in ordered]
    if sum(long) <= len(tests) // workers:  # as it is: most are short
        pieces = [long[begin:end] for begin, end in parts(len(tests), workers)]
        assert all(piece == sorted(piece, reverse=True) for piece in pieces)


def test_the_seconds_are_shared_and_files_stay_together() -> None:
    tests = [(n, name, each) for n, (name, each) in enumerate(
        [("a", 90.0), ("b", 30.0), ("b", 30.0), ("b", 25.0), ("c", 80.0), ("c", 15.0), *[("short", 0.0)] * 9]
    )]  # fmt: skip
    ordered = shares(tests, 3, seconds, family)
    pieces = [ordered[begin:end] for begin, end in parts(len(tests), 3)]
    assert sorted(sum(map(seconds, piece)) for piece in pieces) == [85.0, 90.0, 95.0]
    assert sorted(len({family(test) for test in piece if seconds(test)}) for piece in pieces) == [1, 1, 1]


@pytest.mark.parametrize(("number", "parts_of_b"), [(1, 1), (3, 2)])
def test_files_that_belong_together_stay_so_unless_they_are_more_than_a_share(number: int, parts_of_b: int) -> None:
    names = [name for name in ("b1", "a", "b2", "c") for _ in range(number if "b" in name else 2)]
    tests = [(n, name, 30.0) for n, name in enumerate(names)]
    ordered = shares(tests, 2, seconds, family)
    pieces = [ordered[begin:end] for begin, end in parts(len(tests), 2)]
    assert sum(any(test[1].startswith("b") for test in piece) for piece in pieces) == parts_of_b


def test_the_table_names_files_that_are_there() -> None:
    rows = [row.partition(" ") for row in TABLE.read_text().splitlines()]
    assert all(float(number) >= SHOWN for number, _, _ in rows)
    files = {name.partition("::")[0] for _, _, name in rows}
    assert [file for file in files if not (TABLE.parents[2] / file).exists()] == []


def test_a_run_writes_the_table(pytester: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeconftest("""
        from support import durations
        durations.SHOWN = 0.0
        def pytest_configure(config):
            durations.note_durations(config)
    """)
    pytester.makepyfile("""
        import pytest
        @pytest.mark.parametrize("n", range(2))
        def test_it(n): pass
    """)
    monkeypatch.setenv(ENVIRON, str(tmp_path / "table"))
    monkeypatch.setenv("PYTHONPATH", str(TABLE.parents[1]))
    pytester.runpytest_subprocess("-q").assert_outcomes(passed=2)
    assert (tmp_path / "table").read_text() == "0 test_a_run_writes_the_table.py::test_it\n"
