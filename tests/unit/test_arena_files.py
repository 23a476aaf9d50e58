"""What is written from an arena counts only if that was verified, whenever this is known."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastgasp.arena import Arena
from lastgasp.gasp import messages as m
from lastgasp.gasp.arena_files import BadArena, read, save
from lastgasp.ports import Wanted

STEP, SIZE = 3, 5000
_open: list[Arena] = []
"""Arenas of the test that runs."""


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Nothing is left of them."""
    yield
    while _open:
        _open.pop().close()


class Source:
    """Of one arena; `behaviour` is what `save_shards` does with what is wanted."""

    buffer_fd = -1

    def __init__(self, behaviour: Any) -> None:
        self.arena = Arena(rank=1)
        _open.append(self.arena)
        self.arena.reserve(SIZE)
        self.arena.copy(STEP, [bytes(SIZE)])
        self.behaviour, self.discarded = behaviour, list[Any]()

    def save_shards(self, step: int, aux: Any, reason: str, wanted: Wanted) -> Any:
        assert (step, wanted.own, len(wanted.arenas[1])) == (STEP, False, SIZE)
        return self.behaviour(wanted)

    def discard(self, result: Any) -> None:
        self.discarded.append(result)

    def capture(self, step: int) -> bytes:
        return b""

    save = publish = capture


def saved(source: Source) -> Any:
    """What comes of an order to write that arena, by another descriptor than its own."""
    reference = m.ArenaRef(rank=1, pid=os.getpid(), fd=source.arena.fd, identity=source.arena.identity)
    order: Any = SimpleNamespace(own=False, arenas=(reference,), common=1, step=STEP, aux={}, reason="")
    return save(source, order)  # type: ignore[arg-type]


@pytest.fixture(params=[False, True], ids=["sound", "damaged"])
def damaged(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def spoilt(source: Source, damaged: bool) -> Source:
    if damaged:
        source.arena._payloads[0][SIZE // 2] = 1
        source.arena._payloads[1][SIZE // 2] = 1
    return source


def raises(wanted: Wanted) -> None:
    raise KeyError("of a table that makes no sense, or of something else")


def verifies(wanted: Wanted) -> str:
    wanted.verify()
    return "verified"


@pytest.mark.parametrize("behaviour", [lambda wanted: "unverified", verifies])
def test_what_was_written_of_a_damaged_one_is_discarded(behaviour: Any, damaged: bool) -> None:
    source = spoilt(Source(behaviour), damaged)
    if not damaged:
        assert saved(source) in ("unverified", "verified") and source.discarded == []
        return
    with pytest.raises(BadArena, match=r"the arena of rank 1: .* does not match its digest"):
        saved(source)
    assert source.discarded == ([] if behaviour is verifies else ["unverified"])


def test_an_error_is_the_arenas_where_that_is_damaged(damaged: bool) -> None:
    with pytest.raises(BadArena if damaged else KeyError) as caught:
        saved(spoilt(Source(raises), damaged))
    assert not damaged or caught.value.rank == 1  # type: ignore[attr-defined]


def test_one_that_is_gone_is_named() -> None:
    with pytest.raises(BadArena, match="rank 7"), read(m.ArenaRef(rank=7, pid=os.getpid(), fd=-1), STEP):
        raise AssertionError("not reached")


class Trap:
    """Fires when it is unpickled."""

    fired = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Trap, "fired", True)


@pytest.fixture
def payload() -> bytes:
    torch = pytest.importorskip("torch")
    from lastgasp.pytorch.sharded import Shards

    net = torch.nn.Linear(2, 2)
    shards = Shards({"model": net}, {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}, 0, 1)
    return b"".join(shards.payload([[{"lr": Trap()}]]))


@pytest.mark.parametrize("sound", [True, False])
def test_nothing_is_unpickled_that_was_not_verified(payload: bytes, sound: bool, tmp_path: Path) -> None:
    from lastgasp.checkpoint import Staged
    from lastgasp.pytorch.sharded import LAYOUT, write_arena

    def verify() -> None:
        assert not Trap.fired
        if not sound:
            raise BadArena(0, "damaged")

    Trap.fired = False
    staged = Staged(tmp_path / "gasp-step=00000003.dcp", LAYOUT)
    try:
        write_arena(staged, payload, plain=True, groups=[[{"lr": 0.1}]], verify=verify)
    except BadArena:
        pass
    finally:
        staged.discard()
    assert Trap.fired == sound
    assert pickle.loads(pickle.dumps(Trap())) is None  # that is how it fires
