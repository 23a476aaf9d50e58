"""Ranges become steps: what belongs to which step, what is done again after a resume, and bounded tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgasp.steps.report import fold as fold_module
from lastgasp.steps.report import table as table_module
from lastgasp.steps.report.fold import Kinds, RankFold, covered, overlap, step_number
from lastgasp.steps.report.spans import Range
from lastgasp.steps.report.table import ALL_STEPS_MAX, STEPS_MAX, STEPS_MIN, TIMES, Step, StepTable, limits
from support.step_jobs import COLLECTIVE, EPOCH, rows_of

MS = 1_000_000


def item(name: str, begin: float, end: float, pid: int = 7, domain: str = "default") -> Range:
    """A range; times in ms."""
    stream = name not in ("dataloader", "save_checkpoint")
    first, last = EPOCH + int(begin * MS), EPOCH + int(end * MS)
    return Range(name, domain, pid, pid, stream, first, last, first if stream else 0, last if stream else 0)


def folded(ranges: Iterable[Range], table: StepTable | None = None, end: bool = True) -> RankFold:
    """The rank after these ranges, in the order in which their rows are in the file."""
    result = RankFold(Kinds(), table or StepTable())
    result.feed(chain.from_iterable(rows_of(found, number, 0) for number, found in enumerate(ranges, start=1)))
    if end:
        result.end()
    return result


def column(result: RankFold, name: str) -> list[float]:
    """In ms."""
    return [round(value * 1e3, 6) for value in result.table.times(name)]


def saves(result: RankFold) -> list[tuple[int, float]]:
    """Step and ms."""
    return [(step, round(seconds * 1e3, 6)) for step, _, seconds in result.table.saves]


# -- what belongs to which step --------------------------------------------------------------------


def test_parts_belong_to_the_step_in_whose_time_they_begin() -> None:
    result = folded(
        [
            item("dataloader", 0, 2), item("forward", 2, 6), item("backward", 6, 9), item("optimizer", 9, 10),
            item("step 1", 0, 10),
            item("dataloader", 10.5, 13),  # between two steps: of the one after
            item("forward", 13, 17), item("forward", 17, 18), item("step 2", 11, 20),
        ]
    )  # fmt: skip
    assert list(result.table.numbers) == [1, 2]
    assert column(result, "data") == [2, 2.5]
    assert column(result, "forward") == [4, 5]
    assert column(result, "backward") == [3, 0]
    assert column(result, "optimizer") == [1, 0]
    assert column(result, "time") == [10, 9]
    assert column(result, "period") == [10, 10]


def test_a_save_between_two_steps_belongs_to_the_one_before() -> None:
    result = folded([item("step 1", 0, 10), item("save_checkpoint", 11, 15), item("step 2", 16, 20)])
    assert column(result, "save") == [4, 0]
    assert saves(result) == [(1, 4)]


def test_a_save_in_the_background_that_ends_steps_later_is_a_save_as_well() -> None:
    steps = [item(f"step {n}", 10 * n, 10 * n + 9) for n in range(5)]
    result = folded([*steps[:4], item("save_checkpoint", 12, 35), steps[4]])
    assert saves(result) == [(1, 23)]
    assert column(result, "save") == [0, 23, 0, 0, 0]


def test_overlapping_parts_count_once() -> None:
    buckets = [item(COLLECTIVE, 1, 5, domain="communication"), item(COLLECTIVE, 3, 7, domain="communication")]
    result = folded([*buckets, item("step 1", 0, 10)])
    assert column(result, "communication") == [6]
    assert [round(seconds * 1e3) for _, _, seconds in result.table.collectives(0)] == [4, 4]


def test_forward_without_the_collectives_in_it() -> None:
    result = folded([item(COLLECTIVE, 3, 5, domain="communication"), item("forward", 1, 6), item("step 1", 0, 10)])
    assert column(result, "forward") == [5]
    assert column(result, "forward_own") == [3]


def test_backward_without_its_waits() -> None:
    """Ready at 6 and at 8, both done at 14: it computes until 8, and again from 14 on."""
    waits = [item(COLLECTIVE, 6, 14, domain="communication"), item(COLLECTIVE, 8, 14, domain="communication")]
    result = folded([*waits, item("backward", 5, 15), item("step 1", 0, 16)])
    assert column(result, "backward_own") == [4]
    bare = folded([item("backward", 5, 15), item("step 1", 0, 16)])
    assert math.isnan(bare.table.times("backward_own")[0])


def test_what_steps_that_were_not_marked_took_is_not_the_next_ones() -> None:
    """`step=off` for a while, and before the first one."""
    def parts(begin: float) -> list[Range]:
        loader, forward = item("dataloader", begin, begin + 2), item("forward", begin + 2, begin + 6)
        return [loader, forward, item(COLLECTIVE, begin + 7, begin + 8, domain="communication")]

    unmarked = [one for n in range(1, 4) for one in parts(10 * n)]
    save = item("save_checkpoint", 38, 39)
    result = folded([*parts(-10), *parts(0), item("step 1", 1, 9), *unmarked, save, *parts(40), item("step 5", 41, 49)])
    assert list(result.table.numbers) == [1, 5]
    assert column(result, "data") == [2, 2]
    assert column(result, "forward") == [4, 4]
    assert column(result, "communication") == [1, 1]
    assert [result.table.collective_count(place) for place in (0, 1)] == [1, 1]
    assert [seconds for _, seconds in saves(result)] == [1]


@pytest.mark.parametrize("first", [1, 7])
def test_a_second_training_of_a_script_is_no_resume(first: int) -> None:
    """Where the first one was resumed, too."""
    numbers = (*range(first, first + 4), 1, 2, 3, 3)
    result = folded([item(f"step {n}", 10 * at, 10 * at + 9) for at, n in enumerate(numbers)])
    assert list(result.table.numbers) == [1, 2, 3]
    assert (result.table.earlier, result.table.undone) == (4, 1)


def test_the_newest_step_waits_for_its_late_rows() -> None:
    result = folded([item("step 1", 0, 10), item("save_checkpoint", 11, 15)], end=False)
    assert len(result.table) == 0
    result.end()
    assert column(result, "save") == [4]


@pytest.mark.parametrize(
    ("name", "number"),
    [("step 1", 1), ("Step 4", 4), ("train_step 5", 5), ("step 7 x", 7)]
    + [(name, None) for name in ("step_6", "step", "step x", "forward", "step -1", "step 1.5", f"step {10**18}", "")],
)
def test_names_of_steps_as_taskds_reader_takes_them(name: str, number: int | None) -> None:
    assert step_number(name) == number


def test_of_two_series_of_steps_the_first_counts() -> None:
    result = folded([item("step 1", 0, 9), item("train_step 1", 1, 8), item("step 2", 10, 19)])
    assert list(result.table.numbers) == [1, 2]
    assert column(result, "time") == [9, 9]


def test_marks_that_lastgasp_lost_are_counted() -> None:
    lost = [item("dropped 12", 0, 1, domain="lastgasp"), item("dropped x", 0, 1, domain="lastgasp")]
    assert folded([*lost, item("dropped 30", 0, 1, domain="lastgasp"), item("dropped 5", 0, 1)]).dropped == 42


def test_a_clock_that_went_back_makes_no_negative_time() -> None:
    result = folded([item("forward", 5, 2), item("step 1", 0, 10), item("step 2", 12, 11)])
    assert list(result.table.numbers) == [1]
    assert column(result, "forward") == [0]


# -- attempts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pid", [8, 7], ids=["another pid", "the same pid, as containers give it"])
def test_steps_after_a_resume_count_once_and_warm_up_again(pid: int) -> None:
    first = [item(f"step {n}", 10 * n, 10 * n + 9) for n in range(1, 31)]
    second = [item(f"step {n}", 1000 + 20 * n, 1000 + 20 * n + 19, pid) for n in range(21, 41)]
    result = folded([*first, *second])
    assert list(result.table.numbers) == list(range(1, 41))
    assert result.table.undone == 10
    assert column(result, "time") == [9] * 20 + [19] * 20
    assert list(result.table.nths) == [*range(1, 21), *range(1, 21)]
    assert max(column(result, "period")) == 20, "the time until the restart is not a step's"


def test_the_last_step_made_again() -> None:
    """Killed between the step and its checkpoint: the next attempt begins with the very same number."""
    first = [item(f"step {n}", 10 * n, 10 * n + 9) for n in range(1, 6)]
    result = folded([*first, item("step 5", 1000, 1019, 8), item("step 6", 1020, 1039, 8)])
    assert list(result.table.numbers) == [1, 2, 3, 4, 5, 6]
    assert column(result, "time") == [9, 9, 9, 9, 19, 19]
    assert result.table.undone == 1


def test_recovered_rows_of_a_killed_process_find_their_place() -> None:
    """The launcher writes them when the next attempt's rows may already be in the file."""
    first = [item(f"step {n}", 10 * n, 10 * n + 9, pid=1) for n in range(1, 11)]
    second = [item(f"step {n}", 1000 + 10 * n, 1000 + 10 * n + 9, pid=2) for n in range(9, 21)]
    late = folded([*first[:6], *second[:5], *first[6:], *second[5:]])
    assert list(late.table.numbers) == list(range(1, 21))
    assert list(late.table.begins) == sorted(late.table.begins)
    assert late.table.begins[8] == second[0].host_begin, "step 9 counts as the second attempt made it"


# -- bounded ---------------------------------------------------------------------------------------


def test_ranges_that_wait_for_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_module, "PENDING_MAX", 100)
    result = folded([item("dataloader", n, n + 1) for n in range(1000)], end=False)
    (process,) = result._processes.values()
    assert len(process._pending) <= 100
    assert process._pending[-1][1].host_begin == EPOCH + 999 * MS, "the newest are kept"


@settings(deadline=None)
@given(first=st.integers(0, 500), count=st.integers(100, 3000), size=st.integers(16, 200))
def test_a_thinned_table_is_bounded_and_keeps_the_newest(first: int, count: int, size: int) -> None:
    table = StepTable(size, 10 * size)
    for number in range(first, first + count):
        table.append(Step(number, number, number + 1, time=float(number)))
    assert len(table) <= size
    assert len(table) + table.thinned == count == table.seen
    kept = list(table.numbers)
    assert kept == sorted(set(kept))
    newest = min(count, size // 4)
    assert kept[-newest:] == list(range(first + count - newest, first + count))
    assert list(table.times("time")) == kept, "columns stay side by side"


def test_all_ranks_keep_the_same_steps_and_no_period_is_hit() -> None:
    """Also a rank that began some steps later: the hash is of the number."""
    tables = [StepTable(400), StepTable(400)]
    for number in range(10_000):
        for rank, table in enumerate(tables):
            if number >= 37 * rank:
                table.append(Step(number, number, number + 1))
    one, other = (set(table.numbers) for table in tables)
    assert len(one & other) >= 0.8 * min(len(one), len(other))
    old = [number for number in one if number < 9000]
    assert len(old) > 40
    assert 0.3 < sum(number % 2 for number in old) / len(old) < 0.7


def test_collectives_are_bounded_and_those_of_the_newest_steps_are_kept() -> None:
    table = StepTable(1000, 100)
    for number in range(500):
        table.append(Step(number, number, number + 1), [(number % 3, number, 0.1), (1, number, 0.2)])
        assert len(table._kinds) <= 100
    assert table.collective_count(0) == 0
    assert table.collectives(499) == [(499 % 3, 499, 0.1), (1, 499, 0.2)]
    kept = [place for place in range(500) if table.collective_count(place)]
    assert kept == list(range(kept[0], 500))
    for place in kept:
        assert table.collectives(place)[0][1] == place


def test_saves_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "SAVES_MAX", 10)
    table = StepTable()
    for number in range(100):
        table.add_save(number, number, 0.1)
    assert 5 <= len(table.saves) <= 10
    assert table.saves[-1][0] == 99


def test_a_job_of_many_ranks_keeps_fewer_steps_of_each() -> None:
    assert limits(1)[0] == limits(8)[0] == STEPS_MAX
    for ranks in (50, 500, 1000):
        assert ranks * limits(ranks)[0] <= max(ALL_STEPS_MAX, ranks * STEPS_MIN)
    assert limits(100_000)[0] == STEPS_MIN


def test_the_columns_are_those_of_a_step() -> None:
    assert {"number", "begin", "end", "nth", *TIMES} == set(Step.__struct_fields__)


def test_kinds_of_collectives_are_few_while_names_change_with_every_batch() -> None:
    kinds = Kinds()
    for count in range(3 * Kinds.NAMES_MAX):
        kinds(COLLECTIVE.replace("1000", str(count)))
    kinds("not json")
    assert kinds.known == [("HcclAllReduce", "default_group"), ("not json", "")]
    assert len(kinds._names) <= Kinds.NAMES_MAX


# -- spans -----------------------------------------------------------------------------------------

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))), max_size=8)


def points(spans: Iterable[tuple[int, int]]) -> set[int]:
    return {at for begin, end in spans for at in range(begin, end)}


@settings(deadline=None)
@given(SPANS, SPANS)
def test_covered_and_overlap_by_brute_force(these: list[tuple[int, int]], those: list[tuple[int, int]]) -> None:
    assert covered(these) == len(points(these))
    assert overlap(these, those) == len(points(these) & points(those))
