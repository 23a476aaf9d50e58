"""Which ranks are replicas of one another: what their meshes join, not what only looks the same."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lastgasp.errors import ConfigError
from lastgasp.pytorch import TorchState
from lastgasp.pytorch.loop.outside import require_same
from lastgasp.pytorch.sharded import detect


def _groups(monkeypatch: pytest.MonkeyPatch, *ranks: tuple[str, str, set[int] | None]) -> Any:
    """Of ranks with these names, parts, and ranks that their meshes join with them."""
    held = [detect._Held(n.encode(), p.encode(), None if j is None else frozenset(j)) for n, p, j in ranks]

    def gather(found: list[Any], own: Any) -> None:
        found[:] = held

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return detect.replica_groups({"model": nn.Linear(1, 1)}, len(held))


def test_ranks_along_a_replicated_dimension_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("n", "a", {0, 2}), ("n", "b", {1, 3}), ("n", "a", {0, 2}), ("n", "b", {1, 3})]
    assert _groups(monkeypatch, *pairs) == ((0, 2), (1, 3))


def test_ranks_that_are_joined_by_others_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _groups(monkeypatch, ("n", "a", {0, 1}), ("n", "a", {0, 1, 2}), ("n", "a", {1, 2})) == ((0, 1, 2),)


def test_ranks_without_parts_need_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _groups(monkeypatch, ("n", "a", {0}), ("n", "", None), ("n", "", None)) == ((0,), (1, 2))


def test_what_looks_the_same_on_meshes_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of a pipeline, each sharded: one would be saved for both."""
    stages = [("n", "a", {0}), ("n", "b", {1}), ("n", "a", {2}), ("n", "b", {3})]
    with pytest.raises(ConfigError, match="ranks 0 and 2 hold parts of the same names on meshes that nothing joins"):
        _groups(monkeypatch, *stages)


def test_ranks_of_different_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ranks 0 and 1 hold different parameters.*Stages of a pipeline cannot be"):
        _groups(monkeypatch, ("n", "a", {0}), ("m", "b", {1}))


def _stage(name: str, width: int = 2) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(2, width)})


@pytest.mark.parametrize(
    ("other", "refused"), [(_stage("first"), False), (_stage("second"), True), (_stage("first", 3), True)]
)
def test_whole_models_of_different_parameters_are_refused(other: nn.Module, refused: bool) -> None:
    """`replicated=True` says that the loop keeps them equal, which it cannot."""
    digests: list[bytes] = []
    for model in (_stage("first"), other):
        require_same(TorchState(model, replicated=True), lambda tag, own: digests.append(own) or [own])  # type: ignore[func-returns-value]
    state: Any = SimpleNamespace(ddp=None, sharded=False, container=_stage("first"))
    if refused:
        with pytest.raises(ConfigError, match="ranks 0 and 1 hold different parameters"):
            require_same(state, lambda tag, own: digests)
    else:
        require_same(state, lambda tag, own: digests)


def test_the_advice_for_unwrapped_models_does_not_lead_pipelines_astray() -> None:
    advice = "replicated=True) if your loop itself keeps all ranks equal. Stages of a pipeline cannot be saved."
    with pytest.raises(ConfigError, match=re.escape(advice)):
        TorchState(_stage("first")).require_supported(2)


def test_ddp_over_some_of_the_ranks_makes_no_replicas_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside tensor or pipeline parallelism: other groups hold other models."""
    group = object()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda asked: 2 if asked is group else 0)
    state = TorchState(_stage("first"))
    state.ddp = SimpleNamespace(process_group=group)  # type: ignore[assignment]
    state.require_supported(2)
    with pytest.raises(ConfigError, match=r"'ModuleDict over 2 ranks' is not allowed: .* over all 4 ranks of this job"):
        state.require_supported(4)
