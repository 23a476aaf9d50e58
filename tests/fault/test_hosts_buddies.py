"""Sharded training over two hosts, of which one is lost: its shards are in memory of the other one.

What goes on from there is bit-equal to an undisturbed run, since every rank goes back to the copied step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.checkpoint import verify
from lastgasp.gasp.attempt import FROM_BUDDIES
from lastgasp.pytorch.sharded import LAYOUT
from support.hosts import needs_hosts
from support.hosts_buddies import APART, GATE, LAST, LIMIT, STEPS, copies, taking_port, training
from support.hosts_job import START, TORCH, Told
from support.launchers import finish
from support.launchers import run as launched
from support.waiting import until

MANY, CUT = 1500, 5.0
BEHIND = "do not arrive at their partner host (the newest there is of step "


def newest(launcher: int) -> int:
    """The newest step that a launcher has copies of."""
    return max((step for steps in copies(launcher) for step in steps), default=-1)


pytestmark = [needs_hosts, pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[int, str]]:
    """What each rank of an undisturbed job holds in the end, by the number of ranks."""
    found: dict[int, dict[int, str]] = {}

    def run(ranks: int) -> dict[int, str]:
        if ranks not in found:
            folder = tmp_path_factory.mktemp("alone")
            done = finish(launched(TORCH, "sharded", folder / "d", STEPS, 0, ranks=ranks), folder)
            assert done.ok, done.output
            found[ranks] = Told(folder / "d").ends()
        return found[ranks]

    return run


@pytest.mark.parametrize(("how", "ranks"), [("killed", 1), pytest.param("power", 2, marks=pytest.mark.full)])
def test_a_lost_hosts_shards_are_saved_from_its_partner(
    tmp_path: Path, how: str, ranks: int, undisturbed: Callable[[int], dict[int, str]]
) -> None:
    with training(tmp_path, ranks) as one:
        one.lose("hb", how)
        (one.told.directory / "go").touch()
        until(lambda: bool(one.told.saved()), "the survivors have saved", LIMIT)
        until(lambda: f"; step {LAST} is safe in" in one.job.launchers["ha"].output, "ha waits for hb", LIMIT)
        [incident] = one.told.incidents()
        assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", LAST, GATE - LAST)
        lost = ", ".join(map(str, range(ranks, 2 * ranks)))
        assert FROM_BUDDIES.format(ranks=lost, step=LAST, lost=GATE - LAST) in incident.notes
        assert set(incident.savers) <= set(range(ranks)) and one.told.saved() == [LAST]
        assert verify(next(one.told.directory.glob("gasp-*.dcp")), LAYOUT).ok
        if how == "power":
            one.hosts["hb"].power_on()
        one.job.start("hb")
        assert one.job.codes(START + LIMIT) == {"ha": 0, "hb": 0}, one.job.output
        assert one.told.ends() == undisturbed(2 * ranks)


@pytest.mark.full
@pytest.mark.parametrize(("how", "ranks"), [("killed", 1), ("power", 2)])
def test_the_first_host_is_lost_and_with_it_the_controller(
    tmp_path: Path, how: str, ranks: int, undisturbed: Callable[[int], dict[int, str]]
) -> None:
    """Its ranks' shards, and those of their own host, are what the survivors find at their launcher."""
    with training(tmp_path, ranks) as one:
        one.lose("ha", how)
        (one.told.directory / "go").touch()
        assert one.job.codes(LIMIT, "hb") == {"hb": exitcodes.SAVED}
        assert one.told.saved() == [LAST]
        assert verify(next(one.told.directory.glob("gasp-*.dcp")), LAYOUT).ok
        found = one.told.incidents()
        assert {(each.ending, each.step_saved, each.steps_lost) for each in found} == {("saved", LAST, GATE - LAST)}
        lost = ", ".join(map(str, range(ranks)))
        assert FROM_BUDDIES.format(ranks=lost, step=LAST, lost=GATE - LAST) in [n for each in found for n in each.notes]
        if not one.hosts["ha"].on:
            one.hosts["ha"].power_on()
        one.job.start()
        assert one.job.codes(START + LIMIT) == {"ha": 0, "hb": 0}, one.job.output
        assert one.told.ends() == undisturbed(2 * ranks)


@pytest.mark.full
@pytest.mark.parametrize(("how", "ranks"), [("killed", 1), ("power", 1), ("killed", 2)])
def test_the_first_of_three_hosts_is_lost(
    tmp_path: Path, how: str, ranks: int, undisturbed: Callable[[int], dict[int, str]]
) -> None:
    """No launcher has all shards: the survivors of both hosts save together, each what its own one has."""
    with training(tmp_path, ranks, names="ha hb hc") as one:
        one.lose("ha", how)
        (one.told.directory / "go").touch()
        assert one.job.codes(LIMIT, "hb", "hc") == dict.fromkeys(("hb", "hc"), exitcodes.SAVED)
        assert one.told.saved() == [LAST]
        assert verify(next(one.told.directory.glob("gasp-*.dcp")), LAYOUT).ok
        lost = ", ".join(map(str, range(ranks)))
        for incident in one.told.incidents():
            assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", LAST, GATE - LAST)
            assert FROM_BUDDIES.format(ranks=lost, step=LAST, lost=GATE - LAST) in incident.notes
            hosts = {saver // ranks for saver in incident.savers}
            assert hosts == {1, 2}, "each host writes what it has"
        assert len(one.told.incidents()) == 2 * ranks
        if not one.hosts["ha"].on:
            one.hosts["ha"].power_on()
        one.job.start()
        assert one.job.codes(START + LIMIT) == {"ha": 0, "hb": 0, "hc": 0}, one.job.output
        assert one.told.ends() == undisturbed(3 * ranks)
        assert not list(one.told.directory.glob(".survivors-*"))


@pytest.mark.full
@pytest.mark.parametrize("mended", [True, False])
def test_training_does_not_wait_for_a_link_that_is_cut(tmp_path: Path, mended: bool) -> None:
    """No copies get through from the first host to the second, for 5 s or for good; all else does."""
    with training(tmp_path, steps=MANY) as one:
        told, launcher = one.told, one.job.launchers["hb"].pid
        wire = one.hosts["hb"].wire
        told.go()
        until(lambda: newest(launcher) > LAST, "copies go on", LIMIT)
        wire.closed = frozenset({taking_port(launcher)})
        cut_at, behind = time.monotonic(), newest(launcher)
        if mended:
            until(lambda: time.monotonic() > cut_at + CUT, "the link is mended", LIMIT)
            at = told.at(1, 0)
            assert at > behind + 2 * APART, "training has gone on"
            wire.closed = frozenset()
            until(lambda: newest(launcher) > at, "copies go on", LIMIT)
        else:
            until(lambda: BEHIND in one.job.output, "people are told", LIMIT)
            at = told.at(1, 0)
            until(lambda: told.at(1, 0) > at, "training goes on", LIMIT)
            assert newest(launcher) <= behind + APART
        one.lose("hb", "killed")  # whose copies are not behind
        until(lambda: bool(told.incidents()), "it is on record", LIMIT)
        [incident] = told.incidents()
        assert any(BEHIND in note for note in incident.notes) != mended, incident
        assert incident.ending == "saved" and (incident.step_saved or 0) > behind + 2 * APART, incident
        one.job.start("hb")
        assert one.job.codes(START + LIMIT) == {"ha": 0, "hb": 0}, one.job.output
