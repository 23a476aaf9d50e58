"""Who uses which samples: each once, the same ones with any number of ranks, and a digest that tells."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.errors import ConfigError
from lastgasp.pytorch.elastic.plan import Plan, added, chained, digest_of, due, owners, signed, unsigned

plans = st.builds(
    Plan,
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 9),
    ranks=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)


def epoch_of(plan: Plan, epoch: int, worlds: list[int], scaled: bool) -> tuple[list[int], list[int]]:
    """The samples of an epoch as its ranks use them, and the digest of each step; the world changes at each step."""
    order, offset, used, digests = plan.order(epoch), 0, list[int](), list[int]()
    while offset < plan.samples:
        world = min(worlds[len(digests) % len(worlds)], plan.ranks)
        micros = world if scaled else plan.ranks
        cut = plan.cut(offset, micros)
        words = []
        for mine in reversed(owners(micros, world)):  # digests of ranks come in any order
            parts = [(n, order[slice(*cut[n])].tolist()) for n in mine]
            used += [sample for _, part in parts for sample in part]
            words.append(added(digest_of(epoch, offset, n, part) for n, part in parts if part))
        digests.append(added(words))
        assert digests[-1] == due(epoch, offset, order, cut)
        offset = cut[-1][1]
    return used, digests


worlds_of_an_epoch = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(plan=plans, epoch=st.integers(0, 50), worlds=worlds_of_an_epoch, scaled=st.booleans())
def test_each_sample_of_an_epoch_is_used_once_while_ranks_come_and_go(
    plan: Plan, epoch: int, worlds: list[int], scaled: bool
) -> None:
    used, digests = epoch_of(plan, epoch, worlds, scaled)
    assert sorted(used) == list(range(plan.samples))
    if not scaled:
        assert len(digests) == plan.steps(plan.ranks)
        assert digests == epoch_of(plan, epoch, [plan.ranks], scaled)[1]


@given(plan=plans, offset=st.integers(0, 200), micros=st.integers(1, 9))
def test_a_step_has_no_gap_and_no_micro_batch_is_too_large(plan: Plan, offset: int, micros: int) -> None:
    cut = plan.cut(offset, micros)
    assert cut[0][0] == offset
    assert [end for _, end in cut[:-1]] == [begin for begin, _ in cut[1:]]
    assert all(0 <= end - begin <= plan.batch_size for begin, end in cut)
    sizes = {end - begin for begin, end in cut}
    assert max(sizes) - min(sizes) <= 1


@given(micros=st.integers(1, 40), ranks=st.integers(1, 40))
def test_every_rank_has_work_and_every_micro_batch_has_one_rank(micros: int, ranks: int) -> None:
    if ranks > micros:
        with pytest.raises(ValueError, match="cannot be shared"):
            owners(micros, ranks)
        return
    found = owners(micros, ranks)
    assert [n for mine in found for n in mine] == list(range(micros))
    assert len(found) == ranks
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert min(map(len, found)) >= 1


def test_a_digest_tells_what_was_used_where_and_when() -> None:
    right = digest_of(1, 32, 2, [5, 6, 7])
    others = [
        digest_of(2, 32, 2, [5, 6, 7]), digest_of(1, 0, 2, [5, 6, 7]), digest_of(1, 32, 3, [5, 6, 7]),
        digest_of(1, 32, 2, [5, 6]), digest_of(1, 32, 2, [5, 7, 6]),
    ]  # fmt: skip
    assert right not in others
    assert unsigned(signed(right)) == right
    assert chained(chained("", 1), 2) != chained(chained("", 2), 1)


def test_epochs_have_orders_of_their_own_unless_they_are_not_wanted() -> None:
    shuffled, fixed = Plan(samples=50, batch_size=4, ranks=2), Plan(samples=50, batch_size=4, ranks=2, shuffle=False)
    assert shuffled.order(0).tolist() == shuffled.order(0).tolist() != shuffled.order(1).tolist()
    assert Plan(samples=50, batch_size=4, ranks=2, seed=1).order(0).tolist() != shuffled.order(0).tolist()
    assert fixed.order(3).tolist() == list(range(50))


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"batch_size": 0}, {"ranks": 0}, {"batch_size": 2.5}])
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Plan(**({"samples": 8, "batch_size": 2, "ranks": 2} | wrong))
