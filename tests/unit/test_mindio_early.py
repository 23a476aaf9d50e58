"""What is decided before a process group is made, where MindIO may have single processes started anew."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import TCPStore

from lastgasp.backends.ascend.mindio import early, limits
from lastgasp.backends.ascend.mindio.parking import Parking
from lastgasp.backends.ascend.mindio.strategies import decide_strategies
from lastgasp.backends.ascend.mindio.validation import taskd_address
from lastgasp.deferred_source import TOO_LATE
from lastgasp.errors import NotSaveable
from lastgasp.gasp.again import INCARNATION, LED
from lastgasp.gasp.rank_status import RankStatus, gone_on
from lastgasp.ports import Repaired
from lastgasp.pytorch.loop import joining
from lastgasp.pytorch.loop.joining import Job, Meeting
from lastgasp.session import Contact
from lastgasp.topology import Place, data_parallel

POD = {
    "MINDX_TASK_ID": "job", "HIGH_AVAILABILITY": "dump,recover", "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "LASTGASP_TOKEN": "a secret of some length",
}  # fmt: skip


@pytest.fixture(autouse=True)
def torch_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINDIO_FOR_MINDSPORE", raising=False)


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({}, True),
        ({"HIGH_AVAILABILITY": "dump"}, False),
        ({"HIGH_AVAILABILITY": "arf"}, True),
        ({"TASKD_PROCESS_ENABLE": "off"}, False),
        ({"MINDX_TASK_ID": ""}, True),
    ],
)
def test_only_a_job_that_asks_for_it_joins_early(more: dict[str, str], asked: bool) -> None:
    assert early.is_asked_for(POD | more) == asked


@pytest.mark.parametrize(("fewer", "asked"), [(True, True), (False, False)])
def test_elastic_training_counts_where_the_training_may_go_on_with_fewer_ranks(fewer: bool, asked: bool) -> None:
    assert early.is_asked_for(POD | {"HIGH_AVAILABILITY": "dump,elastic-training"}, fewer) == asked


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, ""),
        ({"GROUP_WORLD_SIZE": "1"}, "two nodes"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, "store of torch's agent"),
        ({"LASTGASP_TOKEN": ""}, "share no secret"),
        ({"LASTGASP_NO_CONTROLLER": "x"}, "share no secret"),
        ({"LASTGASP_RECOVERY": "retry"}, "LASTGASP_RECOVERY=retry"),
        ({"LASTGASP_RECOVERY": "auto"}, ""),
    ],
)
def test_what_a_new_process_could_not_do_without(more: dict[str, str], why: str) -> None:
    found = early.why_not_early(POD | more)
    assert why in found and bool(why) == bool(found)


def test_the_reason_is_that_of_the_refusal() -> None:
    found = decide_strategies("recover,retry", "", taskd=True, nodes=2, mindspore=False, no_recover="no agent")
    assert (found.retry, found.recover, dict(found.refused)) == (True, False, {"recover": "no agent"})


def test_who_has_lost_a_peer_waits_for_mindxs_word() -> None:
    assert limits.patience({}) == 30 + 3 * 30 + 270
    assert limits.patience({"MINDIO_WAIT_MINDX_TIME": "60"}) == 30 + 3 * 60 + 270


def test_other_pods_look_for_the_controller_at_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POD_IP": "10.0.0.2", "MASTER_ADDR": "10.0.0.1", "TTP_PORT": "8000"}.items():
        monkeypatch.setenv(name, value)
    assert taskd_address(False)[0] == "10.0.0.2:8000"
    assert taskd_address(False, first=False)[0] == "10.0.0.1:8000"


@pytest.mark.parametrize(("lost", "grows", "joins"), [(0, False, "2"), (1, False, "2"), (1, True, "5")])
def test_survivors_and_a_new_process_agree_where_they_meet(
    lost: int, grows: bool, joins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller counts fewer incarnations: it does not see a repair in which nobody joins it anew."""
    monkeypatch.setenv(LED, "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    agents = TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(agents.port))

    def of(rank: int, incarnation: str) -> Meeting:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv(INCARNATION, incarnation)
        found = Meeting()
        found.rebuild((lost,), grows)
        return found

    first = of(0, "" if lost == 0 else "4")
    other = of(1, "" if lost == 1 else "4")
    place = Place(rank=0, world_size=2, replicas=data_parallel(2), attempt=3, job="j")
    first.tell(Contact("10.0.0.1:5", "never told"), place)
    assert other.job() == Job("10.0.0.1:5", "j", 3, "2")
    assert other.job().environment == {
        "LASTGASP_CONTROLLER": "10.0.0.1:5", "LASTGASP_JOB": "j", "LASTGASP_ATTEMPT": "3",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }  # fmt: skip
    again = gone_on(Repaired(1, 8, 0, (lost,))).again
    assert again is not None
    for one in (first, other):
        one.look()
    agreed = first.of(again)
    assert agreed == other.of(again)
    assert (agreed.incarnation, agreed.lost, agreed.step, agreed.host, agreed.rung) == (
        5, (lost,), 8, "localhost", "replace",
    )  # fmt: skip
    assert [first.joins, other.joins] == [joins, joins]
    assert TCPStore("localhost", agreed.port, None, is_master=False, wait_for_workers=False).port == agreed.port


def test_a_new_process_that_runs_something_else_is_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": str(agents.port), "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    place, codes = Meeting(), iter(({"__main__": "1"}, {"__main__": "1"}, {"__main__": "2"}))
    monkeypatch.setattr(joining, "code_of_this_process", lambda: next(codes, {"__main__": "1"}))
    place.tell_code()
    assert place.runs_other_code() == ""
    assert "other code than the ranks that are there (the script)" in place.runs_other_code()
    joined = early._Joining(1, Parking({}, 1, RankStatus(), False, 1.0), place)
    with pytest.raises(NotSaveable, match="said to have one"):
        joined.zit_upgrade_rebuild([0], None, '{"scale-out-strategy": "DP"}')
    agents.delete_key("lastgasp/code")
    with pytest.raises(NotSaveable, match="not known what the other ranks run"):
        joined.rebuild_group([1], None, None)


def test_a_job_of_other_kinds_does_not_join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for size, backend in (("1", "ascend"), ("2", "embedded")):
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("LASTGASP_BACKEND", backend)
        assert joining.join() is None
    assert joining.why_not() == TOO_LATE


def test_a_process_to_move_a_rank_to_ends_before_it_waits_where_nobody_was_moved_yet(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron and Trainer: all others train on, as where it dies."""
    found = early.Early(None, None, 1, False, anew=True, moves=True)  # type: ignore[arg-type]
    monkeypatch.setattr(joining, "_meeting", [])
    monkeypatch.setattr(joining, "_refused", [])
    monkeypatch.setattr(joining, "Meeting", object)
    monkeypatch.setattr(joining, "choose_backend", lambda: SimpleNamespace(backend="ascend"))
    monkeypatch.setattr(early, "is_asked_for", lambda env, fewer: True)
    monkeypatch.setattr(early, "why_not_early", lambda env: "")
    monkeypatch.setattr(early, "start_early", lambda fewer: found)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="hot switch: rank 1 stays where it is"):
        joining.join(moved=False)
