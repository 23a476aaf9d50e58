"""Two ranks of which one is held before a step that the other has begun, with the real controller in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from lastgasp.config import GaspConfig
from lastgasp.events import Fault, Incident, decode_incident
from lastgasp.gasp.rank_status import Released
from lastgasp.gasp.serve import ControllerThread, new_token
from lastgasp.session import Contact, Session
from lastgasp.topology import Place, ReplicaGroups, data_parallel
from lastgasp_mindformers.aux_state import AuxRecorder, Numbers
from lastgasp_mindformers.state import MindSporeState
from support.fake_controller import FakeSource

LIMIT = 60.0
"""Seconds that nothing here needs; a rank that is left waiting waits for most of them."""


class Graph:
    """The step of two ranks as one collective: it ends on each when both have begun it."""

    def __init__(self) -> None:
        self.together = threading.Barrier(2)

    def run(self) -> None:
        """Wait for the other rank."""
        self.together.wait(LIMIT)


class Rank:
    """A rank of MindSpore in a thread: at step 4, `first` is set when it is in the graph of step 5."""

    seen = True

    def __init__(self, number: int, contact: Contact, directory: Path, replicas: ReplicaGroups) -> None:
        self.source, self.counters = FakeSource(), (4, 4)
        self.frozen = self.accumulated = self.still = dict[str, Any]()
        self.source.rank = number
        place = Place(rank=number, world_size=2, replicas=replicas, job="job")
        config = GaspConfig.resolve(directory, finish_timeout=LIMIT)
        self.session = Session(config, place, self.source, contact)
        self.state = MindSporeState(
            self,
            cast(AuxRecorder, self),
            self.session.status,
            before_update=self.session.before_update,
            step_completed=lambda step: self.session.step_completed(step),
            finish=LIMIT,
        )
        self.state.begin(Numbers(4, 1, 4))
        self.session.training_started(4, 0)

    def capture(self, numbers: Numbers) -> None:
        """Nothing is kept."""

    def read(self) -> tuple[int, int]:
        """Updates begun and ended."""
        return self.counters

    def undo(self) -> None:
        """Nothing."""

    def train(self, graph: Graph, may_begin: threading.Event, in_graph: threading.Event) -> None:
        """Steps until a recovery ends them."""
        with suppress(Released, threading.BrokenBarrierError):
            for step in range(5, 100):
                may_begin.wait(LIMIT)
                self.state.step_begin(Numbers(step, 1, step))
                in_graph.set()
                graph.run()
                self.counters = (step, step)
                self.state.step_end(Numbers(step, 1, step))
                self.state.others_end()

    def told_to_stop(self) -> None:
        """SIGTERM, as the control thread takes it."""
        fault = Fault(kind="sigterm", rank=self.source.rank, cause="asked to stop", step=4, seen_ns=1)
        self.session._processor.report(fault)


@contextmanager
def job(tmp_path: Path, replicas: ReplicaGroups, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    """Two ranks and their controller. No rank exits on its own: they are this process."""
    monkeypatch.setattr(Session, "_schedule_leaving", lambda self, outcome: None)
    controller = ControllerThread(new_token())
    contact = Contact(controller.endpoint.address, controller.endpoint.token)
    ranks = [Rank(number, contact, tmp_path, replicas) for number in (0, 1)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.session.close(goodbye=False)
        controller.stop()


@pytest.mark.parametrize("told", [0, 1])
@pytest.mark.parametrize("replicas", [data_parallel(2), ((0,), (1,))], ids=["replicas", "shards"])
def test_a_rank_that_was_held_lets_the_other_one_end_its_step(
    tmp_path: Path, told: int, replicas: ReplicaGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, events = Graph(), [(threading.Event(), threading.Event()) for _ in (0, 1)]
    with job(tmp_path, replicas, monkeypatch) as ranks:
        threads = [
            threading.Thread(target=rank.train, args=(graph, *own)) for rank, own in zip(ranks, events, strict=True)
        ]
        for thread in threads:
            thread.start()
        events[0][0].set()
        assert events[0][1].wait(LIMIT), "rank 0 is in the graph of step 5"
        ranks[told].told_to_stop()
        while not all(rank.session.status.held for rank in ranks):
            assert all(thread.is_alive() for thread in threads)
        events[1][0].set()  # rank 1 comes to the gate of step 5, which was closed
        outcomes = [rank.session.status.wait_over(LIMIT / 2) for rank in ranks]
        graph.together.abort()
        for thread in threads:
            thread.join(LIMIT)
        assert [outcome.step if outcome else None for outcome in outcomes] == [5, 5]
        assert [rank.session.status.step for rank in ranks] == [5, 5]
    (record,) = (tmp_path / "incidents").iterdir()
    incident: Incident = decode_incident(record.read_bytes())
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 5, 0)
