"""The order of the tests for xdist's workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.shares import parts, shares


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 5))
def test_each_test_is_run_once_and_each_worker_begins_with_long_ones(ranks: list[int], workers: int) -> None:
    tests = list(enumerate(ranks))
    ordered = shares(tests, workers, lambda test: test[1])
    assert sorted(ordered) == tests
    mine = [ordered[begin:end] for begin, end in parts(len(tests), workers)]
    assert sum(map(len, mine)) == len(tests)
    if ranks.count(2) >= 3 * workers:  # as it is: most are short
        assert all([test[1] for test in share] == sorted(test[1] for test in share) for share in mine)
        numbers = [sum(test[1] == 0 for test in share) for share in mine]
        assert max(numbers) - min(numbers) <= 1
        assert [test for share in mine for test in share if test[1] == 0] == [test for test in tests if test[1] == 0]
