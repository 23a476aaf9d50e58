"""`ElasticLoader` in one process: what it gives, what it refuses, and that its gradient is that of the whole batch."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed._functional_collectives import all_reduce

from lastgasp.errors import ConfigError, UsageError
from lastgasp.pytorch import ElasticLoader, Session, TorchState, newest_good

SAMPLES = 22


@pytest.fixture
def sigchld() -> Iterator[None]:
    """DataLoader takes SIGCHLD for its workers, for good."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


class Drawn:
    """Samples that have random parts of all three kinds."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([number, random.random(), float(np.random.rand()), float(torch.rand(()))])


def loader_of(model: nn.Module | None = None, **settings: Any) -> ElasticLoader:
    return ElasticLoader(Drawn(), model or nn.Linear(4, 1), batch_size=2, **({"ranks": 4, "seed": 3} | settings))


def opened(folder: Path, loader: ElasticLoader, optimizer: Any = None, **options: Any) -> Session:
    return Session.open(folder, state=TorchState(loader.model, optimizer, elastic=loader), **options)


def learn(model: Any, batch: Tensor) -> None:
    (model(batch) ** 2).mean().backward()


@pytest.mark.parametrize("canonical", [False, True])
def test_the_gradient_is_that_of_the_mean_over_the_global_batch(canonical: bool, tmp_path: Path) -> None:
    """In the last step, too: 6 samples in micro-batches of 1 and 2."""
    model = nn.Linear(4, 1)
    loader = loader_of(model, canonical=canonical)
    with opened(tmp_path, loader) as s:
        for step in s.batches(loader):
            batches = []
            for batch in step:
                learn(model, batch)
                batches.append(batch)
            summed = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            learn(model, torch.cat(batches))
            assert [len(batch) for batch in batches] == ([2, 2, 2, 2] if step.offset < 16 else [1, 2, 1, 2])
            for own, p in zip(summed, model.parameters(), strict=True):
                torch.testing.assert_close(own, p.grad)
            model.zero_grad()
    assert (loader.used["steps"], loader.used["samples"], len(loader)) == (3, SAMPLES, 3)


def test_a_last_step_that_would_be_smaller_can_be_left_out(tmp_path: Path) -> None:
    """Else BatchNorm gets micro-batches of one sample, which it refuses."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    loader, optimizer = loader_of(model, drop_last=True), torch.optim.SGD(model.parameters(), lr=0.1)
    for end, used in ((3, [8, 8, 8]), (6, [8, 8, 8])):  # cut in the middle of an epoch, and resumed there
        resume = newest_good(tmp_path) or "auto"
        with opened(tmp_path, loader, optimizer, every=1, max_steps=end, resume=resume) as s:
            found = []
            for _ in s.epochs(3):
                for step in s.batches(loader):
                    for batch in step:
                        learn(model, batch)
                    optimizer.step()
                    found.append(step.samples)
        assert found == used
        loader = loader_of(model, drop_last=True)
    assert len(loader) == 2
    with pytest.raises(ConfigError, match="drop_last"):
        loader_of(ranks=12, drop_last=True)


@pytest.mark.usefixtures("sigchld")
@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_come_with_the_micro_batch(workers: int, tmp_path: Path) -> None:
    """In loading and in training, whatever the process has drawn before and whoever loads."""

    def run(folder: str, before: int, workers: int) -> list[Any]:
        torch.manual_seed(before)
        found: list[Any] = []
        loader = loader_of(num_workers=workers)
        with opened(tmp_path / folder, loader) as s:
            for step in s.batches(loader):
                found.append(float(torch.rand(())))
                for batch in step:
                    learn(loader.model, batch)
                    found += [batch.tolist(), float(torch.rand(())), random.random(), float(np.random.rand())]
                loader.model.zero_grad()
                found.append(random.random())
        return found

    assert run("a", 1, 0) == run("b", 2, workers)


def test_parameters_without_a_gradient_have_none(tmp_path: Path) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)})
    loader = loader_of(model)
    with opened(tmp_path, loader) as s:
        for number, step in enumerate(s.batches(loader)):
            for batch in step:
                learn(model["used"], batch)
            assert [p.grad is None for p in model.parameters()] == [bool(number), False, True, True]
            model.zero_grad()
            model["used"].weight.requires_grad_(False)  # from the next step on


def leave_early(loader: ElasticLoader, optimizer: Any, step: Any) -> None:
    for batch in step:
        learn(loader.model, batch)
        break
    assert all(p.grad is None for p in loader.model.parameters()), "an optimizer changes nothing"


def update_inside(loader: ElasticLoader, optimizer: Any, step: Any) -> None:
    for batch in step:
        learn(loader.model, batch)
        optimizer.step()


def twice(loader: ElasticLoader, optimizer: Any, step: Any) -> None:
    for _ in range(2):
        for batch in step:
            learn(loader.model, batch)


def other_samples(loader: ElasticLoader, optimizer: Any, step: Any) -> None:
    """As on a rank with another dataset, or with a loader that has lost a sample."""
    step.loaded[1] = step.loaded[1]._replace(digest=7)
    for batch in step:
        learn(loader.model, batch)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (leave_early, "was not run to its end"),
        (update_inside, "behind that loop"),
        (twice, "once"),
        (other_samples, "have not used the samples of this step, each of them once"),
    ],
)
def test_a_loop_that_would_train_on_something_else_is_stopped(body: Any, why: str, tmp_path: Path) -> None:
    loader = loader_of()
    optimizer = torch.optim.SGD(loader.model.parameters(), lr=0.1)

    def train() -> None:
        with opened(tmp_path, loader, optimizer) as s:
            for step in s.batches(loader):
                body(loader, optimizer, step)

    with pytest.raises(UsageError, match=why):
        train()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_micro_batch_exchanges_is_seen(ranks: int, tmp_path: Path) -> None:
    """A job with missing ranks would do it more often than its other ranks: that is refused."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    loader, told = loader_of(ranks=ranks), list[str]()
    refused = pytest.raises(UsageError, match="exchanged something within a micro-batch")
    try:
        with opened(tmp_path, loader) as s:
            loader.found_rigid = told.append
            steps = iter(s.batches(loader))
            for batch in next(steps):
                learn(loader.model, batch)
            assert told == []
            loader.model.zero_grad()
            with refused if ranks == 2 else contextlib.nullcontext():
                for batch in next(steps):
                    learn(loader.model, batch)
                    all_reduce(torch.zeros(1), "sum", dist.group.WORLD).tolist()
            assert bool(told) == (ranks == 1)
    finally:
        dist.destroy_process_group()


def test_a_training_goes_on_behind_the_last_step(tmp_path: Path) -> None:
    """And with no others: another seed is refused."""

    def train(steps: int, **settings: Any) -> tuple[ElasticLoader, list[Any]]:
        torch.manual_seed(1)
        loader, seen = loader_of(nn.Linear(4, 1), **settings), list[Any]()
        optimizer = torch.optim.SGD(loader.model.parameters(), lr=0.01)
        found = newest_good(tmp_path)
        resume = "never" if found is None else found
        with opened(tmp_path, loader, optimizer, max_steps=steps, every=1, resume=resume) as s:
            for epoch in s.epochs(9):
                for step in s.batches(loader):
                    for batch in step:
                        seen.append((epoch, batch.tolist()))
                        learn(loader.model, batch)
                    optimizer.step()
        return loader, seen

    _, first = train(2)
    _, second = train(5)
    loader, third = train(6)
    whole = [epoch_and_rows[0] for epoch_and_rows in first + second + third]
    assert whole == [0] * 12 + [1] * 12
    ids = [int(row[0]) for epoch, rows in first + second + third for row in rows if epoch == 0]
    assert sorted(ids) == list(range(SAMPLES))
    assert loader.used["steps"] == 6
    with pytest.raises(UsageError, match="'seed': 3"):
        train(7, seed=4)


def test_what_cannot_be_done_is_refused_at_once(tmp_path: Path) -> None:
    for wrong in ({"batch": "some"}, {"ranks": 0}, {"model": nn.Flatten()}):
        with pytest.raises(ConfigError):
            loader_of(**wrong)
    loader, other = loader_of(), nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="one model for all"):
        TorchState(loader.model, torch.optim.SGD(other.parameters(), lr=0.1), elastic=loader)
    with pytest.raises(ConfigError, match="alone"):
        TorchState(loader.model, sampler=[], elastic=loader)
    with pytest.raises(ConfigError, match="an ElasticLoader"):
        TorchState(loader.model, elastic=[1, 2])
    with (
        pytest.raises(UsageError, match="give it to the state"),
        Session.open(tmp_path, state=TorchState(loader.model)) as s,
    ):
        next(iter(s.batches(loader)))


class Counting(nn.Linear):
    """Assigns its buffer anew, as code of normalisers and codebooks does."""

    seen: Tensor

    def __init__(self, anew: bool) -> None:
        super().__init__(4, 1)
        self.anew = anew
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.anew:
            self.seen = self.seen + x[:, 0].sum()
        else:
            self.seen.add_(x[:, 0].sum())
        return super().forward(x)


def test_buffers_that_a_module_assigns_anew_are_the_same_in_the_end(tmp_path: Path) -> None:
    """Each micro-batch begins with those of the step's beginning; what the first one makes of them stays."""
    found = []
    for anew in (False, True):
        loader = loader_of(Counting(anew))
        optimizer = torch.optim.SGD(loader.model.parameters(), lr=0.0)
        found.append(values := list[float]())
        with opened(tmp_path / str(anew), loader, optimizer) as s:
            for step in s.batches(loader):
                for batch in step:
                    learn(loader.model, batch)
                optimizer.step()
                values.append(float(next(loader.model.buffers())))
    assert found[0] == found[1] and len(set(found[0])) > 1


def test_gradients_that_no_scaler_would_use_end_nothing(tmp_path: Path) -> None:
    """They are not finite; and the loop drops no gradients itself."""
    loader = loader_of()
    before = [p.detach().clone() for p in loader.model.parameters()]
    optimizer = torch.optim.SGD(loader.model.parameters(), lr=0.1)
    with opened(tmp_path, loader, optimizer) as s:
        for number, step in enumerate(s.batches(loader)):
            for batch in step:
                learn(loader.model, batch * (float("inf") if number == 0 else 1))
            if number > 0:
                optimizer.step()
    for p, old in zip(loader.model.parameters(), before, strict=True):
        assert p.isfinite().all() and not p.equal(old)


def test_gradients_that_no_update_has_used_are_not_thrown_away_in_silence(tmp_path: Path) -> None:
    """A step that a GradScaler has skipped, and whose gradients were dropped, is none of them."""
    for drops in (True, False):
        loader = loader_of()
        optimizer = torch.optim.SGD(loader.model.parameters(), lr=0.1)

        def train(loader: ElasticLoader, optimizer: Any, drops: bool) -> None:
            with opened(tmp_path / str(drops), loader, optimizer) as s:
                for number, step in enumerate(s.batches(loader)):
                    if drops:
                        optimizer.zero_grad(set_to_none=bool(number % 2))
                    for batch in step:
                        learn(loader.model, batch)
                    if number > 2:
                        optimizer.step()

        if drops:
            train(loader, optimizer, drops)
        else:
            with pytest.raises(UsageError, match="no update has used them"):
                train(loader, optimizer, drops)
