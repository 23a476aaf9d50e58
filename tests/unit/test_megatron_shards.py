"""Slices of a distributed optimizer become complete again, with any buckets and padding; the exchange between ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lastgasp.errors import ConfigError, DeadlineExceeded, NotSaveable
from lastgasp.topology import Place
from lastgasp_megatron.merge import layout_of, merged, weights_of_masters, weights_of_merged
from lastgasp_megatron.settings import refuse
from lastgasp_megatron.shards import Exchange, copied, held_of
from lastgasp_megatron.topology import Shard, advice
from support.megatron.slices import KIND, SIZES, optimizers


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_slices_become_complete_tensors(parts: int) -> None:
    params, weights, found = optimizers(parts)
    state = merged(layout_of(found[0]), [copied(held_of(one, parts)) for one in found])
    world = state[0][KIND]
    assert state["buckets_coalesced"] is True and world["numel_unpadded"] == 15
    for key, expected in (("param", weights), ("exp_avg", weights * 2), ("exp_avg_sq", weights.square() * 3)):
        assert torch.equal(world[key], expected), key
    values = weights_of_merged(found[0])
    for param, value in zip(params, torch.split(weights.to(torch.bfloat16), list(SIZES)), strict=True):
        assert torch.equal(values[id(param)].value([state]), value)


def test_an_optimizer_that_made_no_update_has_moments_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda size, **options: torch.full((size,), 7.0, **options))
    _, weights, (one,) = optimizers(1)
    one.optimizer.state.clear()
    world = merged(layout_of(one), [copied(held_of(one, 1))])[0][KIND]
    assert torch.equal(world["param"], weights)
    assert not world["exp_avg"].any() and not world["exp_avg_sq"].any()


def test_an_optimizer_that_lacks_a_part_of_its_state_is_not_saved() -> None:
    _, _, (one,) = optimizers(1)
    next(iter(one.optimizer.state.values())).pop("exp_avg")
    with pytest.raises(NotSaveable, match="no 'exp_avg' of one parameter"):
        held_of(one, 1)


def test_an_optimizer_that_holds_more_than_the_file_has_place_for_is_not_saved() -> None:
    _, _, (one,) = optimizers(1)
    main, state = next(iter(one.optimizer.state.items()))
    state |= {"step": torch.tensor(3), "ema": main.clone()}
    with pytest.raises(NotSaveable, match="holds 'ema'"):
        held_of(one, 1)


def test_padding_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda size, **options: torch.full((size,), 7.0, **options))
    _, weights, found = optimizers(2)
    buckets = [bucket for one in found for bucket in copied(held_of(one, 2))[0][KIND]]
    rows = torch.cat([buckets[0]["param"], buckets[2]["param"], buckets[1]["param"], buckets[3]["param"]])
    assert torch.equal(rows, torch.cat([weights[:11], torch.zeros(1), weights[11:]]))


def test_weights_come_from_their_fp32_copy() -> None:
    model, main = torch.zeros(3, dtype=torch.bfloat16), torch.tensor([1.001, -2.3, 0.1])
    optimizer = SimpleNamespace(float16_groups=[[model]], fp32_from_float16_groups=[[main]])
    assert torch.equal(weights_of_masters(optimizer)[id(model)].value([]), main.to(torch.bfloat16))
    assert weights_of_masters(SimpleNamespace()) == {}, "fp32 weights are the truth themselves"


SHARD = Shard(tensor=0, pipeline=0, part=0, parts=2, data_ranks=(0, 1))
FIRST, SECOND = SHARD.cuts[0].names


def exchange(directory: Path, rank: int = 0, attempt: int = 0, seconds: float = 20.0) -> Exchange:
    place = Place(rank=rank, world_size=2, replicas=((0,), (1,)), attempt=attempt, job="a/b c")
    return Exchange(directory, place, seconds)


def test_a_slice_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    mine, other = exchange(tmp_path), exchange(tmp_path, rank=1)
    found = [{KIND: [{"param": torch.arange(3.0)}]}]
    thread = threading.Timer(0.05, other.put, (7, SECOND, found))
    thread.start()
    taken = mine.take(7, SECOND, lambda: False)
    thread.join()
    assert torch.equal(taken[0][KIND][0]["param"], torch.arange(3.0))
    mine.drop(7)
    assert other.folder(7).is_dir(), "it is another rank's"
    other.drop(7)
    assert list(tmp_path.iterdir()) == []


def test_the_wait_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"part-1\.pt of step 7"):
        exchange(tmp_path, seconds=0.01).take(7, SECOND, lambda: False)
    with pytest.raises(NotSaveable, match="called off"):
        exchange(tmp_path).take(7, SECOND, lambda: True)


def test_what_older_attempts_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    found = [{KIND: [{"param": torch.zeros(1)}]}]
    for attempt in (0, 1):
        exchange(tmp_path, attempt=attempt).put(7, FIRST, found)
    (tmp_path / "iter_0000007").mkdir()
    exchange(tmp_path, attempt=1).clear_older()
    assert sorted(p.name for p in tmp_path.iterdir()) == [exchange(tmp_path, attempt=1).folder(7).name, "iter_0000007"]


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("use_torch_fsdp2", True, "distributed"),
        ("moe_use_upcycling", True, "--moe-use-upcycling=True.*Convert the checkpoint"),
        ("reuse_fp32_param", True, "--reuse-fp32-param=True.*no fp32 weights"),
        ("swap_optimizer", True, "--swap-optimizer"),
        ("virtual_optimizer", ["all"], "--virtual-optimizer"),
        ("quant_states", True, "--quant-states"),
        ("lora_target_modules", ["linear_qkv"], "--lora-target-modules"),
        ("ttp_enabled", True, "--ttp-enabled=True.*not both"),
        ("inprocess_restart", True, "--inprocess-restart=True.*not both"),
    ],
)
def test_what_cannot_be_saved_is_refused(option: str, value: object, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        refuse(SimpleNamespace(**{option: value}))


def test_advice_names_the_flag_and_its_cost() -> None:
    args = SimpleNamespace(use_distributed_optimizer=True, data_parallel_size=4)
    text = advice(((0,), (1,), (2,), (3,)), args, 12 << 20)
    assert (
        "4 of 4 shards" in text and "--num-distributed-optimizer-instances 2" in text and "12 MiB more per rank" in text
    )
    assert "arena" not in text and "--lastgasp-arena is off" in advice(((0,), (1,)), args, 1, off=True)
    assert advice(((0, 2), (1, 3)), args, 12 << 20) == ""
    assert "A second one of the data parallel ranks" in advice(((0,), (1,)), SimpleNamespace(data_parallel_size=1), 1)
    args.data_parallel_size = 3
    assert "An even number of data parallel ranks" in advice(((0,), (1,), (2,)), args, 1)
    args.data_parallel_size, args.expert_model_parallel_size = 2, 2
    assert "An even number of ranks with the same experts" in advice(((0,), (1,)), args, 1)
