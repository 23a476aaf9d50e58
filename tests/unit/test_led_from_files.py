"""What a training that begins again with files does by another leader's orders, without processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lastgasp.backends.ascend.mindio import handlers as module
from lastgasp.backends.ascend.mindio.handlers import Handlers
from lastgasp.backends.ascend.mindio.limits import ACTION
from lastgasp.backends.ascend.mindio.parking import Parking
from lastgasp.backends.ascend.mindio.strategies import Strategies
from lastgasp.checkpoint import SingleFile
from lastgasp.config import GaspConfig
from lastgasp.errors import CheckpointError, ControlError, NotSaveable
from lastgasp.gasp import messages as m
from lastgasp.gasp.again import Again
from lastgasp.gasp.going_on import Fewer
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.pytorch import from_files
from lastgasp.pytorch.from_files import NOT_FEWER, EnteredFromFiles, Files, FromDisk, LedFromFiles
from lastgasp.pytorch.loop import again_here, led
from lastgasp.topology import Place, data_parallel

GROUPS = ((0, 2), (1, 3))
AGAIN = Again(incarnation=1, step=8, source=0, takers=(), lost=(), port=0)


def files(directory: Path) -> Files:
    """One file a step."""
    return Files(lambda step: directory / f"gasp-{step}.pt", SingleFile(".pt"))


class Life:
    """Stands for an `AdapterRun`, of rank 1 on step 8."""

    def __init__(self) -> None:
        self.place, self.alike, self.stays = Place(rank=1, world_size=2, replicas=data_parallel(2)), True, False
        self.bound: list[Any] = []
        self.joined: list[Place] = []
        self.failures: list[BaseException] = []
        self.before_again: Any = None
        self.source = SimpleNamespace(in_place=None, not_in_place="", no_recover="")
        status = RankStatus()
        status.step = 8
        backend = SimpleNamespace(backend="ascend")
        self.session = SimpleNamespace(status=status, contact=None, backend=backend, gather=lambda tag, own: [own, own])
        self.failed = self.failures.append

    def bind(self, training: Any) -> None:
        """Noted."""
        self.bound.append(training.source)

    def joins_again(self, place: Place) -> None:
        """Noted; nothing is bound later."""
        assert self.bound
        self.place = place
        self.joined.append(place)


def offered(
    life: Life, tmp_path: Path, recovery: Any = "auto", why: str = "", fewer: Fewer = NOT_FEWER
) -> EnteredFromFiles:
    """A training that began with step 5."""
    entered, run = EnteredFromFiles(why), life
    entered.begins_with(5)
    given: Any = run
    entered.offer(given, recovery, True, files(tmp_path), fewer=fewer)
    return entered


def test_what_is_on_disk_is_there_for_a_dump_and_nothing_else_is(tmp_path: Path) -> None:
    source = FromDisk(1, 8, files(tmp_path))
    with pytest.raises(NotSaveable, match=r"gasp-8\.pt"):
        source.save(8, {}, "")
    (tmp_path / "gasp-8.pt").touch()
    (SingleFile(".pt").manifest_path(tmp_path / "gasp-8.pt")).touch()
    assert source.save(8, {}, "").path == str(tmp_path / "gasp-8.pt")
    with pytest.raises(NotSaveable, match="no step 9"):
        source.save(9, {}, "")


@pytest.mark.parametrize(
    ("recovery", "why", "refused"),
    [("auto", "", ""), ("retry", "", ""), ("replace", "", "recovery=replace"), ("restart", "", "recovery=restart"),
     ("auto", "no such thing", "no such thing")],
)  # fmt: skip
def test_only_what_is_wanted_is_offered(recovery: str, why: str, refused: str, tmp_path: Path) -> None:
    life = Life()
    offered(life, tmp_path, recovery, why)
    assert life.source.not_in_place == (f"rank 0: {refused}" if refused else "")
    assert isinstance(life.source.in_place, LedFromFiles) != bool(refused) and life.stays != bool(refused)
    assert life.source.no_recover


def test_it_lets_go_only_when_all_have_agreed_where_they_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life()
    entered = offered(life, tmp_path)
    orders: Any = life.source.in_place
    assert orders.clean(False) == 0
    orders.rollback(8)
    assert life.bound == []  # a dump may still be ordered, of the training's own state

    def lost(*_: object) -> tuple[str, int]:
        raise ControlError("rank 0 is gone")

    monkeypatch.setattr(led, "_new_store", lost)
    with pytest.raises(ControlError):
        orders.keep(AGAIN)
    [source] = life.bound
    assert isinstance(source, FromDisk) and life.session.status.durable == 8 and entered.life is None
    monkeypatch.setattr(led, "_new_store", lambda *_: ("here", 5))
    orders.keep(AGAIN)
    assert life.joined == [] and entered.life is life and life.session.status.paused > 0
    assert orders.clean(False) == 1  # a second fault


def test_it_joins_by_its_new_number_with_what_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of two, which is alone from now on."""
    life = Life()
    life.place = Place(rank=1, world_size=3, replicas=data_parallel(3))
    offered(life, tmp_path, fewer=Fewer(may=True, parts=8))
    orders: Any = life.source.in_place
    life.session.agree = lambda said, seconds: ""
    assert orders.no_fewer == ""
    orders.resize(3, 8, (1, 2), False)
    assert life.bound == []
    monkeypatch.setattr(led, "_new_store", lambda *_: ("here", 5))
    again = msgspec.structs.replace(AGAIN, incarnation=3, members=(1, 2))
    orders.keep(again)
    [place] = life.joined
    assert (place.rank, place.world_size, place.incarnation, life.bound[0].rank) == (0, 2, 3, 0)
    assert orders._entered._again.environment["RANK"] == "0" and orders._entered._again.from_files


@pytest.mark.parametrize(
    ("fewer", "why"), [(NOT_FEWER, "knows no training with fewer"), (Fewer(may=True, parts=9), "shared evenly by 2")]
)
def test_what_cannot_go_on_with_fewer_refuses(fewer: Fewer, why: str, tmp_path: Path) -> None:
    life = Life()
    offered(life, tmp_path, fewer=fewer)
    with pytest.raises(NotSaveable, match=why):
        life.source.in_place.resize(3, 8, (0, 1), False)


def test_who_is_left_alone_goes_on_being_led(tmp_path: Path) -> None:
    """All others are missing, and may come back."""
    life: Any = Life()
    life.place = Place(rank=0, world_size=1, replicas=data_parallel(1))
    assert offered(life, tmp_path).life is None and life.source.in_place is None
    entered = EnteredFromFiles()
    entered.led(AGAIN, life)
    entered.begins_with(8)
    entered.offer(life, "auto", True, files(tmp_path))
    assert life.source.in_place is not None


def test_a_fault_before_a_new_step_is_complete_is_not_answered_again(tmp_path: Path) -> None:
    life = Life()
    offered(life, tmp_path)
    life.session.status.step = 5
    assert life.source.in_place.clean(False) == 1
    with pytest.raises(NotSaveable, match="no step was completed"):
        life.source.in_place.rollback(5)


def test_all_begin_with_the_step_that_was_agreed_on(tmp_path: Path) -> None:
    life: Any = Life()
    entered = EnteredFromFiles()
    entered.led(AGAIN, life)
    with pytest.raises(CheckpointError, match="step 8, and 6 was loaded"):
        entered.begins_with(6)
    entered.led(AGAIN, life)
    entered.begins_with(8)
    entered.begins_with(6)  # it was asked for once


def test_who_leads_hears_of_what_fails_before_there_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life()
    given: Any = life
    entered = EnteredFromFiles()
    for name in AGAIN.environment:
        monkeypatch.setenv(name, "")
    entered.failed(RuntimeError("nobody leads"))
    monkeypatch.setattr(from_files, "drop_groups", lambda wrapped: None)
    entered.led(AGAIN, given)

    def reset() -> None:
        raise ValueError("cannot be dropped")

    with pytest.raises(ValueError, match="cannot be dropped"):
        entered.goes_on(RuntimeError("a link"), reset)
    [failure] = life.failures
    assert isinstance(failure, ValueError)


# -- who writes --------------------------------------------------------------------------------------


class Rank:
    """Handlers of one of four ranks with two shards; `kept` is what the controller has of others."""

    def __init__(self, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: dict[int, bytes]) -> None:
        monkeypatch.setenv(ACTION, "30")
        monkeypatch.setattr(module, "MARGIN", 29.7)
        self.status, self.kept, self.calls = RankStatus(), kept, list[Any]()
        self.status.step = self.status.begun = 8
        api: Any = None
        self.parking = Parking(api, rank, self.status, True, 60.0)
        this: Any = self
        self.rank = rank
        place = Place(rank=rank, world_size=4, replicas=GROUPS)
        self.handlers = Handlers(
            GaspConfig.resolve(tmp_path), place, this, this.status, this, Strategies(True, True, False, {}),
            over=lambda ended: None, leave=lambda: None, parking=self.parking,
        )  # fmt: skip
        self.in_place = SimpleNamespace(
            **dict.fromkeys(("stop", "clean", "rebuild", "repair", "synchronize"), lambda *_: None), from_files=True,
            rollback=lambda step: self.calls.append("rollback"),
        )  # fmt: skip

    def consult(self, step: int, saved: m.Saved | None, seconds: float) -> m.Consulted:
        """What the controller keeps."""
        if saved is not None:
            self.kept[self.rank] = saved.part
        return m.Consulted(step=step, aux={}, parts=dict(self.kept))

    def save(self, step: int, aux: Any, reason: str) -> Any:
        """Noted."""
        self.calls.append("save")
        return SimpleNamespace(path="p", nbytes=1, first_byte_ns=1, part=b"own")

    def publish(self, result: Any, parts: Any) -> str:
        """Noted."""
        self.calls.append(sorted(parts))
        return ""


@pytest.mark.parametrize(
    ("rank", "pairs", "kept", "calls"),
    [
        (0, [], {1: b""}, ["save", [0, 1], "rollback"]),
        (1, [], {}, ["save", "rollback"]),
        (2, [], {}, ["rollback"]),
        (0, [(2, 0)], {}, ["rollback"]),
        (2, [(2, 0)], {1: b""}, ["save", [1, 2], "rollback"]),
        (0, [(0, 2)], {3: b""}, ["save", [0, 3], "rollback"]),
        (0, [], {1: b"", 3: b""}, ["save", [0, 3], "rollback"]),
    ],
    ids=["first", "other shard", "replica", "takes", "stands for it", "gives", "asked last"],
)
def test_one_holder_writes_each_shard_and_that_of_the_first_publishes(
    rank: int, pairs: list[tuple[int, int]], kept: dict[int, bytes], calls: list[Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    one = Rank(rank, tmp_path, monkeypatch, kept)
    one.parking.stopped()
    if pairs:
        one.parking.repair({"src": [src for src, _ in pairs], "dst": [dst for _, dst in pairs]})
    one.handlers.rollback(8, None, None)
    assert one.calls == calls


def test_what_others_have_not_written_in_time_ends_the_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Rank(0, tmp_path, monkeypatch, {})
    one.parking.stopped()
    with pytest.raises(NotSaveable, match="1 of 2 shards"):
        one.handlers.rollback(8, None, None)
    assert one.calls == ["save"] and one.status.durable == 0


def test_a_step_that_is_on_disk_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Rank(0, tmp_path, monkeypatch, {})
    one.parking.stopped()
    one.status.durable = 8
    one.handlers.rollback(8, None, None)
    assert one.calls == ["rollback"]


@pytest.mark.parametrize("known", [False, True])
def test_who_waits_for_a_rank_that_stays_where_it_is_is_freed(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would count as one that stays, and its process would end. Collectives of accelerators are aborted."""
    cut, life, own = list[int](), Life(), object()
    session: Any = life.session
    session.backend.backend, session.status.free = "embedded", own if known else None
    given: Any = life
    vars(life)["on_close"] = lambda undo: None
    monkeypatch.setattr(again_here, "FREED_AFTER", 0.0)
    monkeypatch.setattr(again_here, "cut_connections", lambda pids, ends, port: cut.append(port))
    EnteredFromFiles().offer(given, "auto")
    if known:
        assert session.status.free is own
        return
    session.status.outcome = SimpleNamespace(again=AGAIN)
    session.status.free()()
    assert cut == [AGAIN.port]
