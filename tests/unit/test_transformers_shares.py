"""Checkpoints of a job of Hugging Face's Trainer with missing ranks, and the settings that allow for it."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import msgspec
import numpy as np
import torch

from lastgasp.adapter import torch as shared
from lastgasp.adapter.torch import rng
from lastgasp_transformers.losses import OfSeat, Own, found_in
from lastgasp_transformers.seats import _after_seeds, _seeds_drawn
from lastgasp_transformers.shares import SHARES, by_seat, filled


def seeded(seed: int) -> bytes:
    """The random state behind that seed."""
    for one in (random.seed, np.random.seed, torch.manual_seed):
        one(seed)
    return rng.RngRecorder().snapshot()


def position(digest: bytes) -> shared.PrefetchedPosition:
    """Of a shard with such a first batch."""
    start = rng_start(digest)
    return shared.PrefetchedPosition(start, b"ahead " + digest)


def rng_start(digest: bytes) -> Any:
    """Of a pass."""
    from lastgasp.pytorch.position.samplers import SamplerStart

    return SamplerStart(digest=digest)


def recorded(own: Own, now: int) -> bytes:
    """What a rank with that random state records."""
    recorder = shared.AuxRecorder()
    seeded(now)
    recorder.extra = msgspec.msgpack.encode(own)
    recorder.capture(1, True)
    found = recorder.read(1)
    recorder.close()
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def _random_state_stays() -> Any:
    before = rng.RngRecorder().snapshot()
    yield
    rng.restore(rng.decode(before))


def test_a_checkpoint_of_fewer_ranks_is_read_as_that_of_all() -> None:
    """Random states are each seat's own; losses count as they do in the mean over all ranks."""
    others = {0: OfSeat(seeded(10), position(b"0"))}
    small = {
        0: recorded(Own(6.0, 8.0, position(b"1"), 1, others), now=11),
        1: recorded(Own(5.0, 3.0, position(b"2"), 2), now=12),
    }
    record = {"world_size": 2, SHARES: [[0, 1], [2]], "small": small, "values": {0: b"a", 1: b"b"}, "step": 4}
    found = by_seat(record, ("values",))
    assert (found["world_size"], found["step"], found["values"]) == (3, 4, {0: b"a", 1: b"a", 2: b"b"})
    assert SHARES not in found
    for seat, data in found["small"].items():
        assert shared.random_of(data) == seeded(10 + seat)
        own = found_in(shared.extra_of(data))
        assert (own.data, own.others) == (position(str(seat).encode()), {})
    rows = [found_in(shared.extra_of(data)) for data in found["small"].values()]
    assert sum(one.loss for one in rows) / 3 == pytest.approx(11 / 2)
    assert sum(one.flos for one in rows) == 11
    assert by_seat(found, ("values",)) is found


def test_what_was_lost_goes_on_as_that_of_another_rank() -> None:
    """Its batches are others: they are not compared with those of that rank."""
    small = {1: recorded(Own(2.0, 1.0, position(b"1"), -1), now=11)}
    record = {"world_size": 3, "small": small}
    assert "ranks 0, 2 lost" in filled(record)
    assert sorted(small) == [0, 1, 2]
    own = found_in(shared.extra_of(small[2]))
    assert own.data is not None and (own.data.start.digest, own.data.ahead) == (b"", b"ahead 1")
    assert shared.random_of(small[2]) == seeded(11)
    assert filled(record) == ""


def test_seeds_of_loaders_that_were_drawn_are_found_again() -> None:
    recorder, before = rng.RngRecorder(), seeded(3)
    for _ in range(3):
        torch.empty((), dtype=torch.int64).random_()
    now = recorder.snapshot()
    assert _seeds_drawn(recorder, before, now) == 3
    assert _after_seeds(recorder, before, 3) == now
    torch.rand(1)
    assert _seeds_drawn(recorder, before, recorder.snapshot()) == 0
