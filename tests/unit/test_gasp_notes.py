"""Notes of ranks in incident records: which record, once, and no more than it can bear."""

from __future__ import annotations

import logging
import threading
from contextlib import closing
from pathlib import Path

import pytest

from lastgasp.config import GaspConfig
from lastgasp.events import Incident, decode_incident
from lastgasp.gasp.actions import RecordPhase
from lastgasp.gasp.incidents import Incidents
from lastgasp.gasp.notes import LONGEST, MORE, MOST, add_note
from lastgasp.gasp.records import RecordWriter
from lastgasp.session import Session
from lastgasp.topology import Place, data_parallel
from support.fake_controller import FakeSource
from support.switch_job import hello


class Book:
    """The records of a job, and the thread that writes them."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.writer = directory, RecordWriter()
        self.incidents = Incidents(self.writer)

    def attempt(self, number: int) -> None:
        """A rank of this attempt has joined."""
        self.incidents.begin(hello(0, 2, attempt=number, directory=str(self.directory)))

    def recover(self) -> None:
        """A recovery of it, from its beginning to its end."""
        self.incidents.phase(RecordPhase(phase="detected"))
        self.incidents.phase(RecordPhase(phase="released"))

    def read(self) -> list[Incident]:
        """What is on disk, oldest first."""
        self.incidents.flush()
        assert self.writer.settle(60.0)
        return [decode_incident(path.read_bytes()) for path in sorted((self.directory / "incidents").glob("*"))]

    def close(self) -> None:
        """End the thread."""
        self.writer.close()


def test_each_note_goes_to_the_incident_that_it_belongs_to(tmp_path: Path) -> None:
    with closing(Book(tmp_path)) as book:
        book.attempt(0)
        book.incidents.note("before any fault")
        book.incidents.phase(RecordPhase(phase="detected"))
        book.incidents.note("while it is saved")
        book.incidents.phase(RecordPhase(phase="released"))
        book.incidents.note("behind it")
        book.attempt(1)
        book.incidents.note("from the restarted job")
        assert [record.notes for record in book.read()] == [
            ["before any fault", "while it is saved", "behind it", "from the restarted job"]
        ]
        book.recover()
        book.incidents.note("the second fault")
        assert [record.notes for record in book.read()][1:] == [["the second fault"]]


def test_a_note_of_a_job_without_any_incident_waits_for_the_first(tmp_path: Path) -> None:
    with closing(Book(tmp_path)) as book:
        book.incidents.note("nobody has joined yet")
        book.attempt(0)
        book.incidents.note("early")
        assert book.read() == []
        book.recover()
        assert book.read()[0].notes == ["early"]


def test_once_in_the_record_and_once_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Book(tmp_path)) as book:
        book.attempt(0)
        for _ in range(3):
            book.incidents.note("the same of every rank")
        assert [record.message for record in caplog.records] == ["note: the same of every rank"]


def test_no_more_than_a_record_can_bear() -> None:
    notes: list[str] = []
    given = [add_note(notes, f"{number}: " + "x" * 2 * LONGEST) for number in range(2 * MOST)]
    assert len(notes) == MOST + 1
    assert notes[-1] == MORE
    assert max(map(len, notes)) == LONGEST
    assert given[MOST:] == [MORE] + [""] * (MOST - 1)


def test_one_line_that_every_record_can_carry() -> None:
    notes: list[str] = []
    assert add_note(notes, "  two\nlines and \udcff ") == "two lines and \\udcff"
    assert add_note(notes, " \n") == ""


def test_without_a_controller_they_are_in_the_log_and_in_the_ranks_own_incident(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(rank=0, world_size=1, replicas=data_parallel(1), attempt=0, job="job")
    session = Session(GaspConfig.resolve(tmp_path), place, FakeSource(), None)
    try:
        session.training_started(3, 2)
        caplog.set_level(logging.WARNING, "lastgasp")
        session.note("not restored")
        session.note("not restored")
        session.fault("exception", "ValueError: boom")
    finally:
        session.close(goodbye=False)
    (path,) = (tmp_path / "incidents").iterdir()
    assert decode_incident(path.read_bytes()).notes == ["not restored"]
    assert [record.message for record in caplog.records].count("rank 0: not restored") == 1


# -- the thread that writes ------------------------------------------------------------------------


def test_put_never_waits_and_what_waits_is_replaced() -> None:
    held, written = threading.Event(), list[str]()

    def slowly() -> None:
        assert held.wait(60.0)
        written.append("a1")

    with closing(RecordWriter()) as writer:
        writer.put("a", slowly)
        writer.put("b", lambda: written.append("b1"))
        writer.put("b", lambda: written.append("b2"))
        assert not writer.idle
        assert not writer.settle(0.0)
        held.set()
        assert writer.settle(60.0)
    assert written == ["a1", "b2"]


def test_a_write_that_fails_is_reported_and_the_next_one_continues(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    written = list[str]()
    with closing(RecordWriter()) as writer:
        writer.put("the incident", fail)
        writer.put("b", lambda: written.append("b"))
        assert writer.settle(60.0)
    assert written == ["b"]
    assert [record.message for record in caplog.records] == [
        "the incident could not be written: [Errno 28] No space left on device"
    ]


def test_what_was_not_written_at_the_end_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    held, entered = threading.Event(), threading.Event()

    def stall() -> None:
        entered.set()
        held.wait(60.0)

    writer = RecordWriter()
    writer.put("the incident", stall)
    assert entered.wait(60.0)
    writer.close()
    held.set()
    assert [record.message for record in caplog.records] == [
        "not written, because the file system stalls: the incident"
    ]
