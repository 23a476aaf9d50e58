"""Replica groups in a greeting: complete and small, or else refused."""

from __future__ import annotations

import random
import sys
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.errors import ControlError, ProtocolError
from lastgasp.events import Fault, FaultKind
from lastgasp.gasp import messages as m
from lastgasp.gasp.admission import NotYet, WholeJobRefused, admit, is_newer
from lastgasp.gasp.again import Again
from lastgasp.gasp.attempt import Attempt
from lastgasp.gasp.groups import MOST, MOST_UNPACKED, pack, unpack
from lastgasp.gasp.ladder import Ladder
from lastgasp.topology import ReplicaGroups, data_parallel
from support.switch_job import hello

MANY = 100_000


def grid(tensor: int, pipeline: int, data: int) -> ReplicaGroups:
    """Megatron's order of ranks: tensor parallel fastest, then data, then pipeline; two copies of each shard."""
    half = data // 2
    return tuple(
        (first := t + tensor * (d + data * p), first + tensor * half)
        for p in range(pipeline)
        for d in range(half)
        for t in range(tensor)
    )


@given(st.lists(st.lists(st.integers(0, 1000), max_size=5).map(tuple), max_size=20).map(tuple))
def test_they_come_back_as_they_were(groups: ReplicaGroups) -> None:
    assert unpack(pack(groups)) == groups


@pytest.mark.parametrize(
    "groups",
    [
        data_parallel(MANY),
        tuple((rank, rank + MANY // 2) for rank in range(MANY // 2)),
        tuple((rank, rank + 1) for rank in range(0, MANY, 2)),
        tuple((rank,) for rank in range(MANY)),
        grid(8, 16, 780),
    ],
    ids=["data parallel", "halves", "neighbours", "no replicas", "a grid"],
)
def test_a_hundred_thousand_ranks_fit_into_a_greeting(groups: ReplicaGroups) -> None:
    greeting = msgspec.structs.replace(hello(0, MANY), replicas=pack(groups), nonce=bytes(32), mac=bytes(32))
    assert len(m.frame(greeting)) < m.MAX_GREETING
    assert unpack(greeting.replicas) == groups


def test_groups_without_any_pattern_are_refused_by_name() -> None:
    ranks = list(range(MANY))
    random.Random(1).shuffle(ranks)
    with pytest.raises(ControlError, match=rf"replica groups of this job take \d+ bytes, {MOST} at most"):
        pack(tuple(zip(ranks[::2], ranks[1::2], strict=True)))


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"no zlib",
        zlib.compress(b"no msgpack"),
        zlib.compress(msgspec.msgpack.encode([3, 0, 1])),
        zlib.compress(msgspec.msgpack.encode(["a"])),
        zlib.compress(msgspec.msgpack.encode([2**63, 0])),
        zlib.compress(bytes(MOST_UNPACKED + 1)),
        pack(data_parallel(8))[:-1],
    ],
)
def test_anything_else_is_no_groups(nonsense: bytes) -> None:
    with pytest.raises(ProtocolError, match="no replica groups"):
        unpack(nonsense)


def test_ranks_that_disagree_are_reported_with_what_each_of_them_says() -> None:
    job = Attempt.of(hello(0, 4))
    other = msgspec.structs.replace(hello(1, 4), replicas=pack(((0, 2), (1, 3))))
    assert job.disagreement(other).startswith("replicas=((0, 2), (1, 3)) on rank 1, but ((0, 1, 2, 3),) on rank 0: ")
    same = msgspec.structs.replace(hello(1, 4), replicas=zlib.compress(zlib.decompress(pack(data_parallel(4))), 0))
    assert job.disagreement(same) == "", "another zlib, the same groups"


def test_a_later_training_of_the_script_may_have_other_settings_once_all_have_ended_the_one_before() -> None:
    job = Attempt.of(hello(0, 2))
    later = msgspec.structs.replace(hello(0, 2), directory="/another", nonce=b"n")
    later = msgspec.structs.replace(later, mac=m.proof("token", "rank", b"n", 0))

    def asks() -> str:
        try:
            admit(later, b"n", "token", job, None)
        except NotYet as error:
            return str(error)
        return ""

    for rank in (0, 1):
        job.machine.joined(rank, 1.0)
    with pytest.raises(WholeJobRefused, match="directory='/another' on rank 0"):
        admit(later, b"n", "token", job, None)
    job.machine.said(0, m.Goodbye(), 2.0)
    assert asks() == m.NOT_YET and not is_newer(later, job)
    job.machine.said(1, m.Goodbye(), 3.0)
    assert asks() == "" and is_newer(later, job) and not is_newer(hello(0, 2), job)
    assert job.leaves(later) == (sys.maxsize, False), "an arena of the training before is not of this one"
    assert job.leaves(msgspec.structs.replace(later, attempt=1)) == (0, False)


def test_only_the_incarnation_that_runs_or_was_agreed_on_is_let_in() -> None:
    """One that was replaced, or cut off meanwhile, carries an older one."""
    job = Attempt.of(hello(0, 2, incarnation=1))

    def refused(incarnation: int, current: Attempt | None = job) -> bool:
        own = hello(1, 2, incarnation=incarnation, nonce=b"n", mac=m.proof("token", "rank", b"n", 1))
        try:
            admit(own, b"n", "token", current, None)
        except ControlError as error:
            return f"incarnation {incarnation} " in str(error)
        return False

    assert [refused(number) for number in range(4)] == [True, False, True, True]
    assert isinstance(job.machine, Ladder)
    job.machine.again = Again(incarnation=2, step=7, source=0, takers=(1,), lost=(1,), port=1)
    assert [refused(number) for number in range(4)] == [True, False, False, True]
    assert [refused(number, None) for number in range(2)] == [False, True]


@pytest.mark.parametrize("kind", ["exception", "sigterm"])
def test_a_script_that_handles_what_all_its_ranks_raise_begins_another_training(kind: FaultKind) -> None:
    """But a SIGTERM ends it: what one rank raises besides is of no account."""
    job, same = Attempt.of(hello(0, 2)), hello(0, 2, nonce=b"n", mac=m.proof("token", "rank", b"n", 0))
    for rank in (0, 1):
        job.machine.joined(rank, 1.0)
        job.machine.said(rank, m.Begin(step=0, durable=0, buffer_fd=-1), 1.0)
    fault = Fault(kind=kind, rank=0, cause="Diverged: nan", step=0, seen_ns=1)
    for rank in (0, 1):
        job.machine.said(rank, m.Report(fault=msgspec.structs.replace(fault, rank=rank)), 2.0)
        assert not is_newer(same, job)
    for rank in (0, 1):
        job.machine.said(rank, m.Prepared(recovery=1, step=0, durable=0, usable=True), 2.0)
    assert job.machine.state == "over"
    assert is_newer(same, job) == (kind == "exception")
    job.machine.members[1].fault = None
    assert not is_newer(same, job)
    if kind == "exception":
        with pytest.raises(NotYet):
            admit(same, b"n", "token", job, None)
        job.machine.members[1].gone = "process died"
        with pytest.raises(WholeJobRefused, match=r"on rank 0 .Diverged: nan. has ended the training of all ranks"):
            admit(same, b"n", "token", job, None)


def test_many_ranks_that_disagree_are_reported_in_one_line() -> None:
    job = Attempt.of(hello(0, MANY))
    other = msgspec.structs.replace(hello(1, MANY), replicas=pack(tuple((rank,) for rank in range(MANY))))
    why = job.disagreement(other)
    assert "100000 groups (" in why and "1 groups (" in why
    assert len(why) < 1000
