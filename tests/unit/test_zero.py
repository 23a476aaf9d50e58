"""`lastgasp.pytorch.zero`: which ZeroRedundancyOptimizer is taken, and what of it a rank holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lastgasp.errors import ConfigError
from lastgasp.pytorch import TorchState
from lastgasp.pytorch.sharded.names import names_of, optimizer_leaves
from lastgasp.pytorch.sharded.shards import Shards
from lastgasp.pytorch.unsaved import UnsavedOptimizers
from lastgasp.pytorch.zero import inside, is_zero, unsupported


class ZeroRedundancyOptimizer(torch.optim.AdamW):
    """Has what is asked of torch's; this rank updates the first layer."""

    def __init__(self, model: nn.Sequential, *, overlap: bool = False) -> None:
        super().__init__(model.parameters())
        self.optim = torch.optim.AdamW(model[0].parameters())
        self._overlap_with_ddp, self.process_group, self.world_size = overlap, "all", 2

    def consolidate_state_dict(self) -> None:
        """A collective."""
        raise AssertionError("called")

    def state_dict(self) -> Any:
        """What torch raises where it was not gathered."""
        raise RuntimeError("not consolidated")


class Derived(ZeroRedundancyOptimizer):
    """A user's."""


@pytest.fixture(autouse=True)
def _group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"all": [0, 1], "turned": [1, 0], "one": [1]}
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: groups[group])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_which_are_taken() -> None:
    model = _model()
    found, plain = Derived(model), torch.optim.AdamW(model.parameters())
    assert is_zero(found) and not is_zero(plain)
    assert inside(found) is found.optim and inside(plain) is plain
    assert unsupported(found) is None
    for group in ("turned", "one"):
        found.process_group = group
        assert "process group" in (unsupported(found) or [""])[0]
    assert "overlap_with_ddp" in (unsupported(ZeroRedundancyOptimizer(model, overlap=True)) or [""])[0]


def test_a_state_with_one() -> None:
    """Each rank is alone with its part; the model must be the same on all, as with any other optimizer."""
    model = _model()
    state = TorchState(model, ZeroRedundancyOptimizer(model), replicated=True)
    assert state.sharded and state.partitioned and state.groups(2) == ((0,), (1,)) and state.per_rank_buffers(2)
    for broken, text in (
        (TorchState(model, ZeroRedundancyOptimizer(model)), "DistributedDataParallel"),
        (TorchState(model, ZeroRedundancyOptimizer(model, overlap=True), replicated=True), "overlap_with_ddp"),
    ):
        with pytest.raises(ConfigError, match=text):
            broken.require_supported(2)
    gathers: Any = torch.optim.SGD(model.parameters())
    gathers.consolidate_state_dict = print
    with pytest.raises(ConfigError, match="that each rank holds completely"):
        TorchState(model, gathers, replicated=True).require_supported(2)


def test_what_a_rank_writes() -> None:
    """Its part of the optimizer's state, values that are no tensors among it, and none of another one's."""
    model = _model()
    zero = ZeroRedundancyOptimizer(model)
    shards = Shards({"model": model}, {"optimizer": zero}, 0, 2)
    model(torch.ones(2)).sum().backward()
    zero.optim.step()
    bias: Any = model[0].bias
    zero.optim.state[bias]["seen"] = 3
    assert shards.look() and not shards.look()
    table = shards.found.table
    own = {entry.name for entry in table.entries if not entry.plain}
    moments = {f"optimizer.state.0.{n}.{k}" for n in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")}
    assert own == moments and table.alone == (("optimizer", "state", "0.bias", "seen"),)
    assert {entry.name for entry in table.entries if entry.plain} == {f"model.{name}" for name in model.state_dict()}
    assert [group.params for group in table.groups] == [("0.weight", "0.bias", "1.weight", "1.bias")]
    leaves, _ = optimizer_leaves(zero, ("optimizer",), names_of(model, "")[2])
    assert all(leaf.alone for leaf in leaves)


def test_the_optimizer_inside_is_saved_and_not_noted() -> None:
    zero = ZeroRedundancyOptimizer(_model())
    zero.calls = 0  # type: ignore[attr-defined]
    unsaved = UnsavedOptimizers([zero], sharded=True)
    zero.calls += 1  # type: ignore[attr-defined]
    for group in zero.optim.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    zero.optim.step()
    assert "ZeroRedundancyOptimizer.calls. " in unsaved.note()


def test_an_elastic_loader_is_refused() -> None:
    model = _model()
    loader = SimpleNamespace(used={}, model=model, known=False)
    with pytest.raises(ConfigError, match="ZeroRedundancyOptimizer"):
        TorchState(model, ZeroRedundancyOptimizer(model), elastic=loader).require_supported(2)
