"""`ReplicaWatch`: ranks compare what optimizers hold once it has come into being, and not in every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lastgasp.pytorch.loop import outside
from lastgasp.pytorch.loop.outside import ReplicaWatch

Digests = Callable[[], Mapping[str, bytes]]


class Rank:
    """One of two: `own` says which parameters its optimizer updates."""

    def __init__(self, *own: int) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.parameters = list(self.net.parameters())
        self.optimizer, self.own = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9), own
        self.asked: list[Mapping[str, bytes]] = []
        self.notes: list[str] = []
        self.alike = self.uneven = False
        self.watch = ReplicaWatch([], [self.optimizer], self._compare, self.notes.append, lambda: self.uneven)

    def _compare(self, digests: Digests) -> bool:
        self.asked.append(digests())
        return self.alike

    def step(self, trained: bytes = b"\1\1\1\1") -> None:
        """One step of a loop."""
        for index in self.own:
            self.parameters[index].grad = torch.ones_like(self.parameters[index])
        self.optimizer.step()
        self.watch.step_over(trained)


def test_equal_states_are_compared_once() -> None:
    ranks = Rank(0, 1, 2, 3), Rank(0, 1, 2, 3)
    for rank in ranks:
        rank.alike = True
        rank.watch.step_over(b"\1\1\1\1")  # a GradScaler skipped the update
        assert not rank.asked
        for _ in range(3):
            rank.step()
    assert ranks[0].asked == ranks[1].asked and len(ranks[0].asked) == 1
    assert not ranks[0].notes
    assert not ranks[0].optimizer._optimizer_step_post_hooks


def test_states_of_other_parameters_differ_though_they_look_alike() -> None:
    ranks = Rank(0, 1), Rank(2, 3)
    for rank in ranks:
        rank.step()
    assert ranks[0].asked != ranks[1].asked
    assert ["hold on one rank" in note for note in ranks[0].notes] == [True]


def test_a_number_of_a_ranks_own_is_no_difference() -> None:
    """LBFGS keeps the loss of its last batch."""
    ranks = Rank(0, 1), Rank(0, 1)
    for number, rank in enumerate(ranks):
        rank.optimizer.register_step_post_hook(
            lambda optimizer, *_, number=number: optimizer.state[optimizer.param_groups[0]["params"][0]].update(
                prev_loss=float(number)
            )
        )
        rank.step()
        rank.step()
    assert ranks[0].asked == ranks[1].asked


def test_an_optimizer_that_one_rank_alone_steps_later_is_not_waited_for() -> None:
    """A probe on rank 0; and torch's own call of `step` for a state dictionary of one that has none yet."""
    rank = Rank(0, 1)
    probe = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    rank.watch.remove()
    rank.watch = ReplicaWatch([], [rank.optimizer, probe], rank._compare, rank.notes.append)
    rank.alike = True
    rank.step()
    for _ in range(2):
        probe.param_groups[0]["params"][0].grad = torch.ones(1)
        probe.step()
        rank.step()
    assert len(rank.asked) == 1
    waiting = Rank(0, 1)
    get_optimizer_state_dict(waiting.net, waiting.optimizer)
    waiting.watch.step_over(b"\1\1\1\1")
    assert not waiting.asked


def test_a_rank_that_has_no_state_is_asked_as_well() -> None:
    rank = Rank()
    rank.step()
    assert len(rank.asked) == 1


@pytest.mark.parametrize("averaged", [True, False])
def test_models_that_the_loop_keeps_equal_are_compared_too(averaged: bool) -> None:
    """An optimizer without a state says nothing of gradients that nobody averages."""
    ranks = Rank(0, 1), Rank(0, 1) if averaged else Rank(2)
    for rank in ranks:
        rank.watch.remove()
        rank.optimizer = torch.optim.SGD(rank.parameters, lr=0.1)
        rank.watch = ReplicaWatch([], [rank.optimizer], rank._compare, rank.notes.append, kept_equal=[rank.net])
        rank.alike = averaged
        rank.step()
    assert (ranks[0].asked == ranks[1].asked) == averaged
    assert ["replicated=True says that they are equal" in note for note in ranks[0].notes] == [True] * (not averaged)


def test_parameters_that_are_trained_later_are_compared_once() -> None:
    rank = Rank(0, 1, 2, 3)
    frozen, trained = b"\0\0\1\1", b"\1\1\1\1"
    for row in (frozen, frozen, trained, trained, frozen, trained, trained):
        rank.step(row)
    assert len(rank.asked) == 2


def test_nothing_is_compared_where_ranks_come_to_different_steps_or_it_is_over() -> None:
    joined, over = Rank(0), Rank(0)
    joined.uneven = True
    over.watch.remove()
    for rank in (joined, over):
        rank.step()
        assert not rank.asked


def test_what_ddp_does_not_average_is_found_in_its_first_step_and_named_as_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers that are unfrozen later: the step that follows may be the last one of a rank that trains its own."""
    rank, compared = Rank(2, 3), list[Digests | None]()
    alike = [True]

    def compare(digests: Digests | None = None) -> bool:
        compared.append(digests)
        return alike[0]

    rank.watch = ReplicaWatch([], [rank.optimizer], compare, rank.notes.append)
    rank.watch._models = [object()]  # type: ignore[list-item]
    monkeypatch.setattr(outside, "_unreduced", lambda _: 2 if rank.own[0] == 0 else 0)
    rank.step(b"\0\0\1\1")
    assert [one is None for one in compared] == [False] and rank.notes == []
    rank.own = (0, 1, 2, 3)
    rank.step(b"\1\1\1\1")  # unfrozen behind the update: nothing differs yet
    assert [one is None for one in compared] == [False, True] and rank.notes == []
    alike[0] = False
    rank.step(b"\1\1\1\1")
    assert "2 parameters are trained that were frozen when DDP was made" in rank.notes[0]
    rank.step(b"\1\1\1\1")
    assert [one is None for one in compared] == [False, True, True, False]
