"""The engine on real processes with real signals; no framework."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.gasp.rundir import running_jobs
from lastgasp.gasp.serve import Endpoint, start_detached
from lastgasp.gasp.uncoordinated import OUT_OF_REACH
from support.engine_job import ToyJob, ToyRank, held
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.fault


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_while_its_peers_are_stuck(tmp_path: Path, victim: int) -> None:
    with ToyJob(tmp_path, world=3) as job:
        job.step(1)
        job.step(2)
        survivors = [r for r in range(3) if r != victim]
        job.stuck(*survivors)
        job.ranks[victim].signal(signal.SIGKILL)
        saver = job.ranks[survivors[0]]
        save = saver.wait_for("save")
        assert save["step"] == 2
        # The dead rank's random state was rescued from its crash-safe buffer.
        assert save["aux"] == {str(r): f"rank {r} step 2" for r in range(3)}
        assert [job.ranks[r].code() for r in survivors] == [exitcodes.SAVED] * 2
        until(lambda: "SIGKILL" in job.incident().faults[0].cause, "the kernel says how the dead rank has ended")
        incident = job.incident()
    assert job.saved() == ["step-2.toy"]
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 2, 0)
    assert [(f.rank, f.kind) for f in incident.faults] == [(victim, "killed")]
    phases = incident.phases
    order = [phases.fault, phases.detected, phases.agreed, phases.saved, phases.committed, phases.released]
    assert order == sorted(t for t in order if t is not None)


def test_exception_reaches_the_peers_and_the_faulty_rank_does_not_save(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        job.stuck(1)
        job.ranks[0].tell("raise")
        assert job.ranks[1].wait_for("save")["step"] == 1
        assert job.ranks[0].wait_for("released")["ending"] == "saved"
        assert [rank.code() for rank in job.ranks] == [exitcodes.SAVED] * 2
        incident = job.incident()
    assert (incident.faults[0].kind, incident.faults[0].cause) == ("exception", "ValueError: boom")
    assert incident.savers == [1]


def test_the_faulty_rank_saves_when_nobody_else_is_left(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        job.ranks[1].signal(signal.SIGKILL)
        job.ranks[0].tell("raise")
        assert job.ranks[0].wait_for("released")["ending"] == "saved"
        assert job.saved() == ["step-1.toy"]
        assert {f.rank for f in job.incident().faults} <= {0, 1}


def test_sigterm_to_one_rank_saves_without_python_handlers_in_the_stuck_main_thread(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.step(3)
        job.stuck(0, 1)
        job.ranks[1].signal(signal.SIGTERM)
        assert [rank.code() for rank in job.ranks] == [exitcodes.SAVED] * 2
        assert job.incident().faults[0].kind == "sigterm"
    assert job.saved() == ["step-3.toy"]


def test_a_stopped_rank_is_found_excluded_and_killed_after_the_save(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=3) as job:
        job.step(1)
        job.ranks[1].signal(signal.SIGSTOP)
        job.stuck(0, 2)
        job.hangs(1)
        assert job.ranks[1].code() == -signal.SIGKILL
        assert [job.ranks[r].code() for r in (0, 2)] == [exitcodes.SAVED] * 2
        incident = job.incident()
    assert [(f.kind, f.rank) for f in incident.faults] == [("hang", 1)]
    assert job.saved() == ["step-1.toy"]


def test_a_survivor_behind_the_dead_rank_completes_its_step_too(tmp_path: Path) -> None:
    """The dead rank had completed step 2; the survivor holds all gradients of it and is before its update."""
    with ToyJob(tmp_path, world=2, reach=30.0) as job:
        job.step(1)
        job.ranks[1].tell("step 2")
        job.ranks[1].wait_for("stepped")
        job.ranks[1].signal(signal.SIGKILL)
        job.ranks[1].code()
        job.ranks[0].tell("step 2")
        save = job.ranks[0].wait_for("save")
        assert save["step"] == 2
        assert save["aux"] == {str(r): f"rank {r} step 2" for r in range(2)}


def test_a_survivor_that_cannot_reach_the_dead_ranks_step_saves_its_own(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        job.ranks[1].tell("step 2")
        job.ranks[1].wait_for("stepped")
        job.stuck(0)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].wait_for("save")["step"] == 1
        assert job.ranks[0].code() == exitcodes.SAVED


def test_a_rank_inside_its_update_may_finish_it_first(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        job.ranks[0].tell("update")
        job.ranks[0].wait_for("updating")
        job.ranks[1].signal(signal.SIGKILL)
        job.ranks[1].code()
        job.ranks[0].tell("finish 2")
        assert job.ranks[0].wait_for("save")["step"] == 2


def test_a_rank_that_never_leaves_its_update_is_not_saved_where_another_holds_the_shard(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=3, finish=1.0) as job:
        job.step(1)
        job.ranks[0].tell("update")
        job.ranks[0].wait_for("updating")
        job.stuck(1)
        job.ranks[2].signal(signal.SIGKILL)
        assert job.ranks[1].wait_for("save")["step"] == 1
        job.ranks[1].code()
        incident = job.incident()
    assert {u.rank: u.why for u in incident.unused}[0] == "still inside its update after 1 s"


def test_gives_up_and_says_why_when_the_only_rank_left_is_inside_its_update(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2, finish=1.0) as job:
        job.step(1)
        job.ranks[0].tell("update")
        job.ranks[0].wait_for("updating")
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].code() == exitcodes.GAVE_UP
        incident = job.incident()
    assert incident.ending == "gave_up"
    assert "rank 0: still inside its update" in incident.reason
    assert "rank 1: gone" in incident.reason
    assert job.saved() == []


def test_nothing_to_save_before_the_first_step(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].code() == exitcodes.NOTHING_TO_SAVE
    assert job.saved() == []


def test_the_saver_dies_during_the_save_and_the_next_holder_takes_over(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with ToyJob(tmp_path, world=3, save_until=str(asked)) as job:
        job.step(5)
        job.stuck(0, 1)
        job.ranks[2].signal(signal.SIGKILL)
        job.ranks[0].wait_for("save")
        job.ranks[0].signal(signal.SIGKILL)
        job.ranks[0].code()
        asked.touch()
        assert job.ranks[1].wait_for("save")["step"] == 5
        assert job.ranks[1].code() == exitcodes.SAVED
        assert {f.rank for f in job.incident().faults} == {0, 2}
    assert job.saved() == ["step-5.toy"]


def test_a_failing_save_moves_to_another_holder(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=3, failing=[0]) as job:
        job.step(1)
        job.stuck(0, 1)
        job.ranks[2].signal(signal.SIGKILL)
        assert job.ranks[1].wait_for("save")["step"] == 1
        assert [job.ranks[r].code() for r in (0, 1)] == [exitcodes.SAVED] * 2
        incident = job.incident()
    assert "No space left" in {u.rank: u.why for u in incident.unused}[0]


def test_disk_full_everywhere_gives_up_with_the_reason(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2, failing=[0, 1]) as job:
        job.step(1)
        job.stuck(0)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].code() == exitcodes.GAVE_UP
        assert "No space left" in job.incident().reason
    assert job.leftovers() == []


def test_a_save_that_takes_too_long_moves_to_another_holder(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2, save=1.0, save_seconds=20.0) as job:
        job.step(1)
        job.stuck(0)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].code() == exitcodes.GAVE_UP
        assert "not written in 1 s" in job.incident().reason


def test_shards_need_a_holder_each(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=4, replicas=[[0, 2], [1, 3]]) as job:
        job.step(1)
        job.stuck(1, 2, 3)
        job.ranks[0].signal(signal.SIGKILL)
        assert job.ranks[2].wait_for("save")["step"] == 1
        assert job.ranks[1].wait_for("save")["step"] == 1
        published = job.ranks[2].wait_for("published")
        assert published["parts"] == [1, 2]
        assert job.ranks[3].code() == exitcodes.SAVED


def test_shard_without_a_holder_gives_up_and_names_it(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=4, replicas=[[0, 2], [1, 3]]) as job:
        job.step(1)
        job.stuck(1, 3)
        job.ranks[2].signal(signal.SIGSTOP)  # so that it cannot answer before it dies, too
        job.ranks[0].signal(signal.SIGKILL)
        job.ranks[2].signal(signal.SIGKILL)
        assert [job.ranks[r].code() for r in (1, 3)] == [exitcodes.GAVE_UP] * 2
        incident = job.incident()
    assert "shard 0 of 2 has no live holder" in incident.reason
    assert job.saved() == []


def test_leaving_after_training_is_no_fault(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        for rank in job.ranks:
            rank.tell("done")
        assert [rank.code() for rank in job.ranks] == [0, 0]
    assert not (tmp_path / "incidents").exists()


def test_gather_and_a_rank_that_dies_before_its_part(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2) as job:
        for i, rank in enumerate(job.ranks):
            rank.tell(f"gather first part{i}")
        assert [rank.wait_for("gathered")["parts"] for rank in job.ranks] == [["part0", "part1"]] * 2
        job.ranks[0].tell("gather second part0")
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].code() != 0


def test_controller_killed_then_a_rank_killed_the_survivor_saves_alone(tmp_path: Path) -> None:
    endpoint = start_detached()
    with ToyJob(tmp_path, world=2, endpoint=endpoint) as job:
        job.step(4)
        os.kill(_pid(endpoint), signal.SIGKILL)
        job.ranks[1].signal(signal.SIGKILL)
        job.ranks[1].code()
        job.ranks[0].tell("raise")  # the collective's error is what a rank sees then
        assert job.ranks[0].wait_for("released")["ending"] == "saved"
        incident = job.incident()
    assert job.saved() == ["step-4.toy"]
    assert incident.led_by == "rank 0"
    assert incident.notes == [OUT_OF_REACH]


def test_a_detached_controller_ends_after_the_last_rank(tmp_path: Path) -> None:
    endpoint = start_detached()
    pid = _pid(endpoint)
    with ToyJob(tmp_path, world=1, endpoint=endpoint) as job:
        job.ranks[0].tell("done")
        assert job.ranks[0].code() == 0
    until(lambda: not Path(f"/proc/{pid}").exists(), "it has ended")


@pytest.mark.parametrize("noise", [b"", b"\x00", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x05hello"])
def test_noise_at_the_port_is_refused_and_harms_nobody(tmp_path: Path, noise: bytes) -> None:
    with ToyJob(tmp_path, world=2) as job:
        assert job.endpoint is not None
        with socket.create_connection((job.endpoint.host, job.endpoint.port), timeout=PATIENCE) as intruder:
            intruder.sendall(noise)
            intruder.shutdown(socket.SHUT_WR)
            while intruder.recv(4096):
                pass
        job.step(1)
        job.stuck(0)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].code() == exitcodes.SAVED


def test_wrong_token_wrong_version_and_disagreement_are_refused(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2) as job:
        assert job.endpoint is not None
        stranger = _start(job, {"LASTGASP_TOKEN": "0" * 64})
        why = stranger.wait_for("refused")["why"]
        assert "token" in why
        assert job.endpoint.token not in why
        stranger.end()
        twin = job.start(1)
        assert "rank=1 has joined already" in twin.wait_for("refused")["why"]
        twin.end()
        other = job.start(1, save=7.0)
        assert "save_timeout=7.0 on rank 1, but 600.0 on rank" in other.wait_for("refused")["why"]
        other.end()
        old = job.start(1, version="0.0.9")
        assert "lastgasp version 0.0.9 (protocol " in old.wait_for("refused")["why"]
        old.end()
        job.step(1)


def _start(job: ToyJob, environment: dict[str, str]) -> ToyRank:
    assert job.endpoint is not None
    options = {"rank": 0, "world": 2, "directory": str(job.directory)}
    return ToyRank(options, {"LASTGASP_CONTROLLER": job.endpoint.address} | environment)


def _pid(endpoint: Endpoint) -> int:
    """The process of a detached controller."""
    [pid] = [job.pid for job in running_jobs() if job.address == endpoint.address]
    return pid


def test_notes_of_ranks_are_in_the_incident_that_they_belong_to_and_once(tmp_path: Path) -> None:
    """Before the fault: in its record. From the restarted ranks: in the record of what they answer."""
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        for rank in job.ranks:
            rank.tell("note workers draw their own random numbers")
            rank.wait_for("noted")
        job.stuck(0)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].code() == exitcodes.SAVED
        before = job.incident()
        again = [job.start(rank, attempt=1) for rank in range(2)]
        job.ranks += again
        for rank in again:
            rank.wait_for("ready")
            rank.tell("note the random state of rank 1 could not be restored")
            rank.wait_for("noted")
            rank.tell("gather behind it")  # so that the controller has heard it
        assert [rank.wait_for("gathered")["parts"] for rank in again] == [["it", "it"]] * 2
        after = job.incident()
    assert before.notes == ["workers draw their own random numbers"]
    assert after.id == before.id
    assert after.notes == [*before.notes, "the random state of rank 1 could not be restored"]


def test_ranks_that_hold_different_things_are_not_saved_from_one_another(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2, holds=["one", "another"]) as job:
        assert [rank.wait_for("compared")["alike"] for rank in job.ranks] == [False, False]
        job.step(1)
        job.stuck(0)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].code() == exitcodes.GAVE_UP
        incident = job.incident()
    assert job.saved() == []
    assert "shard 1 of 2 has no live holder (rank 1: gone" in incident.reason
    assert [note for note in incident.notes if "ranks 0 and 1 should hold the same, but their model differ" in note]


def test_of_three_ranks_the_odd_one_is_nobodys_replica_and_the_other_two_are(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=3, holds=["one", "one", "another"]) as job:
        job.step(1)
        job.stuck(0, 2)
        job.ranks[1].signal(signal.SIGKILL)
        assert [job.ranks[r].wait_for("save")["step"] for r in (0, 2)] == [1, 1]
        assert [job.ranks[r].code() for r in (0, 2)] == [exitcodes.SAVED] * 2
        assert job.incident().savers == [0, 2]


def test_ranks_that_hold_the_same_are_saved_from_one_another(tmp_path: Path) -> None:
    with ToyJob(tmp_path, world=2, holds=["one", "one"]) as job:
        assert [rank.wait_for("compared")["alike"] for rank in job.ranks] == [True, True]
        job.step(1)
        job.stuck(0)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].code() == exitcodes.SAVED
        assert job.incident().notes == []


def test_a_rank_that_closed_may_end_at_once_while_its_peer_continues_with_work_of_its_own(tmp_path: Path) -> None:
    """By os._exit, while the controller is behind; the peer closes a little later and exports for a while."""
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        assert job.thread is not None
        with held(job.thread):
            job.ranks[1].tell("done now")
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.ranks[1].code(1.0)
        assert job.ranks[1].code() == 0
        job.ranks[0].tell("done 4")
        job.ranks[0].wait_for("done")
        assert job.ranks[0].code() == 0
        assert job.thread.settle()
    assert not (tmp_path / "incidents").exists()
