"""Module buffers of data parallel ranks that Megatron's file has no place for come back, or it is said that none do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

import torch

from lastgasp_megatron.beside import Beside
from lastgasp_megatron.image import decoded
from lastgasp_megatron.own_buffers import KEY, OwnBuffers, limit, record_of, taken, with_own
from support.megatron.images import image, payload

RANKS = 3
MEAN, COUNT = "norm.running_mean", "norm.num_batches_tracked"


class Router(torch.nn.Module):
    """Its bias is the same on all ranks, by Megatron's own doing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(4))


def model() -> Any:
    """With statistics, a constant, and what no rank has for itself."""
    net = torch.nn.Sequential()
    net.norm = torch.nn.BatchNorm1d(4)
    net.sync, net.router = torch.nn.SyncBatchNorm(4), Router()
    net.register_buffer("mask", torch.ones(4))
    net.register_buffer("table", torch.ones(4), persistent=False)
    return net


def trained(rank: int) -> dict[str, Any]:
    """The buffers of a rank behind a step, as its image or its answer has them, and a forward pass later."""
    net = model()
    beside = Beside([net], [SimpleNamespace(optimizer=torch.optim.SGD(net.norm.parameters()))])
    net.norm(torch.full((2, 4), float(rank + 1)))
    kept = beside.take(1)
    net.norm(torch.ones(2, 4))
    return taken(kept, limit(RANKS), check=True)


def written(alive: tuple[int, ...] = (0, 1, 2), writer: int = 0) -> dict[str, Any]:
    """What the file holds besides, of ranks that have answered."""
    images = {rank: _image(rank) for rank in alive}
    found: dict[str, Any] = record_of(images[writer], {rank: with_own(one) for rank, one in images.items()})[KEY]
    return found


def _image(rank: int) -> Any:
    one = image(0, 1)
    shard = replace(one.shard, sharers=tuple(range(RANKS)))
    return decoded(payload(replace(one, rank=rank, shard=shard, own=trained(rank))))


def loaded(rank: int, record: dict[str, Any] | None, *, of: int = 0, goes_on: bool = True,
           sharers: tuple[int, ...] = (0, 1, 2)) -> tuple[Any, list[str]]:  # fmt: skip
    """A rank's model behind the load of that file, and what it has noted."""
    net, notes = model(), list[str]()
    own = OwnBuffers([net], rank, sharers)
    values = trained(of)
    net.norm.running_mean.copy_(values[MEAN])
    net.norm.num_batches_tracked.copy_(values[COUNT])
    own.restore(record, goes_on, notes.append)
    return net, notes


def test_those_of_a_step_are_taken_and_neither_constants_of_wrappers_nor_what_is_alike_by_construction() -> None:
    assert trained(0).keys() == {MEAN, "norm.running_var", COUNT, "mask"}
    assert torch.allclose(trained(2)[MEAN], torch.full((4,), 0.3)), "of a forward pass behind the step"


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_live_rank_gets_its_own_and_only_what_differs_is_in_the_file(rank: int) -> None:
    record = written()
    assert {rank: list(found) for rank, found in record["differ"].items()} == {0: [], 1: [MEAN], 2: [MEAN]}
    net, notes = loaded(rank, record)
    assert torch.equal(net.norm.running_mean, trained(rank)[MEAN]) and not notes


def test_those_of_a_killed_rank_begin_with_the_writers_which_is_said_by_name() -> None:
    record = written((1, 2), writer=1)
    net, notes = loaded(0, record, of=1)
    assert torch.equal(net.norm.running_mean, trained(1)[MEAN])
    said = f"rank 0: its module buffers ({MEAN}, {COUNT}) begin with those of rank 1"
    assert [note.startswith(said) for note in notes] == [True]
    assert loaded(1, record, of=1)[1] == [] == loaded(2, record, of=1)[1]


def test_what_is_too_large_is_not_carried_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lastgasp_megatron.own_buffers._RANK", 0)
    assert trained(1) == {}
    monkeypatch.undo()
    record = {"of": 0, "ranks": [0, 1, 2], "differ": {1: {}}, "lost": {1: [MEAN]}}
    assert [f"({MEAN}) begin with those of rank 0" in note for note in loaded(1, record)[1]] == [True]


def test_megatrons_own_checkpoint_says_it_once_and_only_to_a_job_that_goes_on() -> None:
    notes = [loaded(rank, None)[1] for rank in range(RANKS)]
    assert notes[0] == notes[1] == notes[2] and [MEAN in note for note in notes[0]] == [True]
    assert loaded(1, None, goes_on=False)[1] == []
    assert loaded(0, None, sharers=(0,))[1] == [], "it has written what it reads"


def test_other_ranks_than_before_begin_with_the_writers() -> None:
    net, notes = loaded(1, written(), sharers=(0, 1))
    assert torch.equal(net.norm.running_mean, trained(0)[MEAN])
    assert ["other ranks do than before" in note for note in notes] == [True]


def test_a_model_without_buffers_has_nothing_besides() -> None:
    assert record_of(image(0, 1), {}) == {}


def test_what_cannot_be_read_costs_those_buffers_and_not_the_step() -> None:
    states = {0: with_own(_image(0)), 1: with_own(_image(1)), 2: with_own(_image(2))[:-1]}
    record: dict[str, Any] = record_of(_image(0), states)[KEY]
    assert set(record["differ"]) == set(record["lost"]) == {0, 1}
