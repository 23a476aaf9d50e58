"""Who is named, for what, and who is not: synthetic jobs with noise, spikes and drift, many seeds each.

Real jobs of four DDP ranks: tests/frameworks/test_slow_rank.py, and rates over 20 seeds: `python -m benchmarks slow`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgasp.steps.report import sample as sample_module
from lastgasp.steps.report.job import Group, Job
from lastgasp.steps.report.judge import CAP_OF_GROUP, CAP_OF_TWO, MIN_STEPS, confidence_of, judge
from lastgasp.steps.report.lateness import lateness, synchronising
from lastgasp.steps.report.phrasing import conclusion, numbers
from lastgasp.steps.report.robust_stats import change_point, median, quantile, scale, slowdown, standing
from lastgasp.steps.report.sample import COVERAGE, samples
from lastgasp.steps.report.saving import saving_of
from lastgasp.steps.report.slowdowns import LATER_SHARE, MIN_SHARE, Slowdown
from lastgasp.steps.report.table import TIMES, Step, StepTable
from lastgasp.steps.report.verdict import Verdict
from support.step_jobs import Shape, job_of

SEEDS = range(3)
Named = list[tuple[int, str]]


def verdict_on(job: Job, last: int | None = None) -> Verdict:
    return judge(samples(job, last), [saving_of(data, last) for data in job.ranks.values()])


def verdicts(**shape: Any) -> list[Verdict]:
    return [verdict_on(job_of(Shape(**shape), seed)) for seed in SEEDS]


def named(verdict: Verdict) -> Named:
    return sorted((slow.rank, slow.cause) for slow in verdict.slow)


# -- the right one ---------------------------------------------------------------------------------

DDP = {"buckets": 2}
BUFFERS = {"buckets": 2, "buffers": True}
EXPLICIT = {"buckets": 0}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("data", "data", DDP), ("data", "data", BUFFERS), ("data", "data", EXPLICIT),
    ("forward", "compute", DDP), ("forward", "compute", BUFFERS),
    ("optimizer", "compute", DDP), ("optimizer", "compute", EXPLICIT),
    ("backward", "compute", EXPLICIT),
]  # fmt: skip


@pytest.mark.parametrize("communication", [False, True], ids=["comm off", "comm on"])
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize(("phase", "cause", "wait"), CASES)
def test_the_rank_and_the_cause(phase: str, cause: str, wait: dict[str, Any], victim: int, communication: bool) -> None:
    found = verdicts(slow={victim: {phase: 0.012}}, communication=communication, **wait)
    hits = [named(verdict) == [(victim, cause)] for verdict in found]
    assert sum(hits) >= len(hits) - 1, found[hits.index(False)]
    assert all(named(verdict) in ([], [(victim, cause)]) for verdict in found), "nobody else, for nothing else"
    slow = next(slow for verdict in found for slow in verdict.slow)
    assert slow.lost_s == pytest.approx(0.012, rel=0.35)
    assert 0.5 <= slow.confidence <= 0.95
    assert slow.since_step is None


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_slow_forward_with_an_unmarked_all_reduce_after_backward(ranks: int) -> None:
    """All others wait outside of all marks; that makes them no late ones for whom the slow one would have waited."""
    found = verdicts(ranks=ranks, slow={1: {"forward": 0.012}}, buckets=0)
    assert sum(named(verdict) == [(1, "compute")] for verdict in found) >= len(SEEDS) - 2
    assert all(named(verdict) in ([], [(1, "compute")]) for verdict in found)


@pytest.mark.parametrize("wait", [DDP, BUFFERS, EXPLICIT], ids=["DDP", "buffers", "explicit"])
def test_late_for_collectives_for_no_marked_reason(wait: dict[str, Any]) -> None:
    found = verdicts(slow={3: {"outside": 0.012}}, communication=True, **wait)
    assert [named(verdict) for verdict in found] == [[(3, "communication")]] * len(found)


def test_without_communication_marks_it_is_a_hint_and_no_verdict() -> None:
    for verdict in verdicts(slow={3: {"outside": 0.012}}):
        assert verdict.slow == ()
        assert any(note.startswith("rank 3 spends") and "comm=on" in note for note in verdict.notes)


def test_backward_of_ddp_without_communication_marks_is_said_to_be_hidden() -> None:
    """All ranks leave backward together: nobody could tell. The report must not say more than it knows."""
    for verdict in verdicts(slow={1: {"backward": 0.012}}):
        assert verdict.slow == ()
        assert any("communication is not marked" in text for text in verdict.unjudged)
    for verdict in verdicts(slow={1: {"backward": 0.012}}, communication=True):
        assert named(verdict) == [(1, "compute")]
        assert not any("communication is not marked" in text for text in verdict.unjudged)


def test_a_saver_that_takes_the_jobs_time() -> None:
    for verdict in verdicts(save_every=10, slow={0: {"save": 0.3}}):
        assert named(verdict) == [(0, "checkpoint")]
        assert verdict.slow[0].lost_s == pytest.approx(0.33, rel=0.2)


def test_saves_are_not_judged_over_fewer_steps_than_ranks_are() -> None:
    for verdict in verdicts(steps=8, save_every=2, slow={0: {"save": 0.3}}):
        assert (verdict.slow, verdict.judged) == ((), 0)
        assert not any(note.startswith("saving takes") for note in verdict.notes)


def test_a_saver_among_savers() -> None:
    for verdict in verdicts(saver=None, save_every=10, slow={2: {"save": 0.3}}):
        assert named(verdict) == [(2, "checkpoint")]


def test_saves_that_became_slow() -> None:
    shape: dict[str, Any] = {"steps": 400, "save_every": 20, "slow": {0: {"save": 0.3}}}
    for verdict in verdicts(**shape, slow_from=200):
        assert named(verdict) == [(0, "checkpoint")]
        since = verdict.slow[0].since_step
        assert since is None or abs(since - 200) <= 20


def test_much_time_in_short_saves_is_a_note() -> None:
    for verdict in verdicts(save_every=1, save=0.02):
        assert verdict.slow == ()
        assert any(note.startswith("saving takes") and "rank 0" in note for note in verdict.notes)


def test_since_when() -> None:
    shape: dict[str, Any] = {"steps": 400, "slow": {2: {"data": 0.015}}, "slow_from": 150}
    found = verdicts(**shape)
    assert sum(named(verdict) == [(2, "data")] for verdict in found) >= len(SEEDS) - 1
    for verdict in found:
        for slow in verdict.slow:
            assert slow.since_step is not None
            assert abs(slow.since_step - 150) <= 32


def test_all_ranks_slower_than_before_names_nobody_and_is_noted() -> None:
    slow = {rank: {"data": 0.02} for rank in range(4)}
    for verdict in verdicts(steps=400, slow=slow, slow_from=200):
        assert verdict.slow == ()
        assert any("on all ranks" in note and "waiting for data" in note for note in verdict.notes)


def test_several_slow_ranks() -> None:
    found = verdicts(ranks=8, slow={1: {"data": 0.012}, 6: {"optimizer": 0.012}})
    assert sum(named(verdict) == [(1, "data"), (6, "compute")] for verdict in found) >= len(SEEDS) - 1
    found = verdicts(slow={1: {"data": 0.012}, 2: {"data": 0.012}})
    assert sum(named(verdict) == [(1, "data"), (2, "data")] for verdict in found) >= len(SEEDS) - 1


def test_a_forward_that_may_be_a_wait_for_a_later_rank_is_not_named() -> None:
    """Rank 6 computes longer, but rank 1 begins so late that DDP's broadcast of buffers would look alike."""
    for verdict in verdicts(ranks=8, slow={1: {"data": 0.012}, 6: {"forward": 0.012}}):
        assert named(verdict) in ([(1, "data")], [(1, "data"), (6, "compute")])


def test_where_most_are_slow_nobody_is() -> None:
    for verdict in verdicts(slow={rank: {"data": 0.012} for rank in range(3)}):
        assert verdict.slow == ()


MOVED: dict[str, Any] = {"slow": {2: {"data": 0.012}}, "renewed": {2: 150}}


def test_a_new_process_is_not_named_for_what_the_one_before_did() -> None:
    """Its rank was moved to another host, and that one is as fast as the others."""
    for verdict in verdicts(slow={2: {"data": 0.012}}, renewed={2: 380}, slow_to=380, steps=430):
        assert verdict.slow == ()
        assert any("rank 2 was slow" in note and "since step 380 it is a new one" in note for note in verdict.notes)


def test_a_new_process_that_is_slow_as_well() -> None:
    for verdict in verdicts(**MOVED, steps=260):
        assert named(verdict) == [(2, "data")]
        assert "earlier process" not in str(verdict)


def test_a_new_process_with_few_steps_is_named_with_that_said() -> None:
    for verdict in verdicts(**MOVED, slow_to=150, steps=165):
        assert named(verdict) == [(2, "data")]
        assert any("of an earlier process; since step 150" in text for text in verdict.slow[0].evidence)


def test_saves_of_the_process_before() -> None:
    for verdict in verdicts(save_every=10, slow={0: {"save": 0.3}}, renewed={0: 150}, steps=165, slow_to=150):
        assert named(verdict) == [(0, "checkpoint")]
        assert any("saves are of an earlier process; since step 150" in text for text in verdict.slow[0].evidence)


# -- nobody ----------------------------------------------------------------------------------------

WILD = {"noise": 0.4, "spikes": 0.05, "drift": 0.10}


@pytest.mark.parametrize("noise", [{}, WILD], ids=["noise", "wild"])
@pytest.mark.parametrize("steps", [40, 200])
@pytest.mark.parametrize("communication", [False, True], ids=["comm off", "comm on"])
@pytest.mark.parametrize("wait", [DDP, BUFFERS, EXPLICIT], ids=["DDP", "buffers", "explicit"])
def test_a_healthy_job(noise: dict[str, float], steps: int, communication: bool, wait: dict[str, Any]) -> None:
    found = verdicts(steps=steps, communication=communication, **wait, **noise)
    assert [named(verdict) for verdict in found] == [[]] * len(found)
    assert all(verdict.steps >= MIN_STEPS for verdict in found)


@pytest.mark.parametrize("ranks", [2, 16])
def test_healthy_jobs_of_few_and_of_many_ranks(ranks: int) -> None:
    for verdict in verdicts(ranks=ranks, steps=100):
        assert verdict.slow == ()


def test_a_difference_too_small_to_matter() -> None:
    """5 % of a step, at every step: real, and not worth a person's time."""
    for verdict in verdicts(slow={1: {"data": 0.0014}}, noise=0.02, spikes=0.0, drift=0.0):
        assert verdict.slow == ()


@pytest.mark.parametrize(("first", "last"), [(40, 80), (0, 155)], ids=["a fifth", "all but the end"])
def test_an_episode_is_not_the_ranks_own_slowness(first: int, last: int) -> None:
    """A neighbour on the machine for a part of the job, and gone."""
    job = job_of(Shape(steps=200), 3)
    table = job.ranks[1].table
    for place in range(first, last):
        for column in ("data", "time", "period"):
            values = table.times(column)
            values[place] += 0.02  # type: ignore[index]
    assert verdict_on(job).slow == ()


# -- what cannot be judged -------------------------------------------------------------------------


def test_two_ranks_are_judged_with_less_confidence() -> None:
    for verdict in verdicts(ranks=2, slow={1: {"data": 0.015}}):
        assert named(verdict) == [(1, "data")]
        assert verdict.slow[0].confidence <= CAP_OF_TWO
        assert any("of two ranks" in text for text in verdict.unjudged)


def test_one_rank_is_judged_by_its_own_past_only() -> None:
    for verdict in verdicts(ranks=1, slow={0: {"data": 0.02}}, steps=400, slow_from=200):
        assert verdict.slow == ()
        assert any("no other rank to be compared with" in text for text in verdict.unjudged)
        assert any(note.startswith("since step") for note in verdict.notes)


@pytest.mark.parametrize("steps", [1, 3, 12])
def test_few_steps(steps: int) -> None:
    for verdict in verdicts(steps=steps, slow={1: {"data": 0.05}}):
        assert verdict.slow == ()
        assert any(f"{MIN_STEPS} are needed" in text for text in verdict.unjudged)
        assert verdict.judged == 0
        assert conclusion(verdict, 4) == "Nobody was judged."


def test_no_steps_at_all() -> None:
    job = job_of(Shape(steps=30), 1)
    empty = {rank: replace(data, table=StepTable()) for rank, data in job.ranks.items()}
    verdict = verdict_on(replace(job, ranks=empty))
    assert (verdict.slow, verdict.steps, verdict.judged) == ((), 0, 0)
    assert verdict.unjudged


def test_a_rank_with_too_few_steps_is_left_out_and_the_others_are_judged() -> None:
    job = job_of(Shape(slow={1: {"data": 0.012}}), 1)
    late = job_of(Shape(steps=int(200 * COVERAGE) - 20, slow={1: {"data": 0.012}}), 1).ranks[3]
    verdict = verdict_on(replace(job, ranks={**job.ranks, 3: late}))
    assert named(verdict) == [(1, "data")]
    assert any(text.startswith("rank 3 has too few") for text in verdict.unjudged)
    assert verdict.steps > 150


def test_a_rank_whose_files_end_does_not_end_the_judgement() -> None:
    """Its host was lost, or its disk is full; the others went on, and one of them is slow since then."""
    job = job_of(Shape(steps=400, slow={1: {"data": 0.015}}, slow_from=250), 1)
    ended = job_of(Shape(steps=250), 1).ranks[3]
    for last in (None, 100):
        verdict = verdict_on(replace(job, ranks={**job.ranks, 3: ended}), last=last)
        assert named(verdict) == [(1, "data")]
        assert verdict.last > 390
        [text] = [text for text in verdict.unjudged if text.startswith("rank 3 has too few")]
        assert "its newest one is 24" in text or "its newest one is 25" in text


def test_only_the_newest_steps() -> None:
    job = job_of(Shape(steps=400, slow={2: {"data": 0.015}}, slow_from=250), 1)
    assert named(verdict_on(job, last=100)) == [(2, "data")]
    assert verdict_on(job, last=100).first > 290
    assert verdict_on(job, last=100).slow[0].since_step is None


@pytest.mark.parametrize("missing", ["data", "forward", "backward", "optimizer"])
def test_marks_that_are_off(missing: str) -> None:
    """Nobody is named for what is not marked, and the rest is judged as before."""
    for cause, phase, expected in (("data", "data", "data"), ("compute", "forward", "compute")):
        job = job_of(Shape(slow={1: {phase: 0.012}}), 1)
        for data in job.ranks.values():
            for column in (missing, *([f"{missing}_own"] if f"{missing}_own" in TIMES else [])):
                values = data.table.times(column)
                values[:] = type(values)("d", [0.0] * len(values))  # type: ignore[index,call-arg]
        found = named(verdict_on(job))
        assert found in ([], [(1, expected)]), cause
        if phase != missing:
            assert found == [(1, expected)]


def test_stages_of_a_pipeline_are_not_compared() -> None:
    """The last stage has the loss: it takes longer by its nature."""
    slow = {2: {"forward": 0.01}, 3: {"forward": 0.01}}
    job = job_of(Shape(slow=slow), 1)
    assert verdict_on(job).slow
    ranks = {rank: replace(data, groups={"g": Group("pp", rank // 2, ())}) for rank, data in job.ranks.items()}
    assert verdict_on(replace(job, ranks=ranks)).slow == ()


def test_ranks_that_nobody_was_compared_with_are_not_said_to_be_well() -> None:
    """Four stages of one rank each; three stages, of which one has two ranks."""
    job = job_of(Shape(), 1)
    for stages, said in (((0, 1, 2, 3), "Nobody was judged."), ((0, 0, 1, 2), "Nobody is slow: 2 of 4 ranks over ")):
        places = zip(job.ranks.items(), stages, strict=True)
        ranks = {rank: replace(data, groups={"g": Group("pp", stage, ())}) for (rank, data), stage in places}
        verdict = verdict_on(replace(job, ranks=ranks))
        assert conclusion(verdict, 4).startswith(said)
    assert conclusion(verdict_on(job), 4).startswith("Nobody is slow: 4 ranks over ")
    assert conclusion(verdict_on(job_of(Shape(ranks=1), 1)), 1).startswith("Nothing is wrong to see in")


def test_a_rank_without_a_loader_is_not_compared_with_those_that_have_one() -> None:
    """With tensor parallelism only the first rank of a group loads data."""
    job = job_of(Shape(data=0.01, noise=0.05, spikes=0.0), 1)
    for rank in (1, 2, 3):
        values = job.ranks[rank].table.times("data")
        values[:] = type(values)("d", [0.0] * len(values))  # type: ignore[index,call-arg]
    assert verdict_on(job).slow == ()


def test_members_of_a_tensor_parallel_group_are_named_together_and_with_doubt() -> None:
    """Rank 1 waits for rank 0 within forward; unmarked, that looks as if both computed longer."""
    slow = {0: {"forward": 0.012}, 1: {"forward": 0.012}}
    job = job_of(Shape(ranks=8, buckets=0, slow=slow), 1)
    before = verdict_on(job)
    assert named(before) == [(0, "compute"), (1, "compute")]
    assert all(slow.confidence > CAP_OF_GROUP for slow in before.slow)
    groups = {rank: {"7": Group("tp", rank % 2, (rank // 2 * 2, rank // 2 * 2 + 1))} for rank in job.ranks}
    ranks = {rank: replace(data, groups=groups[rank]) for rank, data in job.ranks.items()}
    verdict = verdict_on(replace(job, ranks=ranks))
    assert named(verdict) == named(before)
    for found in verdict.slow:
        assert found.confidence == CAP_OF_GROUP
        assert any("ranks 0-1 are of one parallel group" in text and "comm=on" in text for text in found.evidence)


@pytest.mark.parametrize("slow", [{}, {1: {"forward": 0.012}}], ids=["equal", "the marked one is slow"])
@pytest.mark.parametrize("marked", [(0, 2, 3), (1,)], ids=["all but one", "one"])
def test_communication_marked_on_some_ranks_only(marked: tuple[int, ...], slow: dict[int, dict[str, float]]) -> None:
    """`switch --ranks 0,2-3 comm=on`: with collectives or without, a forward pass is compared with its like only."""
    for verdict in verdicts(gather=0.012, buckets=0, communication=frozenset(marked), slow=slow):
        assert verdict.slow == ()
        names = numbers(marked)
        assert any(f"communication is marked on {names} only" in text for text in verdict.unjudged)
    for verdict in verdicts(gather=0.012, buckets=0, communication=True, slow=slow):
        assert named(verdict) == [(rank, "compute") for rank in slow]


# -- lateness --------------------------------------------------------------------------------------


def test_who_comes_last_has_the_shortest_wait_and_clocks_do_not_matter() -> None:
    step = {rank: [((0, 1, 2), (0, rank * 10**15, length))] for rank, length in ((0, 0.030), (1, 0.030), (2, 0.010))}
    assert lateness(step) == pytest.approx({0: -0.010, 1: -0.010, 2: 0.020})


def test_buckets_that_overlap_count_once() -> None:
    def both(wait: float) -> list[tuple[tuple[int, ...], tuple[int, int, float]]]:
        return [((), (0, 0, wait)), ((), (0, 1_000_000, wait - 0.001))]

    assert lateness({0: both(0.030), 1: both(0.030), 2: both(0.010)})[2] == pytest.approx(0.020)


def test_groups_are_compared_within_themselves() -> None:
    step = {rank: [((rank // 2,), (0, 0, 0.01 * (1 + rank)))] for rank in range(4)}
    assert lateness(step) == pytest.approx({0: 0.01, 1: -0.01, 2: 0.01, 3: -0.01})


@pytest.mark.parametrize(
    ("operation", "holds"),
    [
        *((name, True) for name in ("HcclAllReduce", "all_reduce", "reduce_scatter_tensor", "barrier")),
        *((name, False) for name in ("broadcast", "HcclSend", "recv")),
    ],
)
def test_operations_that_hold_everybody(operation: str, holds: bool) -> None:
    assert synchronising(operation) is holds


def test_matching_many_collectives_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evenly spread blocks of steps, the newest among them, and still enough to name the late one."""
    monkeypatch.setattr(sample_module, "MATCHED_MAX", 1600)
    job = job_of(Shape(steps=600, buckets=4, communication=True, slow={3: {"outside": 0.015}}), 1)
    (found,) = samples(job)
    assert found.late is not None
    assert sample_module.BLOCKS_MIN <= len(found.late) <= sample_module.BLOCKS_MIN + 1
    assert found.late.steps[-1] > 570
    assert found.late.steps[0] < 60
    assert named(verdict_on(job)) == [(3, "communication")]


# -- statistics ------------------------------------------------------------------------------------

VALUES = st.lists(st.integers(-50, 50).map(float), min_size=2, max_size=30)


@settings(deadline=None)
@given(VALUES)
def test_excess_and_standing_by_brute_force(values: list[float]) -> None:
    others = [[other for at, other in enumerate(values) if at != place] for place in range(len(values))]
    assert slowdown(values) == [value - statistics.median(rest) for value, rest in zip(values, others, strict=True)]
    assert standing(values) == pytest.approx(
        [
            sum(1.0 if other < value else 0.5 if other == value else 0.0 for other in rest) / len(rest)
            for value, rest in zip(values, others, strict=True)
        ]
    )
    assert median(values) == statistics.median(values)


@settings(deadline=None)
@given(VALUES, st.sampled_from([0.5, 0.9, 0.99, 0.0, 1.0]))
def test_percentiles_by_counting(values: list[float], share: float) -> None:
    """As the standard library has them, and so that no more than the share lies below."""
    found = quantile(values, share)
    assert min(values) <= found <= max(values)
    assert sum(value < found for value in values) <= math.ceil(share * (len(values) - 1))
    if share in (0.5, 0.9, 0.99):
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        assert found == pytest.approx(cuts[round(share * 100) - 1])


def test_scale_is_a_standard_deviation_that_outliers_do_not_move() -> None:
    normal = statistics.NormalDist(5, 2)
    values = [normal.inv_cdf((n + 0.5) / 1000) for n in range(1000)]
    assert scale(values) == pytest.approx(2, rel=0.02)
    assert scale([*values, *[1e9] * 100]) == pytest.approx(2, rel=0.2)


@settings(deadline=None)
@given(st.integers(20, 40), st.integers(20, 40), st.integers(0, 1000))
def test_the_place_of_a_change(before: int, after: int, seed: int) -> None:
    noise = [math.sin(seed + 7 * n) * 0.1 for n in range(before + after)]
    values = [level + wobble for level, wobble in zip([0.0] * before + [1.0] * after, noise, strict=True)]
    place = change_point(values, 8)
    assert place is not None
    assert abs(place - before) <= 2
    assert change_point([1.0] * (before + after), 8) is None
    assert change_point(values, (before + after) // 2 + 1) is None


def _at(**change: float) -> Slowdown:
    least = Slowdown(0, 1.0, MIN_SHARE, single=1.0, certainty=4.0, standing=0.7, largest=1.0, steady=1.0, blocks=24)
    return replace(least, **change)  # type: ignore[arg-type]


def test_confidence_rises_with_the_evidence_from_a_half_to_less_than_one() -> None:
    assert confidence_of(_at()) == pytest.approx(0.5)
    kinds: dict[str, Callable[[float], float]] = {
        "share": lambda x: MIN_SHARE * (1 + x), "standing": lambda x: 0.7 + 0.1 * x, "certainty": lambda x: 4 * (1 + x),
    }  # fmt: skip
    for name, value in kinds.items():
        assert confidence_of(_at()) < confidence_of(_at(**{name: value(1)})) < confidence_of(_at(**{name: value(2)}))
    assert confidence_of(_at(share=9.0, standing=1.0, certainty=1e9)) == pytest.approx(0.95)
    assert LATER_SHARE > MIN_SHARE, "a window that was chosen to show it must show more"


def test_a_step_has_no_columns_that_the_table_lacks() -> None:
    table = StepTable()
    table.append(Step(1, 0, 10))
    assert all(len(table.times(name)) == 1 for name in TIMES)
