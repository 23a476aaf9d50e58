"""Checkpoints that verify and that Megatron cannot load: the next one is, and they are set aside with their reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lastgasp.checkpoint import Staged
from lastgasp.errors import CheckpointError, NoGoodCheckpoint, NothingLoads
from lastgasp.ports import Gather
from lastgasp.topology import Place, data_parallel
from lastgasp_megatron import reload
from lastgasp_megatron.args import options_of
from lastgasp_megatron.exits import NotLoaded, around_load, is_about_content
from lastgasp_megatron.merge import layout_of, merged
from lastgasp_megatron.own_part import load_own_part, without_gloo
from lastgasp_megatron.reload import MegatronSelector
from lastgasp_megatron.shards import copied, held_of
from lastgasp_megatron.tracker import NAME, read_tracker
from support.checkpoint_kit import FOLDERS, as_ranks, provenance
from support.megatron.slices import optimizers

Load = Callable[[int, int], None]
"""Given rank and step: what Megatron does."""


def put(directory: Path, step: int, *folders: str) -> None:
    """An iteration with a manifest: of format torch with these folders, of torch_dist without any."""
    path = directory / f"iter_{step:07d}"
    files = [f"{folder}/model_optim_rng.pt" for folder in folders] or ["__0_0.distcp", ".metadata", "metadata.json"]
    with Staged(path, FOLDERS) as staged:
        for name in files:
            staged.open(f"{path.name}/{name}").write(f"{name} of {step}".encode())
        staged.publish(provenance(step))
    (directory / NAME).write_text(str(step))


def start(directory: Path, load: Load = lambda rank, step: None, **given: Any) -> int | None:
    """Two ranks choose and load; returns what was loaded."""

    def body(rank: int, gather: Gather) -> int | None:
        values = {"load": str(directory), "save": str(directory), "ckpt_step": None} | given
        args = SimpleNamespace(**values)
        place = Place(rank=rank, world_size=2, replicas=data_parallel(2), job="job")
        selector = MegatronSelector(args, options_of(args), place, gather)
        selector.steer()

        def load_checkpoint() -> int | None:
            step = args.ckpt_step
            if step is not None:
                # Megatron reads the distributed optimizer's file at what the tracker says, whatever ckpt_step is.
                tracker = selector.tracker(str(directory / NAME))
                assert Path(tracker).read_text() == str(step) and os.path.isfile(tracker)
                assert tracker.startswith("/proc/"), "no disk, which may be full"
                assert selector.tracker(str(directory / "other" / NAME)) == str(directory / "other" / NAME)
                load(rank, step)
            return None if step is None else int(step)

        loaded: int | None = selector.load(lambda: around_load(load_checkpoint, (), {}))
        selector.done()
        assert args.ckpt_step == values["ckpt_step"]
        assert selector.tracker(str(directory / NAME)) == str(directory / NAME)
        return loaded

    first, second = as_ranks(2, body)
    assert first == second
    return first


def refuse(*steps: int, error: type[Exception] = RuntimeError) -> Load:
    def load(rank: int, step: int) -> None:
        if step in steps:
            raise error(f"size mismatch in {step}")

    return load


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("iter_*") if path.is_dir()}


TP1, TP2, TP2PP2 = ("mp_rank_00",), ("mp_rank_00", "mp_rank_01"), ("mp_rank_00_000", "mp_rank_01_001")


@pytest.mark.parametrize(
    ("folders", "sizes", "said"),
    [
        (TP2, {}, "holds TP2 PP1 in format torch, and the job asks for TP1 PP1"),
        (TP1, {"tensor_model_parallel_size": 2}, "holds TP1 PP1 in format torch, and the job asks for TP2 PP1"),
        (TP2PP2, {"tensor_model_parallel_size": 2}, "holds TP2 and PP2 or EP2"),
        (TP2PP2, {"expert_model_parallel_size": 2}, "holds TP2 and PP2 or EP2"),
        (TP1, {"expert_model_parallel_size": 2}, "holds TP1 PP1 in format torch, and the job asks for TP1 PP1 EP2"),
    ],
)
def test_another_cut_is_reported_before_anything_is_loaded(
    folders: tuple[str, ...], sizes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, 4)
    put(tmp_path, 6, *folders)
    assert start(tmp_path, **sizes, lastgasp_keep="3") == 4
    assert names(tmp_path) == {"iter_0000004", "iter_0000006.unfit"}
    assert said in (tmp_path / "iter_0000006.unfit.reason.json").read_text() and said in caplog.text
    assert "moved to iter_0000006.unfit; step 4 was resumed from, and 2 steps are trained again" in caplog.text
    assert read_tracker(tmp_path).iteration == 4


@pytest.mark.parametrize("other", ["pipeline_model_parallel_size", "expert_model_parallel_size"])
def test_the_same_cut_is_loaded(other: str, tmp_path: Path) -> None:
    put(tmp_path, 4)
    put(tmp_path, 6, *TP2PP2)
    sizes: dict[str, Any] = {"tensor_model_parallel_size": 2, other: 2}
    assert start(tmp_path, **sizes) == 6


def test_where_every_cut_is_another_nothing_is_moved(tmp_path: Path) -> None:
    put(tmp_path, 4, *TP2)
    put(tmp_path, 6, *TP2)
    with pytest.raises(NoGoodCheckpoint, match="holds TP2 PP1"):
        start(tmp_path)
    assert names(tmp_path) == {"iter_0000004", "iter_0000006"}


def test_what_all_ranks_refuse_is_set_aside_and_the_next_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, 2, *TP1)
    put(tmp_path, 4)
    put(tmp_path, 6, *TP1)
    assert start(tmp_path, refuse(4, 6)) == 2
    assert names(tmp_path) == {"iter_0000002", "iter_0000004.unfit", "iter_0000006.unfit"}
    said = "ranks 0-1: does not load: RuntimeError: size mismatch in 6"
    assert said in (tmp_path / "iter_0000006.unfit.reason.json").read_text()
    assert "step 2 was resumed from, and 4 steps are trained again" in caplog.text


def test_a_model_that_was_just_changed_costs_no_checkpoint(tmp_path: Path) -> None:
    """Nor does the tracker name an older one: what is newer would count as rolled back in the corrected job."""
    put(tmp_path, 4)
    put(tmp_path, 6, *TP1)
    with pytest.raises(NothingLoads, match="size mismatch in 6"):
        start(tmp_path, refuse(4, 6))
    assert names(tmp_path) == {"iter_0000004", "iter_0000006"}
    assert read_tracker(tmp_path).iteration == 6
    assert start(tmp_path) == 6


def test_one_rank_alone_says_nothing_about_a_checkpoint(tmp_path: Path) -> None:
    put(tmp_path, 4)
    put(tmp_path, 6, *TP1)

    def load(rank: int, step: int) -> None:
        if rank == 1:
            raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises((CheckpointError, RuntimeError)):
        start(tmp_path, load)
    assert names(tmp_path) == {"iter_0000004", "iter_0000006"}


@pytest.mark.parametrize("error", [FileNotFoundError, MemoryError])
def test_the_machine_says_nothing_about_a_checkpoint(error: type[Exception], tmp_path: Path) -> None:
    put(tmp_path, 4)
    put(tmp_path, 6, *TP1)
    with pytest.raises(error):
        start(tmp_path, refuse(6, error=error))
    assert names(tmp_path) == {"iter_0000004", "iter_0000006"}


def test_one_that_was_asked_for_by_name_is_loaded_or_nothing_is(tmp_path: Path) -> None:
    put(tmp_path, 4)
    put(tmp_path, 6, *TP1)
    assert start(tmp_path, ckpt_step=4) == 4
    assert start(tmp_path, lastgasp_resume=str(tmp_path / "iter_0000004")) == 4
    assert read_tracker(tmp_path).iteration == 6
    with pytest.raises(RuntimeError, match="size mismatch in 6"):
        start(tmp_path, refuse(6), ckpt_step=6)
    assert names(tmp_path) == {"iter_0000004", "iter_0000006"}


@pytest.mark.parametrize("text", [None, "", "release"])
def test_one_that_was_asked_for_is_loaded_whatever_the_tracker_says(text: str | None, tmp_path: Path) -> None:
    put(tmp_path, 4)
    put(tmp_path, 6, *TP1)
    (tmp_path / NAME).unlink() if text is None else (tmp_path / NAME).write_text(text)
    assert start(tmp_path, ckpt_step=4) == 4
    assert start(tmp_path) == 6, "it was asked for once"


def test_a_tracker_that_cannot_be_written_costs_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 4)
    (tmp_path / NAME).write_text("")
    monkeypatch.setattr(reload, "write_tracker", raiser(OSError(30, "Read-only file system")))
    assert start(tmp_path) == 4


def raiser(error: Exception) -> Callable[..., None]:
    def act(*_: Any) -> None:
        raise error

    return act


def test_nothing_there_is_megatrons_own_business(tmp_path: Path) -> None:
    assert start(tmp_path) is None


@pytest.mark.parametrize(("origin", "expected"), [(RuntimeError("size mismatch"), True), (OSError(5, "flaky"), False)])
def test_what_megatron_gave_up_over_counts(origin: Exception, expected: bool) -> None:
    def load() -> None:
        try:
            raise origin
        except Exception:
            raise SystemExit  # noqa: B904

    with pytest.raises(NotLoaded) as caught:
        around_load(load, (), {})
    assert is_about_content(caught.value) is expected


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
              RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")],
)  # fmt: skip
def test_memory_and_peers_say_nothing_about_a_checkpoint(error: Exception) -> None:
    assert not is_about_content(error)
    assert is_about_content(RuntimeError("size mismatch for weight"))


# -- the distributed optimizer without Gloo groups ---------------------------------------------------------------------


class Group:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _setter(optimizer: Any) -> Callable[[Any, Any], None]:
    """As DistributedOptimizer._set_main_param_and_optimizer_states."""

    def put_in(param: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, index = optimizer.model_param_group_index_map[param]
        main = optimizer.optimizer.param_groups[group]["params"][index]
        for key, value in ({"param": main} | optimizer.optimizer.state[main]).items():
            value.copy_(tensors[key])

    return put_in


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_each_rank_reads_its_own_part(parts: int, tmp_path: Path) -> None:
    _, _, found = optimizers(parts)
    path = tmp_path / "distrib_optim.pt"
    expected = [copied(held_of(one, parts)) for one in found]
    torch.save(merged(layout_of(found[0]), expected), path)
    for part, one in enumerate(found):
        for main, state in one.optimizer.state.items():
            for tensor in (main, *state.values()):
                tensor.zero_()
        one._set_main_param_and_optimizer_states = _setter(one)
        one.data_parallel_group, one.data_parallel_group_gloo = Group(part, parts), None
        one.load_parameter_state = pytest.fail
        undo = without_gloo(one)
        one.load_parameter_state(str(path), update_legacy_format=False)
        undo()
        assert one.load_parameter_state is pytest.fail
        (kinds,), (wanted,) = copied(held_of(one, parts)), expected[part]
        for kind, buckets in kinds.items():
            for bucket, other in zip(buckets, wanted[kind], strict=True):
                assert all(torch.equal(bucket[key], other[key]) for key in bucket)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    _, _, (one,) = optimizers(1)
    state = merged(layout_of(one), [copied(held_of(one, 1))])
    torch.save(state, tmp_path / "distrib_optim.pt")
    one.buffers[0].numel_unpadded = 99
    with pytest.raises(CheckpointError, match="holds 15 elements of buffer 0, and the model has 99"):
        load_own_part(one, str(tmp_path / "distrib_optim.pt"), 0, 1)


def test_with_gloo_groups_megatron_loads() -> None:
    _, _, (one,) = optimizers(1)
    one.data_parallel_group_gloo, one.load_parameter_state = Group(0, 1), pytest.fail
    without_gloo(one)
    assert one.load_parameter_state is pytest.fail
    without_gloo(SimpleNamespace(is_stub_optimizer=True))
    without_gloo(None)
