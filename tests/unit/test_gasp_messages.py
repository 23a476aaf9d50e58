"""The wire: every message comes back as it went, everything else is a ProtocolError."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lastgasp.errors import ProtocolError
from lastgasp.events import Fault
from lastgasp.gasp import messages as m
from lastgasp.gasp.again import Again
from lastgasp.gasp.cards import RankRow, SwitchResult, WorkerCard

GOLDEN = Path(__file__).parents[1] / "golden" / "wire-v15.json"
FAULT = Fault(kind="killed", rank=1, cause="process 7 died", step=4, seen_ns=5)
NONCE, MAC = bytes(range(32)), bytes(range(32, 64))
CARD = WorkerCard(
    rank=1, node="node-7", pid=77, device="npu:3", versions={"lastgasp": "1.2.3", "torch": "2.13.0"}, started_ns=9
)
ONE_OF_EACH: tuple[m.Message, ...] = (
    m.Challenge(protocol=1, version="1.2.3", nonce=NONCE, host="boot:1"),
    m.Hello(
        protocol=1, version="1.2.3", nonce=NONCE, mac=MAC, job="job", attempt=2, rank=1, world_size=4,
        replicas=b"packed", host="boot:1", pid=77, directory="/ckpts", hang_timeout=0.0, save_timeout=600.0,
        finish_timeout=10.0,
    ),
    m.Welcome(mac=MAC, started_s=1_700_000_000),
    m.Refused(reason="wrong token"),
    m.Begin(
        step=3, durable=2, buffer_fd=-1, recovery="auto", together=((0, 1),), arena_fd=11, arena_id=b"id",
        from_files=True, fewer=m.Fewer(may=True, parts=4), buddy=True,
    ),
    m.Regroup(replicas=((0,), (2,), (1, 3)), why="ranks 0 and 2 differ"),
    m.Status(step=3, durable=2, tick=99, phase="backward", marks=15),
    m.Report(fault=FAULT),
    m.Prepare(recovery=1, faults=(FAULT,), target=4),
    m.Entered(recovery=1, step=5),
    m.Prepared(
        recovery=1, step=4, durable=2, usable=True, why="", aux=b"rng", target=4, arena=(4, 3), ends=("10.0.0.1 7",),
    ),
    m.Save(
        recovery=1, plan=2, step=4, aux={0: b"a", 3: b"b"}, reason="rank 1: process 7 died", together=((2, 1),),
        own=False, common=1, arenas=(m.ArenaRef(rank=1, pid=70, fd=12, identity=b"id"),),
    ),
    m.Saved(recovery=1, plan=2, path="/ckpts/step=4.ckpt", nbytes=10, first_byte_ns=11, part=b"part"),
    m.SaveFailed(recovery=1, plan=2, why="OSError: disk full", arena=1),
    m.Commit(recovery=1, plan=2, parts={0: b"part"}),
    m.Committed(recovery=1, plan=2),
    m.Discard(recovery=1, plan=2),
    m.Release(
        recovery=1, ending="in_place", step=4, path="", reason="",
        again=Again(incarnation=1, step=4, source=0, takers=(1,), lost=(1,), port=77, aux={0: b"a"}, pids=(5, 6),
                    ends=("10.0.0.1 7",), host="10.0.0.2", arenas=(m.ArenaRef(rank=1, pid=70, fd=12, identity=b"id"),)),
    ),
    m.GatherPart(tag="choose", payload=b"mine"),
    m.Gathered(tag="choose", parts=(b"mine", b"yours"), missing=""),
    m.Goodbye(),
    m.Farewell(),
    m.Register(card=CARD),
    m.SwitchOrder(order=7, on=1, off=16),
    m.Switched(order=7, mask=15, why=""),
    m.Led(by="MindIO"),
    m.Consult(
        step=4, saved=m.Saved(recovery=0, plan=4, path="/ckpts/step=4.ckpt", nbytes=10, first_byte_ns=11, part=b"part")
    ),
    m.Consulted(step=4, aux={0: b"a"}, parts={1: b"part"}),
    m.Ended(ending="saved", step=4, path="/ckpts/step=4.ckpt", reason=""),
    m.Noted(text="random augmentation in workers is not repeated"),
    m.Resize(incarnation=1, step=4, members=(0, 2)),
    m.ResizeNoted(incarnation=1, why="ranks [2] are not there"),
    m.Operator(protocol=1, version="1.2.3", nonce=NONCE, mac=MAC),
    m.AskRanks(),
    m.Ranks(
        job="job", directory="/ckpts", attempt=2, world_size=4, state="running", started_s=1_700_000_000,
        rows=(
            RankRow(rank=0, state="awaited"),
            RankRow(rank=1, state="dead", why="SIGKILL", card=CARD, step=3, phase="data", marks=15, heard_s=0.25),
        ),
        incarnation=2, replaced=(1,),
    ),
    m.AskSwitch(ranks=(0, 3), on=1, off=16, wait=5.0),
    m.Keeper(protocol=1, version="1.2.3", nonce=NONCE, mac=MAC, host="boot:1"),
    m.Keep(rank=3, pid=77, buffer_fd=9, arena_fd=11, arena_id=b"id", buddy=True),
    m.AskKept(rank=3),
    m.AskLeft(),
    m.Left(step=7, durable=4, arena=m.ArenaRef(rank=1, pid=70, fd=12, identity=b"id")),
    m.DropLeft(),
    m.Kept(rank=3, steps=(4, 5), states=(b"rng", b"next"), arena=(4, 3), arena_pid=70, arena_fd=12),
    m.Forks(attempt=2, cannot="there is no warm process"),
    m.Agreed(attempt=2, ending="saved"),
    m.RefusedToStart(attempt=2),
    m.JobOver(code=86, why="stopped: no new step"),
    m.Completed(attempt=2),
    m.Exited(attempt=2, incarnation=1, rank=3, how="killed by SIGKILL"),
    m.Listens(port=4711),
    m.Pair(pair=2, address="10.0.0.2:4711", owners=(2, 3)),
    m.Copied(pair=2, rank=3, steps=(10, 5), pid=70, fd=13, identity=b"id"),
    m.Remarked(text="too little memory"),
    m.Sender(protocol=1, version="1.2.3", nonce=NONCE, mac=MAC, pair=2),
    m.Offers(owners=(2, 3), sizes=(4096, 8192), identities=(b"one", b"two")),
    m.Sends(rank=3, step=10, length=4000, digest=NONCE[:16]),
    m.Took(why="full", full=True),
    m.SwitchDone(results=(SwitchResult(rank=0, mask=15), SwitchResult(rank=3, why="no answer within 5 s"))),
)  # fmt: skip
BOUNDS = st.integers(-(2**63), 2**63 - 1)
DECODERS: tuple[Callable[[bytes], m.Message], ...] = (
    m.from_rank,
    m.from_controller,
    m.from_operator,
    m.from_keeper,
    m.from_sender,
    m.greeting,
)
SPOKEN_BY: tuple[tuple[UnionType, Callable[[bytes], m.Message]], ...] = (
    (m.FromRank, m.from_rank),
    (m.FromController, m.from_controller),
    (m.FromOperator, m.from_operator),
    (m.FromKeeper, m.from_keeper),
    (m.FromSender, m.from_sender),
)


def kinds(union: UnionType) -> set[type]:
    """The members of a union of messages."""
    return set(get_args(union))


def decoder_of(message: m.Message) -> Callable[[bytes], m.Message]:
    """The decoder of the side that hears it."""
    [found] = [decode for union, decode in SPOKEN_BY if type(message) in kinds(union)]
    return found


def body(message: m.Message) -> bytes:
    """The frame without its header, which is checked."""
    whole = m.frame(message)
    assert m.body_size(whole[: m.HEADER], m.MAX_FRAME) == len(whole) - m.HEADER
    return whole[m.HEADER :]


def test_there_is_an_example_of_every_message() -> None:
    everything = [kind for union, _ in SPOKEN_BY for kind in kinds(union)]
    assert sorted(kind.__name__ for kind in everything) == sorted(type(message).__name__ for message in ONE_OF_EACH)
    assert kinds(m.Greeting) == {m.Hello, m.Operator, m.Keeper}


def test_the_wire_is_frozen() -> None:
    """A change of these bytes needs another PROTOCOL, and a golden file of its own."""
    golden = json.loads(GOLDEN.read_text())
    assert golden["protocol"] == m.PROTOCOL
    assert {type(message).__name__: m.frame(message).hex() for message in ONE_OF_EACH} == golden["frames"]


def strategy(kind: type[m.Message]) -> st.SearchStrategy[Any]:
    """Messages of one kind, with values of every field that the wire can carry."""
    ints = {f.name: BOUNDS for f in msgspec.structs.fields(kind) if f.type is int}
    faults = st.builds(Fault, step=BOUNDS, rank=BOUNDS, seen_ns=BOUNDS, cause=st.text())
    cards = st.builds(WorkerCard, rank=BOUNDS, pid=BOUNDS, started_ns=BOUNDS)
    rows = st.builds(RankRow, rank=BOUNDS, step=st.none() | BOUNDS, marks=st.none() | BOUNDS, card=st.none() | cards)
    results = st.builds(SwitchResult, rank=BOUNDS, mask=st.none() | BOUNDS)
    ranks = st.lists(BOUNDS).map(tuple)
    again = st.builds(Again, incarnation=BOUNDS, step=BOUNDS, source=BOUNDS, takers=ranks, lost=ranks, port=BOUNDS)
    more: dict[str, Any] = {
        "together": st.lists(ranks).map(tuple),
        "replicas": st.binary() if kind is m.Hello else st.lists(st.lists(BOUNDS).map(tuple)).map(tuple),
        "aux": st.dictionaries(BOUNDS, st.binary()) if kind in (m.Save, m.Consulted) else st.binary(),
        "parts": st.dictionaries(BOUNDS, st.binary())
        if kind in (m.Commit, m.Consulted)
        else st.lists(st.binary()).map(tuple),
        "fault": faults,
        "faults": st.lists(faults, max_size=3).map(tuple),
        "ranks": st.none() | ranks,
        "steps": ranks,
        "owners": ranks,
        "sizes": ranks,
        "identities": st.lists(st.binary()).map(tuple),
        "ends": st.lists(st.text()).map(tuple),
        "states": st.lists(st.binary()).map(tuple),
        "wait": st.floats(0, 1e9),
        "again": st.none() | again,
        "card": cards,
        "rows": st.lists(rows, max_size=3).map(tuple),
        "results": st.lists(results, max_size=3).map(tuple),
        "hang_timeout": st.floats(0, 1e9),
        "save_timeout": st.floats(0, 1e9),
        "finish_timeout": st.floats(0, 1e9),
    }
    names = set(kind.__struct_fields__)
    return st.builds(kind, **ints, **{name: values for name, values in more.items() if name in names})


@given(st.sampled_from([type(message) for message in ONE_OF_EACH]).flatmap(strategy))
def test_round_trip(message: m.Message) -> None:
    assert decoder_of(message)(body(message)) == message


@given(st.sampled_from(ONE_OF_EACH))
def test_the_other_side_does_not_take_it(message: m.Message) -> None:
    for _, other in SPOKEN_BY:
        if other is not decoder_of(message):
            with pytest.raises(ProtocolError, match=f"not a message of protocol {m.PROTOCOL}"):
                other(body(message))


@given(st.sampled_from(ONE_OF_EACH))
def test_only_a_greeting_greets(message: m.Message) -> None:
    if type(message) in kinds(m.Greeting):
        assert m.greeting(body(message)) == message
    else:
        with pytest.raises(ProtocolError, match=f"not a message of protocol {m.PROTOCOL}"):
            m.greeting(body(message))


def decodes_or_refuses(data: bytes) -> None:
    """Neither decoder lets any other exception through."""
    for decode in DECODERS:
        with contextlib.suppress(ProtocolError):
            decode(data)


@given(st.binary(max_size=400))
def test_random_bytes(data: bytes) -> None:
    decodes_or_refuses(data)


@given(st.sampled_from(ONE_OF_EACH), st.data())
def test_truncated_and_damaged_bodies(message: m.Message, data: st.DataObject) -> None:
    whole = body(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for decode in DECODERS:
        with pytest.raises(ProtocolError):
            decode(whole[:cut])
    flipped = bytearray(whole)
    flipped[cut] ^= data.draw(st.integers(1, 255))
    decodes_or_refuses(bytes(flipped))


@pytest.mark.parametrize(
    "data",
    [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x92\xa7Refused\xa2\xff\xfe", b""],
    ids=["deep", "long array", "long bytes", "no utf-8", "empty"],
)
def test_hostile_bodies(data: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(ProtocolError):
            decode(data)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_header(size: int, limit: int) -> None:
    header = struct.pack(">I", size)
    if size <= limit:
        assert m.body_size(header, limit) == size
    else:
        with pytest.raises(ProtocolError, match=f"a frame of {size} bytes was announced"):
            m.body_size(header, limit)


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "MAX_FRAME", 10)
    with pytest.raises(ProtocolError, match=r"Refused of .* a frame has at most 10"):
        m.frame(m.Refused(reason="x" * 20))


@given(st.text(alphabet=st.characters(codec=None)))
@example("no such file: \udcff")
def test_any_exception_text_can_travel(text: str) -> None:
    """Also one that quotes a file name with bytes that are not UTF-8."""
    line = m.one_line(ValueError(text))
    assert line.startswith("ValueError: ")
    m.frame(m.SaveFailed(recovery=1, plan=1, why=line))


@given(token=st.text(max_size=20), nonce=st.binary(max_size=40), rank=st.integers(0, 9), other=st.integers(0, 9))
def test_proof(token: str, nonce: bytes, rank: int, other: int) -> None:
    mac = m.proof(token, "rank", nonce, rank)
    assert m.proven(token, "rank", nonce, rank, mac)
    assert not m.proven(token, "controller", nonce, rank, mac)
    assert not m.proven(token, "operator", nonce, rank, mac)
    assert not m.proven(token + "x", "rank", nonce, rank, mac)
    assert m.proven(token, "rank", nonce, other, mac) is (rank == other)
    assert not m.proven(token, "rank", nonce, rank, b"")


def test_a_frame_in_pieces_over_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        whole = m.frame(ONE_OF_EACH[1])
        for i in range(len(whole)):
            ours.send(whole[i : i + 1])
        got = theirs.recv(len(whole), socket.MSG_WAITALL)
    assert m.from_rank(got[m.HEADER :]) == ONE_OF_EACH[1]
