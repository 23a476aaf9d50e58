"""A rank that was cut off from its controller asks before it commits: what the others have saved is kept."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lastgasp.events import Fault, Incident, Phases, decode_incident
from lastgasp.gasp import messages as m
from lastgasp.gasp.attempt import new_incident
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.gasp.records import write_incident
from lastgasp.gasp.uncoordinated import Known, recover_uncoordinated
from lastgasp.topology import Place, data_parallel
from support.fake_controller import HELLO, FakeSource

FAULT = Fault(kind="peer", rank=1, cause="Connection reset by peer", step=3, seen_ns=1)


def of_the_others(directory: Path, **changes: Any) -> None:
    """What the controller of HELLO's job writes at second 1013, once it has had step 3 committed."""
    record = new_incident(HELLO, 1, 1013 * 10**9)
    record.ending, record.step_saved, record.files = "saved", 3, ["/shared/gasp-step=3"]
    record.phases.released = 1013 * 10**9
    for name, value in changes.items():
        setattr(record, name, value)
    write_incident(record, directory)


def cut_off(directory: Path, source: FakeSource) -> m.Release:
    """The recovery of rank 1 of 2 on its own; its controller had started at second 1000."""
    status = RankStatus()
    status.step = 3
    place = Place(rank=1, world_size=2, replicas=data_parallel(2))
    hello = msgspec.structs.replace(HELLO, directory=str(directory))
    return recover_uncoordinated(status, source, place, hello, FAULT, Known(since_s=1000))


def own_record(directory: Path) -> Incident:
    """What the rank that was cut off has recorded."""
    records = [decode_incident(path.read_bytes()) for path in (directory / "incidents").iterdir()]
    [own] = [record for record in records if record.led_by == "rank 1"]
    return own


def test_what_the_others_have_saved_is_kept(tmp_path: Path) -> None:
    """It had put its own file, which lacks the random state of the others, over theirs."""
    of_the_others(tmp_path)
    source = FakeSource()
    outcome = cut_off(tmp_path, source)
    assert (outcome.ending, outcome.step, outcome.path) == ("saved", 3, "/shared/gasp-step=3")
    assert source.done == []
    own = own_record(tmp_path)
    assert "cut off from the controller" in own.notes[0] and len(own.notes) == 1


def test_they_commit_while_it_saves(tmp_path: Path) -> None:
    source = FakeSource()
    source.gate.clear()
    outcome: list[m.Release] = []
    thread = threading.Thread(target=lambda: outcome.append(cut_off(tmp_path, source)))
    thread.start()
    assert source.saving.wait(20)
    of_the_others(tmp_path)
    source.gate.set()
    thread.join(20)
    assert outcome[0].path == "/shared/gasp-step=3"
    assert source.done == ["save 3", "discard"]


class Contributing(FakeSource):
    """A source whose auxiliary state can be added to another's checkpoint, and whose publishing keeps what exists."""

    def contribute(self, step: int, path: str) -> str:
        """As the port says."""
        self.done.append(f"contribute {step} {path}")
        self._fail()
        return "added to it"

    def publish(self, result: object, parts: object) -> str:
        """As the port says."""
        self.done.append("publish")
        return "kept the other's"


def test_what_only_this_rank_knows_is_added(tmp_path: Path) -> None:
    of_the_others(tmp_path)
    source = Contributing()
    assert cut_off(tmp_path, source).path == "/shared/gasp-step=3"
    assert source.done == ["contribute 3 /shared/gasp-step=3"]
    assert "that one was kept; added to it" in own_record(tmp_path).notes[0]


def test_nothing_is_added_to_a_later_step(tmp_path: Path) -> None:
    of_the_others(tmp_path, step_saved=4)
    source = Contributing()
    outcome = cut_off(tmp_path, source)
    assert (outcome.step, source.done) == (4, [])
    assert own_record(tmp_path).step_saved == 4


def test_an_addition_that_fails_costs_no_outcome(tmp_path: Path) -> None:
    of_the_others(tmp_path)
    source = Contributing()
    source.error = OSError("No space left on device")
    assert cut_off(tmp_path, source).ending == "saved"
    assert "No space left on device" in own_record(tmp_path).notes[0]


def test_a_rank_that_saves_at_the_same_time_lets_the_first_commit_stand(tmp_path: Path) -> None:
    """Publishing finds out, under the lock of the directory; records come a moment after the commit."""
    source = Contributing()
    source.gate.clear()
    thread = threading.Thread(target=cut_off, args=(tmp_path, source))
    thread.start()
    assert source.saving.wait(20)
    of_the_others(tmp_path)
    source.gate.set()
    thread.join(20)
    assert source.done == ["save 3", "publish"]
    assert "kept the other's" in own_record(tmp_path).notes


@pytest.mark.parametrize(
    "changes",
    [
        {"step_saved": 2},
        {"attempt": 1},
        {"job": "another"},
        {"led_by": "rank 0"},
        {"ending": "gave_up"},
        {"phases": Phases(released=999 * 10**9)},
    ],
)
def test_only_what_they_saved_of_this_step_in_this_run_counts(tmp_path: Path, changes: dict[str, Any]) -> None:
    of_the_others(tmp_path, **changes)
    (tmp_path / "incidents" / "9.json").write_bytes(b"torn")
    source = FakeSource()
    assert cut_off(tmp_path, source).ending == "saved"
    assert source.done == ["save 3", "publish [1]"]


def test_the_folder_of_the_records_belongs_to_whom_the_checkpoints_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher of root's makes it, and the ranks run as another user."""
    made: list[tuple[str, int, int]] = []

    def given(fd: int, uid: int, gid: int) -> None:
        made.append((os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2], uid, gid))

    monkeypatch.setattr(os, "fchown", given)
    own, others = tmp_path / "own", tmp_path / "others"
    for folder in (own, others):
        folder.mkdir()
    others.chmod(0o770)
    of_the_others(own)
    assert made == []
    launcher, fstat = others.stat().st_uid + 1, os.fstat
    monkeypatch.setattr(os, "geteuid", lambda: launcher)
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((*fstat(fd)[:4], launcher, *fstat(fd)[5:])))
    of_the_others(others)
    of_the_others(others)
    assert made == [("incidents", others.stat().st_uid, others.stat().st_gid)]
    assert stat.S_IMODE((others / "incidents").stat().st_mode) == 0o770
