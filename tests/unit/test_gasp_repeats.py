"""One exception that ends the training again and again is the program's fault: the launcher stops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lastgasp import exitcodes
from lastgasp.events import Fault, FaultKind
from lastgasp.gasp.repeats import LIMIT, SOON, Repeats
from lastgasp.launch.restarts import Restarts

CAUSE = "OSError: [Errno 28] No space left on device, step 7"


def fault(kind: FaultKind = "exception", cause: str = CAUSE) -> Fault:
    return Fault(kind=kind, rank=0, cause=cause, step=7, seen_ns=0)


def after(*each: Fault, steps: int = 1, seconds: float = 9.0) -> Repeats:
    found = Repeats()
    for one in each:
        found = found.then([one, fault("peer", "gloo")], steps, seconds)
    return found


def test_the_same_exception_at_each_step_ends_the_job() -> None:
    faults = [fault(cause=CAUSE.replace("7", str(step))) for step in range(LIMIT)]
    assert not after(*faults[:-1]).hopeless
    found = after(*faults)
    assert found.hopeless
    restarts = Restarts(always=False, repeats=found)
    restarts.ended(9, used=True, progressed=True)
    assert restarts.should_give_up and restarts.exit_code == exitcodes.NO_PROGRESS
    assert "No space left" in restarts.verdict and f"{LIMIT} times in a row" in restarts.verdict
    restarts = Restarts(always=False, repeats=after(*faults[:-1]))
    restarts.ended(9, used=True, progressed=True)
    assert not restarts.should_give_up


@pytest.mark.parametrize(
    ("other", "steps", "seconds"),
    [(fault("killed", "killed by SIGKILL"), 1, 9.0), (fault("hang", CAUSE), 1, 9.0), (fault(), 2, SOON + 1)],
    ids=["a kill", "a hang", "hours later"],
)
def test_what_comes_in_between_begins_the_count_anew(other: Fault, steps: int, seconds: float) -> None:
    found = after(*[fault()] * (LIMIT - 1)).then([other], steps, seconds)
    assert found == Repeats()
    assert found.then([fault()], 1, 9.0).count == 1


def test_another_exception_is_another_fault() -> None:
    assert after(*[fault()] * (LIMIT - 1), fault(cause="ValueError: x")) == Repeats(1, "ValueError: x")


def test_a_single_long_step_is_soon_enough() -> None:
    assert after(*[fault()] * LIMIT, steps=1, seconds=10 * SOON).hopeless
    assert not replace(after(*[fault()] * LIMIT), count=LIMIT - 1).hopeless
