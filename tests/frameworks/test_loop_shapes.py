"""Loops of every shape keep the promise: cut anywhere, no step is lost, and the numbers stay the same."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn
from torch.ao.quantization import PerChannelMinMaxObserver
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from frameworks.loop_rig import (
    Container,
    Counting,
    Masters,
    NewProcesses,
    Noisy,
    Parts,
    Shape,
    Stream,
    backward,
    differences,
    in_process,
    loader,
    net,
    run,
)
from lastgasp.checkpoint import candidates
from lastgasp.pytorch import Session, TorchState
from lastgasp.pytorch.loop.files import LAYOUT
from lastgasp.pytorch.loop.inexact import LATE
from lastgasp.pytorch.position import WORKERS
from support.schedule_free import Averages


class OwnNoise:
    """A collate function with a random generator of its own."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(6)

    def __call__(self, rows: list[Any]) -> Any:
        return [torch.stack(column) + float(self._random.normal()) for column in zip(*rows, strict=True)]


class OwnOrder(Sampler[int]):
    """A sampler with one, which goes on from epoch to epoch."""

    def __init__(self) -> None:
        self._random = random.Random(7)

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(range(20), 20))


def plain(s: Session, p: Parts) -> None:
    for _ in s.epochs(3):
        for batch in s.batches(p.data):
            p.train(batch)
            p.schedules[0].step()
        p.tick()
        p.evaluate()
        p.tick()


def plain_steps(s: Session, p: Parts) -> None:
    for _ in s.epochs(2):
        for batch in s.batches(p.data):
            p.train(batch)


def exchanging(s: Session, p: Parts) -> None:
    """With averaged weights in the model while it is evaluated."""
    optimizer = p.optimizers[0]
    for _ in s.epochs(3):
        optimizer.train()
        for batch in s.batches(p.data):
            p.train(batch)
        optimizer.eval()
        p.tick()
        p.evaluate()
        p.tick()


def per_epoch(s: Session, p: Parts) -> None:
    for epoch in range(s.epoch, 3):
        for group in p.optimizers[0].param_groups:
            group["lr"] = 0.05 / (1 + epoch)
        for batch in s.batches(p.data):
            p.train(batch)
        p.tick()
        p.evaluate()
        p.schedules[0].step(p.best["error"])
        p.best["seen"].append(epoch)
        p.tick()


def freezing(s: Session, p: Parts) -> None:
    """Once, in the epoch in which it is due, as scripts do it."""
    layer, norm = p.model.get_submodule("0"), p.model.get_submodule("1")
    for epoch in s.epochs(3):
        if epoch == 1:
            layer.requires_grad_(False)
            norm.eval()
        if epoch == 2:
            layer.requires_grad_(True)
        for batch in s.batches(p.data):
            p.train(batch)
        p.tick()


def accumulating(s: Session, p: Parts) -> None:
    for _ in s.epochs(4):
        for number, batch in s.enumerate(p.data):
            p.tick()
            backward(p.loss(batch))
            if number % 2 == 0:
                continue
            p.optimizers[0].step()
            p.optimizers[0].zero_grad()
        p.optimizers[0].zero_grad()
        p.tick()


def accelerated(s: Session, p: Parts) -> None:
    accelerator, optimizer, scheduler = p.prepared
    for _ in s.epochs(4):
        for batch in s.batches(p.data):
            p.tick()
            with accelerator.accumulate(p.model):
                accelerator.backward(p.loss(batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def with_fabric(s: Session, p: Parts) -> None:
    fabric, optimizer, scheduler = p.prepared
    for _ in s.epochs(3):
        for batch in s.batches(p.data):
            p.tick()
            optimizer.zero_grad()
            fabric.backward(p.loss(batch))
            fabric.clip_gradients(p.model, optimizer, max_norm=1.0)
            optimizer.step()
        scheduler.step()
        p.tick()


def contained(s: Session, p: Parts) -> None:
    [container] = p.prepared
    for _ in s.epochs(3):
        for batch in s.batches(p.data):
            p.tick()
            container.zero_grad()
            backward(p.loss(batch))
            container.step()
            p.schedules[0].step()


def breaking(s: Session, p: Parts) -> None:
    for _ in s.epochs(4):
        for number, batch in s.enumerate(p.data):
            p.train(batch)
            if number == 2:
                break
        p.evaluate()
        p.schedules[0].step()
        p.tick()


def breaking_a_wrapper(s: Session, p: Parts) -> None:
    for _ in s.epochs(4):
        for batch in through(s.batches(p.data)):
            p.train(batch)
            if s.step % 3 == 2:  # this one is the third
                break
        p.evaluate()
        p.schedules[0].step()
        p.tick()


def through(given: Iterable[Any]) -> Iterator[Any]:
    """As a progress bar does it."""
    yield from (one for one in given)


def branching(s: Session, p: Parts) -> None:
    """Gradients are zeros, not None, as before torch 2.0: optimizers go on with what a step does not use."""
    for _ in s.epochs(3):
        for number, batch in s.enumerate(p.data):
            p.tick()
            p.model.some = number % 3 == 1  # type: ignore[assignment]
            p.optimizers[0].zero_grad(set_to_none=False)
            backward(p.loss(batch))
            p.optimizers[0].step()
            p.tick()


def emptying_behind(s: Session, p: Parts) -> None:
    """None again, but behind what the session takes for the step's end."""
    while s.step < 12:
        p.tick()
        p.model.some = s.step % 3 == 0  # type: ignore[assignment]
        backward(p.loss(random_batch()))
        p.optimizers[0].step()
        s.updated()
        p.tick()
        p.optimizers[0].zero_grad()
        p.tick()


def returning(s: Session, p: Parts) -> None:
    def some() -> None:
        for batch in s.batches(p.data):
            p.train(batch)
            if s.step % 3 == 1:
                return

    for _ in s.epochs(4):
        some()
        p.evaluate()
        p.tick()


def until_enough(s: Session, p: Parts) -> None:
    while s.step < 12:
        for batch in s.batches(p.data):
            if s.step >= 12:
                break
            p.train(batch)


def nested(s: Session, p: Parts) -> None:
    for _ in s.epochs(2):
        for first in s.batches(p.data):
            weight = float(first[0].mean()) + float(torch.rand(()))
            p.model(first[0])  # changes the statistics of batch norm
            p.tick()
            for batch in s.batches(p.data2):
                p.optimizers[0].zero_grad()
                backward(p.loss(batch) * weight)
                p.optimizers[0].step()
                p.tick()
            p.optimizers[0].zero_grad()
            backward(p.loss(first))
            p.optimizers[0].step()
            p.tick()


def zipped(s: Session, p: Parts) -> None:
    for _ in s.epochs(3):
        for batch, second in zip(s.batches(p.data), s.batches(p.data2), strict=True):
            p.optimizers[0].zero_grad()
            backward(p.loss(batch) + p.loss(second))
            p.tick()
            p.optimizers[0].step()


def one_after_the_other(s: Session, p: Parts) -> None:
    for _ in s.epochs(3):
        for batch in s.batches(p.data):
            p.train(batch)
        p.tick()
        p.evaluate()
        for batch in s.batches(p.data2):
            p.train(batch)
        p.tick()


def twice(s: Session, p: Parts) -> None:
    for _ in s.epochs(2):
        for batch in s.batches(p.data):
            p.train(batch)
        p.tick()
        for batch in s.batches(p.data):
            p.train(batch)


def again_by_hand(s: Session, p: Parts) -> None:
    """Labelled and unlabelled data, as FixMatch draws them: the one that is exhausted is begun again."""
    first, second = iter(s.batches(p.data)), iter(s.batches(p.data2))
    while s.step < 17:
        try:
            batch = next(first)
        except StopIteration:
            first = iter(s.batches(p.data))
            batch = next(first)
        try:
            other = next(second)
        except StopIteration:
            second = iter(s.batches(p.data2))
            other = next(second)
        if s.step < 17:
            p.train([torch.cat(pair) for pair in zip(batch, other, strict=True)])


def endless(s: Session, data: Any) -> Iterator[Any]:
    """As scripts write it: not `itertools.cycle`, which would keep all batches."""
    while True:
        yield from s.batches(data)


def cycled(s: Session, p: Parts) -> None:
    first, second = endless(s, p.data), endless(s, p.data2)
    for _ in range(s.step, 17):
        p.train([torch.cat(pair) for pair in zip(next(first), next(second), strict=True)])


def across_epochs(s: Session, p: Parts) -> None:
    """Epochs of three steps each over data that have five."""
    batches = iter(s.batches(p.data))
    for epoch in s.epochs(5):
        for _ in range(s.step, 3 * epoch + 3):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(s.batches(p.data))
                batch = next(batches)
            p.train(batch)
        p.evaluate()
        p.tick()


def anew_in_each_epoch(s: Session, p: Parts) -> None:
    """A pass that is left unfinished, and is no part of the next epoch."""
    for epoch in s.epochs(4):
        batches = iter(s.batches(p.data))
        for _ in range(s.step, 3 * epoch + 3):
            p.train(next(batches))
        p.tick()


def anew_in_each_body(s: Session, p: Parts) -> None:
    """Some batches of an inner loader for each outer batch."""
    for _ in s.epochs(2):
        for outer in s.batches(p.data):
            batches = iter(s.batches(p.data2))
            p.train([torch.cat(pair) for pair in zip(outer, next(batches), strict=True)])


def two_optimizers(s: Session, p: Parts) -> None:
    for _ in s.epochs(3):
        for batch in s.batches(p.data):
            p.train(batch, 0)
            p.tick()
            p.train(batch, 1)
            p.schedules[0].step()


def closures(s: Session, p: Parts) -> None:
    for _ in s.epochs(2):
        for batch in s.batches(p.data):

            def closure(batch: Any = batch) -> torch.Tensor:
                p.tick()
                p.optimizers[0].zero_grad()
                loss = p.loss(batch)
                backward(loss)
                return loss

            p.optimizers[0].step(closure)


def scaled(s: Session, p: Parts) -> None:
    for _ in s.epochs(3):
        for number, batch in s.enumerate(p.data):
            p.tick()
            p.optimizers[0].zero_grad()
            bad = float("inf") if number == 3 else 1.0
            backward(p.scaler.scale(p.loss(batch) * bad))
            p.scaler.step(p.optimizers[0])
            p.scaler.update()
            p.tick()


def averaging(s: Session, p: Parts) -> None:
    for _ in s.epochs(3):
        for batch in s.batches(p.data):
            p.train(batch)
            p.other.update_parameters(p.model)  # type: ignore[operator]
            p.best["seen"] = [*p.best["seen"][-2:], float(batch[0].sum())]
        p.tick()


def averaging_epochs(s: Session, p: Parts) -> None:
    """Stochastic weight averaging, as torch's documents have it."""
    for _ in s.epochs(4):
        for batch in s.batches(p.data):
            p.train(batch)
        p.other.update_parameters(p.model)  # type: ignore[operator]
        p.tick()


def looking_at_the_data(s: Session, p: Parts) -> None:
    """Images for a log, and the accuracy on the training data, from the very loader."""
    for _ in s.epochs(3):
        waiting = iter(p.data)
        for batch in s.batches(p.data):
            if s.step % 2:
                p.best["seen"] = [float(next(iter(p.data))[0].sum())]
            if s.step % 5 == 3:
                p.best["seen"] = [*p.best["seen"], *(float(x.sum()) for x, _ in p.data), len(list(waiting))]
            p.train(batch)


def evaluating_inside(s: Session, p: Parts) -> None:
    for _ in s.epochs(3):
        for batch in s.batches(p.data):
            p.train(batch)
            p.schedules[0].step()
            if s.step % 2 == 0:
                p.evaluate()
            if s.step >= 2:
                p.tick()


def by_hand(s: Session, p: Parts) -> None:
    for _ in s.epochs(3):
        for batch in s.batches(p.data):
            p.tick()
            p.model.zero_grad()
            backward(p.loss(batch))
            s.updating()
            with torch.no_grad():
                for parameter in p.model.parameters():
                    parameter.sub_(0.01 * parameter.grad)  # type: ignore[operator]


def random_batch() -> Any:
    """As nanoGPT draws one: no loader, only the global generator."""
    x = DATA[torch.randint(len(DATA), (4,))]
    return x, x.sum(1, keepdim=True)


DATA = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))


def no_passes(s: Session, p: Parts) -> None:
    """NanoGPT's shape: the learning rate by hand, an evaluation now and then, `updated()` at the end of a step."""
    while s.step < 12:
        p.optimizers[0].param_groups[0]["lr"] = 0.02 / (1 + s.step)
        if s.step % 4 == 0:
            p.best["seen"] = [*p.best["seen"], float(p.loss(random_batch()).detach())]
        for _ in range(2):
            backward(p.loss(random_batch()) / 2)
        p.tick()
        p.optimizers[0].step()
        p.optimizers[0].zero_grad()
        p.schedules[0].step()
        assert s.updated()
        p.tick()


def passes_to_evaluate(s: Session, p: Parts) -> None:
    """Only the evaluation asks for batches; a resumed run trains before it comes there."""
    while s.step < 12:
        if s.step % 3 == 0:
            for batch in s.batches(p.data2):
                p.best["seen"] = [*p.best["seen"], float(p.loss(batch).detach())]
        p.train(random_batch())
        s.updated()
        p.tick()


def skipped_by_hand(s: Session, p: Parts) -> None:
    """The scaler skips updates, and those are not steps."""
    for number in range(40):
        p.tick()
        if s.step == 10:
            return
        p.optimizers[0].zero_grad()
        batch = random_batch()
        bad = float("inf") if float(batch[0][0, 0]) > 0.5 else 1.0
        backward(p.scaler.scale(p.loss(batch) * bad))
        p.scaler.step(p.optimizers[0])
        p.scaler.update()
        p.tick()
        assert s.updated() is (bad == 1.0), number


def replayed(s: Session, p: Parts) -> None:
    for _ in s.epochs(3):
        for batch in s.batches(p.data, replay=True):
            p.train(batch)


def saving(s: Session, p: Parts) -> None:
    for epoch in s.epochs(3):
        for number, batch in s.enumerate(p.data):
            p.train(batch)
            if number == 1:
                s.save()
        s.save()
        torch.save(p.model.state_dict(), p.folder / f"mine-{epoch}.pt")
        p.tick()


def longer() -> Any:
    """Eight batches, which draw random numbers of the process."""
    return DataLoader(Noisy(32), batch_size=4, shuffle=True)


def adam(p: Parts) -> TorchState:
    optimizer = Adam(p.model.parameters(), lr=0.02)
    return TorchState(p.model, optimizer, StepLR(optimizer, 2, 0.8), extra={"best": p.best})


def momentum(p: Parts) -> TorchState:
    optimizer = SGD(p.model.parameters(), lr=0.05, momentum=0.9)
    return TorchState(p.model, optimizer, ReduceLROnPlateau(optimizer, patience=0), extra={"best": p.best})


def two(p: Parts) -> TorchState:
    first, second = Adam(p.model.parameters(), lr=0.02), SGD(p.other.parameters(), lr=0.01, momentum=0.5)
    return TorchState({"g": p.model, "d": p.other}, {"g": first, "d": second}, StepLR(first, 2, 0.8))


def lbfgs(p: Parts) -> TorchState:
    return TorchState(p.model, LBFGS(p.model.parameters(), lr=0.1, max_iter=3, history_size=4))


def with_scaler(p: Parts) -> TorchState:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    return TorchState(p.model, Adam(p.model.parameters(), lr=0.02), scaler=scaler)


def averaged(p: Parts) -> TorchState:
    p.other = AveragedModel(p.model)
    optimizer = Adam(p.model.parameters(), lr=0.02)
    return TorchState({"model": p.model, "ema": p.other}, optimizer, extra={"best": p.best})


def prepared(p: Parts) -> TorchState:
    """As `Accelerator.prepare` wraps them: the loader counts its passes, the optimizer has no hooks."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = Adam(p.model.parameters(), lr=0.02)
    scheduler = StepLR(optimizer, 2, 0.8)
    p.model, optimizer, p.data, scheduler = accelerator.prepare(p.model, optimizer, p.data, scheduler)
    p.prepared = [accelerator, optimizer, scheduler]
    return TorchState(p.model, optimizer, scheduler)


def set_up(p: Parts) -> TorchState:
    """As `Fabric.setup` wraps them: the loader counts its passes, and moves the batches."""
    fabric = Fabric(accelerator="cpu", devices=1)
    p.model, optimizer = fabric.setup(p.model, Adam(p.model.parameters(), lr=0.02))
    p.data = fabric.setup_dataloaders(p.data)
    p.prepared = [fabric, optimizer, StepLR(optimizer, 2, 0.8)]
    return TorchState(p.model, optimizer, p.prepared[2])


def shared_out() -> DataLoader[Any]:
    """Shuffled by the number of the epoch, which Fabric sets."""
    return loader(sampler=DistributedSampler(range(20), 1, 0))  # type: ignore[arg-type]


def with_a_container(p: Parts) -> TorchState:
    p.prepared = [Container(p.model)]
    return TorchState(p.model, p.prepared[0], StepLR(p.prepared[0].optimizers[0], 2, 0.8))


class Counts(nn.Module):
    """Keeps a number beside its parameters, as layers for FP8 keep their scales."""

    def __init__(self) -> None:
        super().__init__()
        self._inner, self._calls = net(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Depends on it."""
        self._calls += 1
        result: torch.Tensor = self._inner(x) * (1 + self._calls / 100)
        return result

    def get_extra_state(self) -> torch.Tensor:
        """It."""
        return torch.tensor(self._calls)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """It."""
        self._calls = int(state)


def counted(p: Parts) -> TorchState:
    p.model = Counts()
    return momentum(p)


class Momentum(nn.Module):
    """A net, and one that follows it in each forward pass, before the update, as MoCo's second encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.second = net(), net().requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Their mean."""
        with torch.no_grad():
            for mine, other in zip(self.second.parameters(), self.net.parameters(), strict=True):
                mine.data = mine.data * 0.8 + other.data * 0.2
            self.scale.div_(self.scale.norm() * 1.5)  # as prototypes are normalized
        result: torch.Tensor = (self.net(x) + self.second(x)) * self.scale
        return result


def with_a_momentum_encoder(p: Parts) -> TorchState:
    p.model = Momentum()
    return momentum(p)


def observed(p: Parts) -> TorchState:
    """Its buffers get their shape in the first forward pass, and stay the same tensors."""
    observer = PerChannelMinMaxObserver(ch_axis=1)
    p.model = nn.Sequential(observer, net())
    return momentum(p)


class Branches(nn.Module):
    """A net, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.some = net(), net(), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of one or both."""
        result: torch.Tensor = self.first(x) + (self.second(x) if self.some else 0)
        return result


def with_branches(p: Parts) -> TorchState:
    p.model = Branches()
    return adam(p)


def lazy(p: Parts) -> TorchState:
    """Without shapes before the first forward pass."""
    p.model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(8, 1))
    return adam(p)


def with_masters(p: Parts) -> TorchState:
    return TorchState(p.model, Masters(p.model.parameters()))


def schedule_free(p: Parts) -> TorchState:
    return TorchState(p.model, Averages(p.model.parameters()))


def bare(p: Parts) -> TorchState:
    return TorchState(p.model)


SHAPES = {
    "plain": Shape(plain, adam),
    "per-epoch": Shape(per_epoch, momentum),
    "freezing": Shape(freezing, adam),
    "extra-state": Shape(per_epoch, counted),
    "momentum-encoder": Shape(plain_steps, with_a_momentum_encoder),
    "observers": Shape(plain_steps, observed),
    "lazy": Shape(plain, lazy),
    "masters": Shape(plain_steps, with_masters),
    "exchanging": Shape(exchanging, schedule_free),
    "accelerated": Shape(accelerated, prepared),
    "fabric": Shape(with_fabric, set_up, shared_out),
    "contained": Shape(contained, with_a_container),
    "accumulating": Shape(accumulating, adam),
    "branching": Shape(branching, with_branches),
    "emptying-behind": Shape(emptying_behind, with_branches),
    "breaking": Shape(breaking, adam),
    "breaking-a-wrapper": Shape(breaking_a_wrapper, adam),
    "returning": Shape(returning, adam),
    "until-enough": Shape(until_enough, adam),
    "nested": Shape(nested, adam),
    "zipped": Shape(zipped, adam),
    "one-after-the-other": Shape(one_after_the_other, adam),
    "twice": Shape(twice, adam),
    "again-by-hand": Shape(again_by_hand, adam, longer),
    "again-by-hand-equal": Shape(again_by_hand, adam),
    "cycled": Shape(cycled, adam, longer),
    "across-epochs": Shape(across_epochs, adam),
    "anew-in-each-epoch": Shape(anew_in_each_epoch, adam),
    "anew-in-each-body": Shape(anew_in_each_body, adam),
    "two-optimizers": Shape(two_optimizers, two),
    "closures": Shape(closures, lbfgs),
    "scaler": Shape(scaled, with_scaler),
    "averaging": Shape(averaging, averaged),
    "averaging-epochs": Shape(averaging_epochs, averaged),
    "looking-at-the-data": Shape(looking_at_the_data, adam),
    "looking-with-workers": Shape(looking_at_the_data, adam, lambda: loader(num_workers=1)),
    "evaluating-inside": Shape(evaluating_inside, adam),
    "by-hand": Shape(by_hand, bare),
    "no-passes": Shape(no_passes, adam),
    "passes-to-evaluate": Shape(passes_to_evaluate, adam),
    "skipped-by-hand": Shape(skipped_by_hand, with_scaler),
    "saving": Shape(saving, adam),
    "augmented": Shape(plain, adam, lambda: DataLoader(Noisy(), batch_size=4, shuffle=True)),
    "iterable": Shape(plain, adam, lambda: DataLoader(Stream(), batch_size=4)),
    "stateful": Shape(plain, adam, Counting),
    "workers": Shape(plain, adam, lambda: loader(num_workers=2)),
    "workers-that-augment": Shape(replayed, adam, lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2)),
    "own-generator": Shape(plain, adam, lambda: loader(generator=torch.Generator().manual_seed(5))),
    "numbers": Shape(plain, adam, lambda: list(loader())),
    "own-random-numbers": Shape(plain, adam, lambda: loader(collate_fn=OwnNoise(), sampler=OwnOrder())),
}


INEXACT = {
    "momentum-encoder": ("changed since the end of step 1, before an update",),
    "cycled": (LATE,),
    "across-epochs": (LATE, "what follows the update there was not repeated"),
}
"""Notes of steps of which nobody could know yet what a resume needs, or what behind the update belongs to them."""


@pytest.fixture(autouse=True)
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens a session again stands for a script that was started again."""
    in_process(monkeypatch, NewProcesses())


@pytest.mark.usefixtures("childrens_signal", "restored_environ")
@pytest.mark.parametrize("name", SHAPES)
def test_a_loop_that_was_cut_ends_as_if_it_had_not_been(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(name, tmp_path, 6, caplog)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.usefixtures("childrens_signal", "restored_environ")
@pytest.mark.parametrize("name", SHAPES)
def test_a_loop_may_be_cut_anywhere(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check(name, tmp_path, 10_000, caplog)


def check(name: str, folder: Path, most: int, caplog: pytest.LogCaptureFixture) -> None:
    """Cut the loop at so many of its ticks, the first and the last among them, and let it go on each time."""
    shape = SHAPES[name]
    whole, ticks = run(shape, folder / "whole")
    assert whole is not None and whole["step"] > 4
    cuts = sorted({1 + round(i * (ticks - 1) / (most - 1)) for i in range(most)})
    for cut in cuts:
        caplog.clear()
        nothing, _ = run(shape, folder / str(cut), cut)
        assert nothing is None
        end, left = run(shape, folder / str(cut))
        assert end is not None
        if not any(note in caplog.text for note in INEXACT.get(name, ())):
            assert differences(whole, end) == [], f"cut at tick {cut} of {ticks}"
            assert name == "momentum-encoder" or "were replaced" not in caplog.text  # it does so itself
        assert left <= ticks - cut + 12, f"cut at tick {cut} of {ticks}: {left} were done again"


@pytest.mark.usefixtures("childrens_signal", "restored_environ")
def test_random_numbers_of_workers_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the start once, and where a run is resumed in the middle of a pass."""
    run(SHAPES["workers"], tmp_path, 9)
    assert caplog.text.count(WORKERS) == 1
    assert "replay=True" in caplog.text
    caplog.clear()
    run(SHAPES["workers"], tmp_path)
    assert caplog.text.count(f"{WORKERS}: where they draw any (augmentation), this run draws other ones") == 1


@pytest.mark.usefixtures("restored_environ")
def test_what_fabric_has_set_up_is_taken_out_of_it() -> None:
    """With the scaler that it makes for itself; compiled behind it, too."""
    precision = MixedPrecision("16-mixed", "cpu")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[precision])
    inside = net()
    adam = Adam(inside.parameters())
    model, optimizer = fabric.setup(inside, adam)
    state = TorchState({"model": model}, [optimizer])
    assert state.modules["model"] is inside and list(state.optimizers.values()) == [adam]
    assert state.scaler is precision.scaler and state.scaler is not None
    assert TorchState(torch.compile(model)).modules["model"] is inside


def test_twice_cut(tmp_path: Path) -> None:
    shape = SHAPES["plain"]
    whole, _ = run(shape, tmp_path / "whole")
    for _ in range(8):
        end, _ = run(shape, tmp_path / "cut", 9)
        if end is not None:
            break
    assert whole is not None and end is not None
    assert differences(whole, end) == []
    assert len(candidates([tmp_path / "cut"], LAYOUT)) == 3
