"""Megatron over two hosts, of which one is lost: what only its ranks held is in memory of the other one.

The survivors write an iteration as Megatron's own, and what goes on from there has the losses of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.checkpoint import DirectoryLayout, verify
from lastgasp.events import Incident
from lastgasp.gasp.attempt import FROM_BUDDIES
from support.hosts import needs_hosts
from support.hosts_buddies import GATE, LAST, LIMIT, Training, megatron
from support.hosts_job import START
from support.megatron import place
from support.megatron.job import GptJob
from support.megatron.matrix import flags_of
from support.waiting import until

END = 16
ONE = "dp2-one-instance"
pytestmark = [
    needs_hosts,
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]

Expected = dict[tuple[int, int], list[list[str]]]


def job_of(layout: str, folder: Path) -> GptJob:
    """It, without periodic saves before its end."""
    ranks, flags = flags_of(layout)
    return GptJob(folder=folder, ranks=ranks, flags=flags, last=END, every=100)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """The losses of a job without a fault, and without lastgasp, by layout."""
    found: dict[str, Expected] = {}

    def run(layout: str) -> Expected:
        if layout not in found:
            job = job_of(layout, tmp_path_factory.mktemp("alone"))
            done = job.run({"LASTGASP": "0"}, timeout=START)
            assert done.ok, done.output[-4000:]
            found[layout] = job.losses()
        return found[layout]

    return run


def check_losses(job: GptJob, expected: Expected) -> None:
    """Those of each time that an iteration was trained; at the gate one was cut short."""
    found = job.losses()
    assert found.keys() == expected.keys()
    wrong = {key: times for key, times in found.items() if any(t != expected[key][0][: len(t)] for t in times)}
    assert wrong == {}, "losses differ from the uninterrupted run's"
    assert [key for key, times in found.items() if times[-1] != expected[key][0]] == []
    assert {key[1] for key, times in found.items() if len(times) > 1} == {*range(LAST, GATE + 1)}


def check_saved(one: Training, incident: Incident, lost: set[int], savers: set[int]) -> None:
    """From copies, by ranks of the other host, with what is done again in its record."""
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", LAST, GATE - LAST), incident
    names = ", ".join(map(str, sorted(lost)))
    assert FROM_BUDDIES.format(ranks=names, step=LAST, lost=GATE - LAST) in incident.notes, incident
    assert set(incident.savers) <= savers, incident
    assert one.told.saved() == [LAST]
    assert verify(next(one.told.directory.glob("iter_*[0-9]")), DirectoryLayout("iter_*")).ok
    assert [path.name for path in one.told.directory.iterdir() if path.name.startswith(".gasp-")] == []


@pytest.mark.parametrize(
    ("layout", "how", "lost"),
    [
        (ONE, "killed", {1}),
        ("dp4-one-instance", "power", {2, 3}),
        ("tp2-dp2-one-instance", "killed", {2, 3}),
        ("tp2", "killed", {1}),
        ("pp2", "killed", {1}),
        ("pp2-dp2", "killed", {2}),  # both ranks of a stage are on one host, so the first one's arena is copied
        ("ep2-one-instance", "killed", {1}),
        ("ep2-dp4-one-instance", "power", {2, 3}),
    ],
)
def test_the_second_host_is_lost(
    tmp_path: Path, layout: str, how: str, lost: set[int], undisturbed: Callable[[str], Expected]
) -> None:
    found = job_of(layout, tmp_path)
    each = found.ranks // 2
    with megatron(tmp_path, found, each) as (one, gate):
        one.lose("hb", how)
        gate.touch()
        until(lambda: bool(one.told.saved()), "the survivors have saved", LIMIT)
        until(lambda: f"; step {LAST} is safe in" in one.job.launchers["ha"].output, "ha waits for hb", LIMIT)
        [incident] = one.told.incidents()
        check_saved(one, incident, lost, {*range(each)})
        if how == "power":
            one.hosts["hb"].power_on()
        one.job.start("hb")
        assert one.job.codes(START + LIMIT) == {"ha": 0, "hb": 0}, one.job.output
    check_losses(found, undisturbed(layout))


@pytest.mark.parametrize(("layout", "how"), [(ONE, "killed"), ("dp4-one-instance", "power"), ("pp2", "power")])
def test_the_first_host_is_lost_and_with_it_the_controller(
    tmp_path: Path, layout: str, how: str, undisturbed: Callable[[str], Expected]
) -> None:
    found = job_of(layout, tmp_path)
    each = found.ranks // 2
    with megatron(tmp_path, found, each) as (one, gate):
        one.lose("ha", how)
        gate.touch()
        assert one.job.codes(LIMIT, "hb") == {"hb": exitcodes.SAVED}
        for incident in one.told.incidents():
            check_saved(one, incident, {*range(each)}, {*range(each, 2 * each)})
        if not one.hosts["ha"].on:
            one.hosts["ha"].power_on()
        one.job.start()
        assert one.job.codes(START + LIMIT) == {"ha": 0, "hb": 0}, one.job.output
    check_losses(found, undisturbed(layout))


def test_what_both_hosts_hold_is_not_copied(tmp_path: Path, undisturbed: Callable[[str], Expected]) -> None:
    """Two instances of the optimizer, one a host: the loss of one costs no completed step."""
    layout = "dp4-two-instances"
    found = job_of(layout, tmp_path)
    with megatron(tmp_path, found, 2, copied=False) as (one, gate):
        one.lose("hb", "killed")
        gate.touch()
        until(lambda: bool(one.told.saved()), "the survivors have saved", LIMIT)
        until(lambda: f"; step {GATE} is safe in" in one.job.launchers["ha"].output, "ha waits for hb", LIMIT)
        [incident] = one.told.incidents()
        assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", GATE, 0)
        assert "arenas:" not in one.job.output
        one.job.start("hb")
        assert one.job.codes(START + LIMIT) == {"ha": 0, "hb": 0}, one.job.output
    expected = undisturbed(layout)
    assert {key: times[-1] for key, times in found.losses().items()} == {k: times[0] for k, times in expected.items()}
