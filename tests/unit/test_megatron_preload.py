"""Format torch in one pass: verified while it is loaded, and handed to Megatron's own torch.load."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lastgasp.checkpoint import Candidate, Staged, candidates
from lastgasp.ports import Gather
from lastgasp.pytorch.io import save_verified
from lastgasp.testing import corrupt
from lastgasp.topology import Place, data_parallel
from lastgasp_megatron.args import options_of
from lastgasp_megatron.preload import MegatronPreload
from lastgasp_megatron.reload import MegatronSelector
from support.checkpoint_kit import FOLDERS, as_ranks, provenance


class Custom:
    """What torch does not load unless it is trusted explicitly."""


def put(directory: Path, step: int, *, extra: object = None, folder: str = "mp_rank_00") -> Candidate:
    path = directory / f"iter_{step:07d}"
    with Staged(path, FOLDERS) as staged:
        for number, name in enumerate(("model_optim_rng.pt", "distrib_optim.pt")):
            content = {"weight": torch.arange(5000.0) + step + number, "extra": extra}
            save_verified(content, staged, f"{path.name}/{folder}/{name}")
        staged.open(f"{path.name}/other.txt").write(b"of no format")
        staged.publish(provenance(step))
    (directory / "latest_checkpointed_iteration.txt").write_text(str(step))
    return next(c for c in candidates([directory], FOLDERS) if c.path == path)


def preload(rank: int = 0, optimizer: bool = True) -> MegatronPreload:
    def own(step: int) -> str:
        return f"iter_{step:07d}/mp_rank_00/model_optim_rng.pt"

    return MegatronPreload(own, optimizer=optimizer, first=rank == 0)


def model(directory: Path, step: int) -> Path:
    return directory / f"iter_{step:07d}/mp_rank_00/model_optim_rng.pt"


def optimizer(directory: Path, step: int) -> Path:
    return model(directory, step).with_name("distrib_optim.pt")


def test_what_was_verified_is_handed_out_and_the_file_not_read_again(tmp_path: Path) -> None:
    candidate, original = put(tmp_path, 20), torch.load
    one = preload()
    assert one.read(candidate) == []
    corrupt.empty(model(tmp_path, 20))
    corrupt.empty(optimizer(tmp_path, 20))
    with one.handed_out():
        first = torch.load(str(model(tmp_path, 20)), map_location="cpu")
        second = torch.load(optimizer(tmp_path, 20))
        assert torch.equal(first["weight"], torch.arange(5000.0) + 20)
        assert torch.equal(second["weight"], torch.arange(5000.0) + 21)
        with pytest.raises(EOFError):
            torch.load(model(tmp_path, 20), map_location="cpu")  # a second time it is the file's
    assert torch.load is original


@pytest.mark.parametrize(
    "call",
    [
        lambda path: torch.load(path, map_location="meta"),
        lambda path: torch.load(path, map_location="cpu", mmap=True),
        lambda path: torch.load(path.open("rb")),
        lambda path: torch.load(path, "cpu"),
    ],
)
def test_whoever_asks_for_something_else_gets_it(call: Callable[[Path], Any], tmp_path: Path) -> None:
    one = preload()
    one.read(put(tmp_path, 20))
    corrupt.empty(model(tmp_path, 20))
    with one.handed_out(), pytest.raises((EOFError, RuntimeError, ValueError)):
        call(model(tmp_path, 20))


def test_other_threads_are_not_concerned(tmp_path: Path) -> None:
    one, seen = preload(), list[BaseException]()
    one.read(put(tmp_path, 20))
    corrupt.empty(model(tmp_path, 20))

    def other() -> None:
        try:
            torch.load(model(tmp_path, 20), map_location="cpu")
        except EOFError as error:
            seen.append(error)

    with one.handed_out():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(seen) == 1


def test_nothing_of_a_damaged_file_is_handed_out(tmp_path: Path) -> None:
    candidate = put(tmp_path, 20)
    corrupt.flip_bit(model(tmp_path, 20), 9000, 3)
    one = preload()
    (damage,) = one.read(candidate)
    assert damage.proven and "content differs from its digest" in str(damage)
    with one.handed_out():
        again = torch.load(model(tmp_path, 20), map_location="cpu")
    assert not torch.equal(again["weight"], torch.arange(5000.0) + 20), "that is the file, not what was loaded"


def test_what_torch_does_not_trust_is_verified_and_left_to_megatron(tmp_path: Path) -> None:
    candidate = put(tmp_path, 20, extra=Custom())
    one = preload()
    assert one.read(candidate) == []
    with one.handed_out():
        assert isinstance(torch.load(model(tmp_path, 20), weights_only=False)["extra"], Custom)
    corrupt.flip_bit(model(tmp_path, 20), 9000, 3)
    assert [damage.proven for damage in one.read(candidate)] == [True]


def choose(directory: Path, **given: Any) -> tuple[int | None, list[MegatronPreload]]:
    """Two ranks of one model agree."""
    loads = [preload(rank) for rank in range(2)]

    def body(rank: int, gather: Gather) -> int | None:
        values = {"load": str(directory), "save": str(directory), "ckpt_step": None} | given
        args = SimpleNamespace(**values)
        place = Place(rank=rank, world_size=2, replicas=data_parallel(2), job="job")
        MegatronSelector(args, options_of(args), place, gather, loads[rank]).steer()
        return cast("int | None", args.ckpt_step)

    first, second = as_ranks(2, body)
    assert first == second
    return first, loads


def held(one: MegatronPreload) -> list[str]:
    return sorted(Path(name).name for name in one._loaded)


def test_each_rank_loads_its_own_files_of_the_one_that_all_accept(tmp_path: Path) -> None:
    put(tmp_path, 10)
    put(tmp_path, 20)
    step, loads = choose(tmp_path)
    assert step == 20
    assert [held(one) for one in loads] == [["distrib_optim.pt", "model_optim_rng.pt"], ["model_optim_rng.pt"]]


@pytest.mark.parametrize("spoiled", [model, optimizer, lambda d, s: d / f"iter_{s:07d}/other.txt"])
def test_damage_anywhere_leads_all_ranks_to_the_next(spoiled: Callable[[Path, int], Path], tmp_path: Path) -> None:
    put(tmp_path, 10)
    put(tmp_path, 20)
    corrupt.flip_bit(spoiled(tmp_path, 20), 3, 3)
    step, loads = choose(tmp_path)
    assert step == 10
    assert (tmp_path / "iter_0000020.corrupt").is_dir()
    assert {str(Path(name).parent.parent.name) for one in loads for name in one._loaded} == {"iter_0000010"}


def test_files_that_no_rank_loads_are_verified_all_the_same(tmp_path: Path) -> None:
    put(tmp_path, 10)
    put(tmp_path, 20, folder="mp_rank_01")  # asked for by name, of another cut
    corrupt.flip_bit(tmp_path / "iter_0000020/mp_rank_01/model_optim_rng.pt", 9000, 3)
    with pytest.raises(Exception, match="content differs"):
        choose(tmp_path, ckpt_step=20)
