"""The gate before the update, and the numbers that the launcher stops by."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgasp import exitcodes
from lastgasp.gasp.messages import Release
from lastgasp.gasp.rank_status import RankStatus, Released, exit_code, given_up
from lastgasp.launch.restarts import WITHOUT_PROGRESS_LIMIT, Restarts

SAVED = Release(recovery=1, ending="saved", step=4, path="p", reason="")


def test_the_gate_parks_and_then_raises_the_outcome() -> None:
    status, seen = RankStatus(), list[Released]()

    def train() -> None:
        try:
            for step in range(1, 10**9):
                status.before_update()
                status.step_completed(step)
        except Released as released:
            seen.append(released)

    thread = threading.Thread(target=train)
    thread.start()
    status.hold(30.0)
    while status.inside:
        pass
    step = status.step
    assert not seen
    status.release(SAVED)
    thread.join(30.0)
    assert status.step == step, "the training thread passed a closed gate"
    assert not status.inside
    assert seen[0].outcome is SAVED
    assert seen[0].code == exitcodes.SAVED


def test_a_rank_that_was_stopped_for_nothing_trains_on() -> None:
    """Also one that waits for the end of the recovery before it leaves; a recovery that is over stays over."""
    status, thread = stepping()
    status.hold(30.0)
    while not status.at_gate:
        pass
    waits = threading.Thread(target=status.wait_held, args=(30.0,))
    waits.start()
    step = status.step
    status.go_on()
    while status.step <= step:
        pass
    waits.join(30.0)
    assert (waits.is_alive(), status.held, status.outcome) == (False, False, None)
    status.hold(30.0)
    status.release(SAVED)
    status.go_on()
    thread.join(30.0)
    assert (thread.is_alive(), status.held, status.wait_held(0.0)) == (False, True, SAVED)


def stepping() -> tuple[RankStatus, threading.Thread]:
    """A training thread in the middle of its steps."""
    status = RankStatus()
    thread = threading.Thread(target=_steps, args=(status,))
    thread.start()
    while status.step == 0:
        pass
    return status, thread


def test_no_update_slips_through_a_gate_that_was_seen_closed() -> None:
    """Dekker's scheme, many times, with a switch of threads at every opportunity."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            status, thread = stepping()
            status.hold(30.0)
            while status.inside:
                pass
            frozen = status.step
            status.release(SAVED)
            thread.join(30.0)
            assert status.step == frozen
    finally:
        sys.setswitchinterval(interval)


def _steps(status: RankStatus) -> None:
    try:
        for step in range(1, 10**9):
            status.progress("forward")
            status.before_update()
            status.step_completed(step)
    except Released:
        pass


def test_a_gate_without_an_answer_gives_up_on_its_own() -> None:
    status = RankStatus()
    status.hold(0.01)
    with pytest.raises(Released) as caught:
        status.before_update()
    assert caught.value.code == exitcodes.GAVE_UP
    assert "no answer from the controller" in caught.value.outcome.reason


def at_gate(status: RankStatus) -> threading.Thread:
    """A training thread that waits at the closed gate."""
    thread = threading.Thread(target=_one_step, args=(status,))
    thread.start()
    while not status.at_gate:
        assert thread.is_alive()
    return thread


def _one_step(status: RankStatus) -> None:
    with suppress(Released):
        status.before_update()
        status.step_completed(status.begun)


def test_a_greater_target_lets_a_parked_rank_continue_to_it_and_no_further() -> None:
    status = RankStatus()
    status.step_completed(4)
    status.hold(30.0, target=3)
    thread = at_gate(status)
    assert (status.inside, status.begun) == (False, 4)
    status.hold(30.0, target=4)
    assert status.at_gate, "step 4 is what it holds"
    status.hold(30.0, target=5)
    assert (status.at_gate, status.begun) == (False, 5), "known at once, whatever the threads do"
    thread.join(30.0)
    assert (status.step, status.inside) == (5, False)
    thread = at_gate(status)
    assert (status.step, status.begun) == (5, 5)
    status.release(SAVED)
    status.hold(30.0, target=6)
    thread.join(30.0)
    assert (status.step, status.at_gate) == (5, False), "an outcome counts for more than a late order"


def test_a_gate_that_is_closed_for_good_lets_nobody_catch_up() -> None:
    status = RankStatus()
    status.step_completed(4)
    status.hold(30.0, target=6)
    status.close()
    thread = at_gate(status)
    status.release(SAVED)
    thread.join(30.0)
    assert status.step == 4


def test_what_is_begun_is_never_reported_too_late() -> None:
    """Whoever has held a rank finds it at the gate, or finds in `begun` every step that it may be in; many times."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            status, thread = stepping()
            status.hold(30.0)
            begun = status.begun
            while not status.at_gate:
                pass
            assert begun >= status.step == status.begun
            status.release(SAVED)
            thread.join(30.0)
    finally:
        sys.setswitchinterval(interval)


def test_a_step_with_several_optimizers_can_be_finished() -> None:
    status = RankStatus()
    status.before_update()
    status.hold(30.0)
    status.before_update()
    status.step_completed(1)
    assert (status.step, status.inside) == (1, False)
    status.release(SAVED)
    with pytest.raises(Released):
        status.before_update()


def test_the_first_outcome_counts() -> None:
    status = RankStatus()
    assert status.wait_over(0.0) is None
    status.release(SAVED)
    status.release(given_up("late"))
    assert status.wait_over(0.0) is SAVED
    assert status.held


def test_exit_codes() -> None:
    endings = {"saved": 83, "nothing_to_save": 84, "gave_up": 85, "open": 85}
    assert {e: exit_code(Release(recovery=1, ending=e, step=0, path="", reason="")) for e in endings} == endings  # type: ignore[arg-type]


# -- restarts --------------------------------------------------------------------------------------


@given(st.booleans(), st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_hopeless_exactly_after_three_barren_restarts_in_a_row(always: bool, attempts: list[tuple[bool, bool]]) -> None:
    restarts, without_progress, ever = Restarts(always=always), 0, False
    for attempt, (used, progressed) in enumerate(attempts):
        restarts.ended(attempt, used, progressed)
        ever = ever or used
        if progressed or attempt == 0:
            without_progress = 0
        else:
            without_progress += always or ever
        assert restarts.should_give_up == (without_progress >= WITHOUT_PROGRESS_LIMIT == 3)


def test_a_job_without_lastgasp_is_never_judged_under_plain_torchrun() -> None:
    restarts = Restarts(always=False)
    for attempt in range(50):
        restarts.ended(attempt, used=False, progressed=False)
    assert not restarts.should_give_up


@pytest.mark.parametrize(
    ("always", "used", "progressed", "stops"),
    [(True, False, False, True), (False, True, False, True), (False, False, False, False), (True, True, True, False)],
)
def test_a_refusal_stops_a_job_that_uses_lastgasp(always: bool, used: bool, progressed: bool, stops: bool) -> None:
    restarts = Restarts(always=always)
    restarts.ended(0, used, progressed, refused=True)
    assert restarts.should_give_up == stops
    if stops:
        assert restarts.exit_code == exitcodes.REFUSED
        assert "refuse again" in restarts.verdict
        restarts.ended(1, used, progressed)
        assert not restarts.should_give_up


def test_the_verdict_says_what_to_look_at() -> None:
    restarts = Restarts(always=True)
    for attempt in range(4):
        restarts.ended(attempt, used=False, progressed=False)
    assert restarts.should_give_up
    assert "3 restarts in a row completed no new step" in restarts.verdict
    assert "lastgasp incident DIR" in restarts.verdict


def test_between_two_steps_a_recovery_is_waited_for_unless_this_rank_has_a_step_to_complete() -> None:
    status, seen = RankStatus(), list[Released]()
    status.step = 3
    status.before_update()
    status.step_completed(4)
    status.between_steps()
    status.hold(30.0, target=5)
    status.between_steps()
    assert (status.inside, status.begun) == (False, 4)
    status.hold(30.0)

    def save() -> None:
        try:
            status.between_steps()
        except Released as released:
            seen.append(released)

    thread = threading.Thread(target=save)
    thread.start()
    while not status.at_gate:
        pass
    status.go_on()
    thread.join(30.0)
    assert (seen, status.inside, status.begun) == ([], False, 4)
    status.hold(30.0)
    thread = threading.Thread(target=save)
    thread.start()
    while not status.at_gate:
        pass
    status.release(SAVED)
    thread.join(30.0)
    assert seen[0].outcome is SAVED
