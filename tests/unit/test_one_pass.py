"""A checkpoint of one file in one pass: what a rank verifies is what it loads, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lastgasp.adapter.policy import SelectionPolicy
from lastgasp.adapter.selection import CheckpointSelector
from lastgasp.checkpoint import Candidate, DirectoryLayout, Provenance, Staged, candidates
from lastgasp.checkpoint.manifest import Fit
from lastgasp.config import GaspConfig
from lastgasp.pytorch.io import save_verified
from lastgasp.pytorch.loop.files import LAYOUT, gasp_path
from lastgasp.pytorch.loop.record import KEY, checkpoint_at
from lastgasp.pytorch.one_pass import OnePass
from lastgasp.testing import corrupt
from lastgasp.topology import Place, data_parallel

FIT = Fit(number=0, model="this model")
unpickled: list[str] = []


def noticed(name: str) -> str:
    unpickled.append(name)
    return name


class Noticed:
    """An object of the user's, whose loading runs code."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return noticed, (self.name,)


@pytest.fixture(autouse=True)
def _none_before() -> None:
    unpickled.clear()


def put(directory: Path, step: int, fit: Fit = FIT) -> Candidate:
    path = gasp_path(directory, step)
    with Staged(path, LAYOUT) as staged:
        content = {"weight": torch.arange(5000.0) + step, "extra": Noticed(path.name), KEY: {"small": {0: b"aux"}}}
        save_verified(content, staged)
        staged.publish(Provenance(format="test", step=step, kind="gasp", job="job", fit=fit))
    return next(one for one in candidates([directory], LAYOUT) if one.path == path)


def selector(directory: Path) -> tuple[SelectionPolicy, CheckpointSelector]:
    place = Place(rank=0, world_size=1, replicas=data_parallel(1), job="job")
    policy = SelectionPolicy(GaspConfig(directory=directory), place, [directory], LAYOUT, fit=FIT)
    policy.preload = OnePass(FIT)
    return policy, CheckpointSelector(policy, lambda tag, payload: [payload])


def test_the_file_is_not_read_again_once_it_was_verified(tmp_path: Path) -> None:
    put(tmp_path, 20)
    policy, one = selector(tmp_path)
    found = one.select()
    assert found is not None
    corrupt.empty(found.path)
    loaded = checkpoint_at(found.path, policy.preload)
    assert torch.equal(loaded["weight"], torch.arange(5000.0) + 20)
    assert unpickled == [found.path.name], "once"


def test_of_a_damaged_one_nothing_is_loaded_and_the_older_one_is(tmp_path: Path) -> None:
    put(tmp_path, 19)
    newer = put(tmp_path, 20)
    corrupt.flip_bit(newer.path, 9000, 3)
    policy, one = selector(tmp_path)
    found = one.select()
    assert found is not None and found.step == 19
    assert policy.preload is not None and policy.preload.take(newer.path) is None
    assert torch.equal(checkpoint_at(found.path, policy.preload)["weight"], torch.arange(5000.0) + 19)
    assert unpickled == [found.path.name], "no byte of the damaged one"
    assert [path.name for path in tmp_path.glob("*.corrupt")] == ["gasp-step=00000020.pt.corrupt"]


def test_what_is_of_another_model_is_verified_and_not_unpickled(tmp_path: Path) -> None:
    other = put(tmp_path, 20, Fit(number=0, model="another model"))
    policy, _ = selector(tmp_path)
    assert policy.verify(other).ok and not unpickled
    corrupt.flip_bit(other.path, 9000, 3)
    assert not policy.verify(other).ok and not unpickled


def test_a_sharded_one_is_loaded_by_other_means(tmp_path: Path) -> None:
    path, layout = tmp_path / "gasp-step=00000020.dcp", DirectoryLayout("*.dcp")
    with Staged(path, layout) as staged:
        staged.open(f"{path.name}/part").write(b"of a rank")
        staged.publish(Provenance(format="test", step=20, kind="gasp", job="job", fit=FIT))
    [candidate] = candidates([tmp_path], layout)
    assert OnePass(FIT).covers(candidate) == []
