"""Hugging Face's Trainer with fewer ranks, in one process: whose batches a rank does, and what cannot go on so."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import _functional_collectives as functional
from torch.distributed import all_reduce, get_rank
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from lastgasp import adapter
from lastgasp.adapter import torch as shared
from lastgasp.adapter.torch import rng
from lastgasp.errors import ControlError, UsageError
from lastgasp.gasp.joining import JOINS
from lastgasp.topology import data_parallel
from lastgasp_transformers.exchanges import Exchanges
from lastgasp_transformers.fewer import _data, _training
from lastgasp_transformers.newcomer import stand_alone
from lastgasp_transformers.numbers import number_as
from lastgasp_transformers.script_alone import comes_to_training
from lastgasp_transformers.seats import Parts, Seats
from support.train_transformers import Stream, Tokens, model

RANKS = 4


class Numbers(Dataset[dict[str, Any]]):
    """Eleven samples."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"number": torch.tensor(number)}


@pytest.fixture(autouse=True)
def _numbers_stay() -> Iterator[None]:
    before = number_as(0, 1)
    yield
    number_as(*before)


def trainer(folder: Path, data: Any, kind: type[Trainer] = Trainer, **more: Any) -> Trainer:
    """Of one step, or one epoch."""
    given = {"per_device_train_batch_size": 2, "use_cpu": True, "report_to": [], "remove_unused_columns": False}
    return kind(model(), TrainingArguments(str(folder), **(given | more)), train_dataset=data)


def seats_of(one: Trainer, rank: int, size: int) -> Seats:
    """Of a rank of so many that are left."""
    place = adapter.Place(rank=rank, world_size=size, replicas=data_parallel(size))
    session: Any = SimpleNamespace(note=lambda text: None, place=place)
    seats = Seats(one, place, RANKS, shared.PrefetchedData(rng.RngRecorder()), session)
    seats.install(lambda owner, name, around: adapter.replace_attribute(
        owner, name, lambda original: lambda *args, **options: around(original, *args, **options)
    ) if owner is one else None)  # fmt: skip
    for seat in seats.mine[1:]:
        seat.random = seats._random.snapshot()
    return seats


@pytest.mark.usefixtures("restored_environ")
def test_a_process_for_a_missing_rank_has_a_stand_in_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is taken in."""
    make = dist.init_process_group
    stand_alone()
    assert dist.init_process_group is make
    for name, value in ((JOINS, "0 a b"), ("RANK", "2"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    stand_alone()
    dist.init_process_group("gloo")
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (2, 4, "fake")
        dist.barrier()
        with pytest.raises(ControlError, match="all_reduce was called before the training"):
            dist.all_reduce(torch.zeros(1))
    finally:
        dist.destroy_process_group()
        comes_to_training()
    assert dist.init_process_group is make


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_has_the_batches_of_its_seats(size: int, tmp_path: Path) -> None:
    """As accelerate gives them to the ranks of the complete job, its filling at the end included."""
    expected = []
    for rank in range(RANKS):
        one = trainer(tmp_path, Numbers(), data_seed=3)
        number_as(rank, RANKS)
        expected.append([batch["number"].tolist() for batch in one.get_train_dataloader()])
    found: dict[int, list[list[int]]] = {}
    for rank in range(size):
        one = trainer(tmp_path, Numbers(), data_seed=3)
        number_as(rank, size)
        seats = seats_of(one, rank, size)
        loader = one.get_train_dataloader()
        assert len(loader) == len(expected[0])
        for parts in loader:
            for seat, batch in zip(seats.mine, parts, strict=True):
                found.setdefault(seat.number, []).append(batch["number"].tolist())
    assert [found[rank] for rank in range(RANKS)] == expected


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # DDP is in a cycle, and holds the group
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_micro_step_is_that_of_all_its_seats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its number and its random state; what is exchanged within it is refused."""
    one = trainer(tmp_path, Numbers())
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    number_as(0, 2)
    seen, total_losses = [], list[Any]()

    def training_step(net: Any, inputs: Any, items: Any = None) -> torch.Tensor:
        seen.append((inputs, items, one.args.process_index, one.args.world_size, float(torch.rand(1))))
        number = (dist.get_rank(), dist.get_world_size())  # a loss is often multiplied by that
        whole: Any = dist.group.WORLD
        assert number == (get_rank(), whole.size()) == seen[-1][2:4]
        assert number == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        with ThreadPoolExecutor(1) as others:
            assert others.submit(get_rank).result() == 0
        if inputs == "exchanges":
            seats._calls("all_reduce")
        if inputs != "alone":
            seats.weighed(torch.tensor(2.0), total_losses.append)
        return torch.tensor(2.0)

    one.training_step = training_step
    seats, net = seats_of(one, 0, 2), nn.Linear(1, 1)
    torch.manual_seed(1)
    seats.mine[1].random = seats._random.snapshot()
    first, second = float(torch.rand(1)), float(torch.rand(1))
    torch.manual_seed(1)
    total = one.training_step(net, Parts(["a", "b"]), 7)
    assert float(total) == 2 * 2.0 * 2 / 4
    assert total_losses == [total]
    assert seen == [("a", 7, 0, 4, first), ("b", 7, 1, 4, first)]
    assert (one.args.process_index, one.args.world_size, float(torch.rand(1))) == (0, 2, second)
    seats._calls("all_reduce")
    with pytest.raises(UsageError, match="all_reduce was called within training_step"):
        one.training_step(net, Parts(["exchanges", "b"]))
    with pytest.raises(UsageError, match=r"no backward pass by accelerator\.backward"):
        one.training_step(net, Parts(["alone", "b"]))
    assert (one.args.process_index, one.args.world_size, get_rank(), dist.get_world_size()) == (0, 2, 0, 1)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "2")


def test_a_loss_of_an_evaluation_counts_as_with_all_ranks(tmp_path: Path) -> None:
    """Trainer multiplies it by their number, also of models that do not divide by the tokens of all ranks."""
    one = trainer(tmp_path, Numbers())
    number_as(0, 2)
    one.compute_loss = lambda: one.args.world_size
    one._get_num_items_in_batch = lambda samples, device: torch.tensor(6)
    seats_of(one, 0, 2)
    assert (one.compute_loss(), one.args.world_size) == (RANKS, 2)
    assert float(one._get_num_items_in_batch([{}], "cpu")) == 6 * RANKS / 2


@pytest.mark.usefixtures("alone")
def test_whatever_a_micro_batch_exchanges_is_seen() -> None:
    """By functional collectives, by names that were imported before, in a backward pass; not what DDP does."""
    net, inputs, seen = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.rand(4, 2), list[str]()
    wrapped, exchanges = DistributedDataParallel(net), Exchanges()
    adapter.replace_attribute(wrapped, "_pre_forward", lambda original: partial(exchanges.by_ddp, original))

    def micro_batch(what: Callable[[Any], Any], sync: bool = True) -> list[str]:
        seen.clear()
        exchanges.found = lambda: seen.append("found")

        def step() -> None:
            loss = what(wrapped(inputs).sum())
            (partial(exchanges.by_ddp, loss.backward) if sync else loss.backward)()

        with contextlib.nullcontext() if sync else wrapped.no_sync():
            exchanges.micro_batch(step)
        return [*seen]

    def in_backward(loss: Any) -> Any:
        loss.register_hook(lambda grad: functional.all_reduce(grad, "sum", dist.group.WORLD))
        return loss

    for _ in range(3):  # DDP lays out its buckets anew
        assert micro_batch(lambda loss: loss) == []
    assert micro_batch(lambda loss: loss, sync=False) == []
    assert micro_batch(lambda loss: functional.all_reduce(loss, "sum", dist.group.WORLD) + loss) == ["found"]
    assert micro_batch(lambda loss: (all_reduce(loss.detach()), loss)[1]) == ["found"]
    assert micro_batch(in_backward, sync=False) == ["found"]
    all_reduce(inputs)
    assert micro_batch(lambda loss: loss) == []


class Own(Trainer):  # type: ignore[misc,unused-ignore]
    """Gets its batches itself."""

    def get_batch_samples(self, *args: Any) -> Any:
        """As ever."""
        return super().get_batch_samples(*args)


@pytest.mark.parametrize(
    ("data", "settings", "why"),
    [
        (Numbers(), {}, ""),
        (Numbers(), {"train_sampling_strategy": "sequential"}, ""),
        (Stream(8), {"max_steps": 1}, "map-style"),
        (Tokens(8, augment=True), {}, "random generators of its own"),
        (Tokens(8), {"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        (Numbers(), {"accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler"),
        (Numbers(), {"accelerator_config": {"even_batches": False}}, "even_batches"),
        (Numbers(), {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 4}, "split_batches"),
        (Numbers(), {"accelerator_config": {"dispatch_batches": True}}, "map-style"),
        (Numbers(), {"ignore_data_skip": True}, "ignore_data_skip"),
    ],
)
def test_which_data_others_can_read(data: Any, settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    one = trainer(tmp_path, data, **settings)
    number_as(1, RANKS)
    loader = one.get_train_dataloader()
    followed = shared.PrefetchedData(rng.RngRecorder())
    followed.follow(getattr(loader, "base_dataloader", None))
    found = _data(one, loader, followed)
    assert (why in found) if why else found == ""


@pytest.mark.usefixtures("alone")
def test_which_trainings_others_can_do(tmp_path: Path) -> None:
    replicated: Any = SimpleNamespace(per_rank_buffers=lambda size: False)
    own_buffers: Any = SimpleNamespace(per_rank_buffers=lambda size: True)

    def why(one: Trainer, state: Any = replicated) -> str:
        number_as(1, RANKS)
        one.model_wrapped = DistributedDataParallel(one.model)
        return _training(one, state)

    assert _training(trainer(tmp_path, Numbers()), replicated) == "it has one rank"
    assert why(trainer(tmp_path, Numbers())) == ""
    assert "get_batch_samples" in why(trainer(tmp_path, Numbers(), Own))
    assert "save_on_each_node" in why(trainer(tmp_path, Numbers(), save_on_each_node=True))
    assert "lomo" in why(trainer(tmp_path, Numbers(), optim="lomo"))
    one = trainer(tmp_path, Numbers())
    number_as(1, RANKS)
    assert "torch_compile" in _training(one, replicated)
    one.model.register_buffer("mean", torch.zeros(1))
    assert "ddp_broadcast_buffers" in why(one, own_buffers)
    one.model.add_module("synced", nn.SyncBatchNorm(4))  # which DDP refuses on CPUs
    assert "SyncBatchNorm" in _training(one, replicated)
