"""`lastgasp.pytorch.faulty`: a drill's fault happens in compiled models as well, and torch notices nothing of it."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lastgasp.pytorch.faulty import hook_model, hook_optimizer
from lastgasp.testing.faults import FaultKit, FaultSpec, InjectedFault

Compile = Callable[[nn.Sequential], nn.Module]


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both."""
        return self.b(self.a(x).tanh())  # type: ignore[no-any-return]


def in_place(net: nn.Sequential) -> nn.Module:
    """As torchtitan compiles its blocks."""
    for block in net:
        block.compile(backend="eager", fullgraph=True)
    return net


def wrapped(net: nn.Sequential) -> nn.Module:
    """Each block by `torch.compile`."""
    for index, block in enumerate(net):
        compiled: Any = torch.compile(block, backend="eager", fullgraph=True)
        net[index] = compiled
    return net


def as_one(net: nn.Sequential) -> nn.Module:
    """The whole model."""
    compiled: Any = torch.compile(net, backend="eager", fullgraph=True)
    return cast("nn.Module", compiled)


@pytest.mark.parametrize("compiled", [in_place, wrapped, as_one])
def test_faults_happen_around_the_graph_of_a_compiled_module(compiled: Compile) -> None:
    model, fired = compiled(nn.Sequential(Block(), Block(), Block())), list[str]()
    with ExitStack() as undo:
        hook_model(undo, model, fired.append)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        model.eval()
        model(torch.ones(1, 2))
        assert fired == ["forward", "backward"] * 2
    model.train()
    model(torch.ones(1, 2)).sum().backward()
    assert fired == ["forward", "backward"] * 2


def test_what_is_compiled_later_is_left_alone() -> None:
    net, fired = nn.Sequential(Block(), Block(), Block()), list[str]()
    with ExitStack() as undo:
        hook_model(undo, net, fired.append)
        in_place(net)
        net(torch.ones(1, 2)).sum().backward()
    assert fired == ["backward"]


def test_a_scheduler_finds_the_step_that_it_has_wrapped() -> None:
    """It warns where `step` was replaced after it was made."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1)
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("error")
        hook_optimizer(undo, optimizer, FaultKit(()), lambda: 0)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule.step()


class Bare(torch.optim.SGD):
    """Its `step` takes no closure, as Muon's as published."""

    def step(self) -> None:  # type: ignore[override]
        """As torch's, whose own one has hooks, too."""
        super().step()


@pytest.mark.parametrize("phase", ["before_update", "update", "after_update"])
def test_faults_happen_in_an_optimizer_whose_step_takes_no_closure(phase: str) -> None:
    net = nn.Linear(2, 2, bias=False)
    net.extra = nn.Parameter(torch.zeros(1))
    optimizer, kit = Bare(net.parameters(), lr=0.1), FaultKit((FaultSpec(kind="exception", phase=phase, step=0),))
    with ExitStack() as undo:
        hook_optimizer(undo, optimizer, kit, lambda: 0)
        before = [p.detach().clone() for p in net.parameters()]
        (net(torch.ones(1, 2)).sum() + net.extra).sum().backward()
        with pytest.raises(InjectedFault):
            optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
        assert moved == {"before_update": [False] * 2, "update": [True, False], "after_update": [True] * 2}[phase]
        optimizer.step()
    assert [bool(hooks) for hooks in (optimizer._optimizer_step_pre_hooks,)] == [False]


def test_a_module_in_a_drill_can_be_saved_as_a_whole() -> None:
    """As the hyperparameters of a LightningModule that is given its network: the checkpoint has them."""
    net, fired = nn.Sequential(Block(), Block()), list[str]()
    with ExitStack() as undo:
        hook_model(undo, net, fired.append)
        copy = pickle.loads(pickle.dumps(net))
    copy(torch.ones(1, 2))
    assert fired == []
