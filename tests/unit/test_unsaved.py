"""What modules keep beside what checkpoints hold is named once training has changed it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.optim import SGD
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, Subset

from lastgasp.pytorch import TorchState
from lastgasp.pytorch.held_gradients import HeldGradients
from lastgasp.pytorch.loop.kept_hooks import next_hook
from lastgasp.pytorch.loop.kept_objects import KeptObjects
from lastgasp.pytorch.loop.not_saved import NotSaved
from lastgasp.pytorch.unsaved import (
    LeftGradients,
    Unsaved,
    UnsavedData,
    UnsavedOptimizers,
    note_on_hooks,
)
from lastgasp.pytorch.uservalues import Root


class Keeps(nn.Module):
    """A bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.seen, self._calls, self.name = 1.0, list[float](), 0, "one"
        self.mean, self.table, self.nothing = torch.zeros(3), np.zeros(2), torch.zeros(0)
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("saved", torch.zeros(2))


class Saves(Keeps):
    """What it keeps is its extra state."""

    def get_extra_state(self) -> Any:
        """All."""
        return self.rate


CHANGES: dict[str, Any] = {
    "rate": lambda m: setattr(m, "rate", 0.5),
    "seen": lambda m: m.seen.append(1.0),
    "_calls": lambda m: setattr(m, "_calls", 1),
    "mean": lambda m: m.mean.add_(1),
    "table": lambda m: setattr(m, "table", m.table + 1),
    "passing": lambda m: m.passing.add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_named(name: str) -> None:
    module: Any = nn.ModuleDict({"model": nn.Sequential(Keeps())})
    unsaved = Unsaved(module)
    assert unsaved.note() == ""
    CHANGES[name](module["model"][0])
    assert f"beside their state: model.0.{name}. No checkpoint" in unsaved.note()


def test_what_changed_before_a_recovery_in_place_is_named_after_it() -> None:
    """Of a model that is made outside of the function; one that is made anew begins anew."""
    net, other = Keeps(), Keeps()
    state = TorchState(net)
    kept = KeptObjects(state, next_hook())
    assert NotSaved(state, kept).notes() == []
    net.rate = other.rate = 0.5
    for _ in range(2):
        [note] = NotSaved(TorchState(net), kept).notes()
        assert "rate" in note
    assert NotSaved(TorchState(other), kept).notes() == []


def test_the_state_of_a_communication_hook_is_named() -> None:
    model = nn.Linear(1, 1)
    assert note_on_hooks([None, model]) == ""
    model._comm_hooks = [(len, None)]  # type: ignore[assignment]
    assert note_on_hooks([model]) == ""
    model._comm_hooks = [(len, powerSGD_hook.PowerSGDState(None))]  # type: ignore[assignment]
    assert "DDP's communication hook (PowerSGDState) is in no checkpoint" in note_on_hooks([model])


def test_what_is_saved_or_nobodys_is_not() -> None:
    module: Any = nn.ModuleDict({"keeps": Keeps(), "saves": Saves(), "plain": nn.Linear(1, 1)})
    module["keeps"].view = module["plain"].weight.detach()[0]
    unsaved = Unsaved(module)
    module["keeps"].saved.add_(1)
    module["plain"].weight.data.add_(1)
    module["saves"].rate = 3.0
    module["plain"].rate = 3.0
    module["keeps"].eval()
    module["keeps"].late = 1.0
    assert unsaved.note() == ""
    for change in CHANGES.values():
        change(module["keeps"])
    assert "and 2 more" in unsaved.note()


def test_a_share_of_dropout_that_training_lowers_is_named() -> None:
    """It is no weight, and a process that begins anew has the script's until it is lowered again."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
    unsaved = Unsaved(module)
    assert (unsaved.settings(), unsaved.note()) == ([], "")
    module[1].p = 0.4  # type: ignore[assignment]
    assert unsaved.settings() == ["1.p"] and "beside their state: 1.p. No checkpoint" in unsaved.note()


class Counts:
    """No module."""

    def __init__(self) -> None:
        self.calls, self.known = 0, 0


def test_of_other_objects_only_what_is_asked_for_counts() -> None:
    """Those of a framework's own classes never do; non-persistent buffers of the module always."""
    module, counts, foreign = Keeps(), Counts(), nn.Linear(1, 1)
    roots = [Root("Counts", counts, frozenset({"known"})), Root("foreign", foreign)]
    unsaved = Unsaved(module, roots, "somebody's state_dict")
    counts.known, module.rate = 1, 2.0
    foreign.rate = 3.0  # type: ignore[assignment]
    assert unsaved.note() == ""
    counts.calls, module.passing = 1, torch.ones(2)
    note = unsaved.note()
    assert "what objects keep beside their state: passing, Counts.calls. No checkpoint" in note
    assert note.endswith("what somebody's state_dict returns")


def test_what_cannot_be_looked_at_is_left_alone() -> None:
    """It may be anything that somebody has made of a tensor; training begins all the same."""
    module = Keeps()
    module.mean = torch.ones(2, dtype=torch.complex64).conj()
    unsaved = Unsaved(module)
    module.mean, module.rate = module.mean * 2, 0.5
    assert "beside their state: rate. No checkpoint" in unsaved.note()


class Rows(Dataset[int]):
    """Has a weight for each row, a rate, and a cache."""

    def __init__(self) -> None:
        self.weights, self.rate, self.cache = torch.ones(4), 1.0, dict[int, int]()
        self.transform = Counts()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Passes(Sampler[int]):
    """Counts its passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(range(4))

    def __len__(self) -> int:
        return 4


class Told(Passes):
    """Is told its epoch, as a resumed run tells it."""

    def set_epoch(self, epoch: int) -> None:
        self.passes = epoch


class Endless(IterableDataset[int]):
    """Compared by what it gives."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Any:
        self.read += 1
        return iter(range(4))


def test_data_and_samplers_that_training_changes_are_named() -> None:
    rows, passes = Rows(), Passes()
    unsaved = UnsavedData()
    assert unsaved.new
    unsaved.look_at([DataLoader(Subset(rows, [0, 1]), batch_sampler=BatchSampler(passes, 2, False))])
    assert (unsaved.new, unsaved.note()) == (False, "")
    rows.cache[1] = 1
    assert unsaved.note() == ""
    rows.weights[1] = 2.0
    rows.rate, rows.transform.calls = 2.0, 1
    list(passes)
    note = unsaved.note()
    assert note.startswith("training has changed what gives its data: ")
    named = note.partition(": ")[2].partition(". No checkpoint")[0]
    assert set(named.split(", ")) == {"Rows.weights", "Rows.rate", "Counts.calls", "Passes.passes"}


@pytest.mark.parametrize("make", [int, str, lambda i: (i, i)])
def test_a_list_of_a_data_set_that_is_shuffled_in_place_is_named(make: Any) -> None:
    """Keras' `on_epoch_end`. What fills a list as a cache does is no change."""
    rows: Any = Rows()
    rows.order, rows.images = [make(i) for i in range(1000, 1009)], [None] * 9
    unsaved = UnsavedData()
    unsaved.look_at([DataLoader(rows)])
    rows.images[:] = [np.zeros(1) for _ in range(9)]
    assert unsaved.note() == ""
    rows.order.reverse()
    assert "Rows.order. No checkpoint" in unsaved.note()


class Makes(nn.Module):
    """Buffers in its first forward pass, and one that grows."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.linear, self._which = nn.Linear(1, 1), which
        self.register_buffer("filled", None)
        self.grows: torch.Tensor
        self.register_buffer("grows", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._which == "made" and not hasattr(self, "made"):
            self.register_buffer("made", x.detach())
        if self._which == "filled":
            self.filled = x.detach()
        if self._which == "grows":
            self.grows = torch.cat([self.grows, x.detach()])
        result: torch.Tensor = self.linear(x)
        return result


@pytest.mark.parametrize("which", ["none", "made", "filled", "grows"])
def test_buffers_that_forward_makes_are_named_before_a_resume_refuses_them(which: str) -> None:
    state, told = TorchState(model := Makes(which)), list[str]()
    kept = NotSaved(state, None, told.append)
    model(torch.ones(1))
    kept.step_over()
    assert [f": model.{which}. A new process" in note for note in told] == [True] * (which != "none")
    assert kept.notes() == told


def test_parameters_that_an_optimizer_gets_later_are_named_once_before_a_resume_refuses_them() -> None:
    net, told = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), list[str]()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    kept = NotSaved(TorchState(net, optimizer), None, told.append)
    kept.step_over()
    assert (told, kept.notes()) == ([], [])
    optimizer.add_param_group({"params": list(net[1].parameters())})
    for _ in range(2):
        kept.step_over()
    assert [note.startswith("parameters were added to an optimizer in the middle") for note in told] == [True]
    assert kept.notes() == told


def test_data_that_are_told_where_they_are_are_not() -> None:
    told, endless = Told(), Endless()
    unsaved = UnsavedData()
    unsaved.look_at([DataLoader(Rows(), sampler=told), DataLoader(endless), iter([1])])
    told.set_epoch(3)
    list(endless)
    assert unsaved.note() == "", "the loader's own data set is gone, too, and is not kept alive"


class Inside(torch.optim.SGD):
    """Steps by another optimizer, as SAM does."""

    def __init__(self, parameters: Any, shared: bool = False) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.base, self.calls = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9), 0
        if shared:
            self.base.state = self.state

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return self.base.step()


class Whole(Inside):
    """Saves all."""

    def state_dict(self) -> Any:
        return super().state_dict() | {"base": self.base.state_dict()}


class Layerwise(torch.optim.SGD):
    """Has one for each parameter, as layerwise GaLore does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.each = {one: torch.optim.SGD([one], lr=0.1, momentum=0.9) for one in parameters}

    def step(self, closure: Any = None) -> Any:
        for one in self.each.values():
            one.step()


class ByName(torch.optim.SGD):
    """Has tensors in a dict of its own, as AdaLomo does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self._squares = {"weight": torch.zeros(2)}

    def step(self, closure: Any = None) -> Any:
        self._squares["weight"].add_(1)


class InGroups(torch.optim.SGD):
    """Has its states in its groups, as GrokAdamW does, and a `state_dict` of its own."""

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        for one in group["params"]:
            group.setdefault("state", {}).setdefault(one, {})["momentum"] = one.grad
        return super().step(closure)

    def state_dict(self) -> Any:
        return super().state_dict()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda p: Layerwise(p), "Layerwise.each"),
        (lambda p: ByName(p), "ByName._squares"),
        (lambda p: InGroups(p), "InGroups.param_groups[0].state"),
        (lambda p: Inside(p), "Inside.base, Inside.calls"),
        (lambda p: Inside(p, shared=True), "Inside.calls"),
        (lambda p: Whole(p), ""),
        (lambda p: torch.optim.SGD(p, momentum=0.9), ""),
    ],
)
def test_what_an_optimizer_holds_beside_its_state_is_named(make: Any, named: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = make([parameter])
    unsaved = UnsavedOptimizers([optimizer])
    assert unsaved.note() == ""
    parameter.grad = torch.ones(2)
    optimizer.step()
    note = unsaved.note()
    assert note.startswith(f"optimizers hold what their state_dict lacks: {named}. ") if named else note == ""


def test_a_sharded_model_s_optimizer_is_not_asked_for_its_state_dict() -> None:
    """`load_state_dict` is not called either: what only these have is lost, and must be named."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Whole([parameter])
    unsaved = UnsavedOptimizers([optimizer], sharded=True)
    assert unsaved.note() == ""
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert unsaved.note() == (
        "optimizers hold what checkpoints lack, whatever their state_dict has: Whole.base, Whole.calls. "
        "A resumed run begins without it. Keep it in the parameter groups of those that are saved"
    )
    assert UnsavedOptimizers([], [optimizer]).note() == ""  # one in whose place others are saved


class Metric(nn.Module):
    """As those of torchmetrics are made: states that are no buffers, and a count of their updates."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults, self._update_count = {"total": torch.zeros(()), "rows": []}, 0
        self.reset()

    def reset(self) -> None:
        self.total, self.rows, self._update_count = torch.zeros(()), list[Any](), 0

    def update(self, value: float) -> None:
        self.total, self._update_count = self.total + value, self._update_count + 1


class Holds:
    """What callbacks do: modules that are in no tree, alone and in containers."""

    def __init__(self, tree: nn.Module) -> None:
        self.ema, self.teachers = nn.Linear(2, 2), [nn.Linear(300, 300)]
        self.metrics = {"train": {"mean": Metric()}}
        self.helper = Holder()
        self.frozen, self.same, self.wrapped = nn.Linear(2, 2), tree, nn.Sequential(tree)


class Holder:
    """An average in an object of its own."""

    def __init__(self) -> None:
        self.shadow = nn.BatchNorm1d(2)


class SavesShadow(Holder):
    """Somebody saves it."""

    def state_dict(self) -> Any:
        return self.shadow.state_dict()


def test_modules_outside_of_the_tree_are_named_once_training_has_changed_them() -> None:
    tree = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    holds, saves = Holds(tree), SavesShadow()
    other = Holds(tree)
    vars(other)["saves"] = saves
    unsaved = Unsaved(tree, [Root("Holds", holds), Root("Other", other)])
    with torch.no_grad():
        for parameter in tree.parameters():
            parameter.add_(1)
        tree[1].running_mean.add_(1)  # type: ignore[operator]
        saves.shadow.weight.add_(1)
    holds.metrics["train"]["mean"].update(3.0)
    holds.metrics["train"]["mean"].reset()
    assert (unsaved.note(), unsaved.modules()) == ("", [])
    changes: dict[str, Any] = {
        "ema": lambda: holds.ema.weight.data.mul_(0.5),  # torch does not count it
        "teachers": lambda: holds.teachers[0].weight.data.mul_(0.5),
        "metrics": lambda: holds.metrics["train"]["mean"].update(3.0),
        "helper": lambda: holds.helper.shadow(torch.randn(4, 2)),
    }
    for count, change in enumerate(changes.values(), 1):
        change()
        assert unsaved.modules() == [f"Holds.{name}" for name in [*changes][:count]]
    assert "beside their state: Holds.ema, Holds.teachers, Holds.metrics, Holds.helper. No checkpoint" in unsaved.note()


def test_a_large_module_is_looked_at_in_bounded_time() -> None:
    """Of each tensor a few numbers; then torch's own count of changes."""
    holds: Any = Holder()
    holds.shadow = nn.ParameterList([nn.Parameter(torch.zeros(8)) for _ in range(3000)])
    holds.big = nn.Linear(2000, 2000)
    unsaved = Unsaved(nn.Linear(1, 1), [Root("Holds", holds)])
    with torch.no_grad():
        holds.shadow[2999].add_(1)
        holds.big.weight[0, 1] = 7.0
    assert unsaved.modules() == ["Holds.shadow", "Holds.big"]


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [False, True])
@pytest.mark.parametrize("cleared", ["optimizer", "model"])
def test_gradients_that_nothing_clears_are_named(cleared: str, bucket: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].requires_grad_(False)
    optimizer = SGD(net[0].parameters(), lr=0.1)
    left = LeftGradients(net, [optimizer])
    flat = torch.zeros(9)
    for _ in range(4):
        if bucket and net[2].weight.grad is None:  # as DDP does it
            net[2].weight.grad = flat.view(3, 3).zero_()
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        left.step_over()
        gc.collect()
        (optimizer if cleared == "optimizer" else net).zero_grad()
    assert ("2.weight" in left.note()) == (cleared != "model")
    assert "0.weight" not in left.note()
    assert "1.weight" not in left.note()
    assert LeftGradients(net, [SGD(net.parameters(), lr=0.1)]).note() == ""


def trained_by_two(held: HeldGradients, net: nn.Sequential, two: list[SGD], kind: str) -> None:
    """Steps of loops with two optimizers. `seldom`: the first one's gradients are of two steps."""

    def backward(way: nn.Module) -> None:
        held.backward_begins()
        way(torch.ones(2, 3)).square().sum().backward()

    for step in range(8):
        if kind.startswith("in turn"):  # as GANs do; the second pass gives gradients to the first one's parameters, too
            for one in two:
                one.zero_grad(set_to_none=kind == "in turn")
                backward(net)
                one.step()
        elif kind == "left over":
            for one in two:
                backward(net)
                one.step()
                one.zero_grad()
        elif kind == "zeros":
            two[0].zero_grad(set_to_none=False)
            backward(net[0])
            two[0].step()
        else:
            backward(net)
            for one in two if step % 3 == 2 or kind != "seldom" else two[1:]:
                one.step()
                one.zero_grad(set_to_none=kind != "filled")
        held.step_over()
        gc.collect()


@pytest.mark.parametrize(
    ("kind", "named"),
    [("seldom", "0.weight, 0.bias"), ("left over", "0.weight, 0.bias"), ("in turn", ""), ("in turn in place", ""),
     ("zeros", ""), ("at once", ""), ("filled", "")],
)  # fmt: skip
def test_gradients_that_are_used_in_a_later_step_are_named(kind: str, named: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    two = [SGD(part.parameters(), lr=0.01) for part in net]
    held = HeldGradients(net.named_parameters(), two)
    trained_by_two(held, net, two, kind)
    assert (f": {named}. " in held.note()) == bool(named)
    assert bool(held.note()) == bool(named)
    assert len(two[0]._optimizer_step_pre_hooks) + len(two[1]._optimizer_step_pre_hooks) <= 1
    held.backward_begins()  # a fault in the backward pass ends this training
    held.remove()
    assert not two[0]._optimizer_step_pre_hooks and not two[1]._optimizer_step_pre_hooks


class Wrapped(SGD):
    """As some make it: an optimizer by type alone, which holds another one and lacks what `Optimizer` sets up."""

    def __init__(self, inner: SGD) -> None:
        self.inner, self.param_groups = inner, inner.param_groups


def test_an_optimizer_that_cannot_be_hooked_is_not_looked_at() -> None:
    net = nn.Linear(2, 1)
    held = HeldGradients(net.named_parameters(), [Wrapped(SGD(net.parameters(), lr=0.1))])
    for _ in range(3):
        held.backward_begins()
        net(torch.ones(1, 2)).sum().backward()
        held.step_over()
    assert held.note() == ""
