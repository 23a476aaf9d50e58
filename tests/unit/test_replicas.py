"""Ranks are replicas only where they hold the same: groups are split by digest, alike on all ranks."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.errors import NotSaveable
from lastgasp.gasp import messages as m
from lastgasp.gasp.machine import Machine
from lastgasp.gasp.progress import Progress
from lastgasp.replicas import compared, computed, is_split_of, needs_comparing, require_alike, split
from lastgasp.topology import ReplicaGroups, data_parallel


def gathered(*held: dict[str, bytes]) -> list[bytes]:
    """What an all-gather returns where rank i holds `held[i]`."""
    return [msgspec.msgpack.encode(one) for one in held]


def test_equal_ranks_stay_replicas() -> None:
    parts = gathered({"model": b"a"}, {"model": b"a"})
    assert compared(lambda tag, own: parts, data_parallel(2), {"model": b"a"}) == (((0, 1),), "")


def test_ranks_that_differ_are_split_and_the_reason_names_what_differs() -> None:
    parts = gathered({"model": b"a", "ema": b"x"}, {"model": b"a", "ema": b"y"}, {"model": b"a", "ema": b"x"})
    groups, why = compared(lambda tag, own: parts, data_parallel(3), {})
    assert groups == ((0, 2), (1,))
    assert "ranks 0 and 1" in why
    assert "their ema differ" in why
    assert "costs the steps since the last checkpoint, and that one has what one of them held" in why


def test_a_rank_that_does_not_know_what_it_holds_is_nobodys_replica() -> None:
    groups, why = compared(lambda tag, own: gathered({}, {}), data_parallel(2), {})
    assert groups == ((0,), (1,))
    assert "as far as is known" in why


def test_digests_that_cannot_be_computed_end_no_training() -> None:
    def fails() -> dict[str, bytes]:
        raise RuntimeError("out of memory")

    assert computed(fails) == {}


def test_a_format_with_room_for_one_copy_is_not_written() -> None:
    require_alike(True)
    with pytest.raises(NotSaveable, match="do not hold the same"):
        require_alike(False)


@pytest.mark.parametrize(("replicas", "expected"), [(((0,), (1,)), False), (((0,), (1, 2)), True)])
def test_nothing_is_compared_where_every_rank_is_alone(replicas: ReplicaGroups, expected: bool) -> None:
    assert needs_comparing(replicas) is expected


@given(st.lists(st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=4), min_size=1, max_size=4))
def test_every_split_is_known_as_one_and_holds_equals_only(shards: list[list[bytes]]) -> None:
    held = [value for shard in shards for value in shard]
    ranks = iter(range(len(held)))
    replicas = tuple(tuple(next(ranks) for _ in shard) for shard in shards)
    found = split(replicas, [{"model": value} for value in held])
    assert is_split_of(found, replicas)
    assert all(len({held[rank] for rank in group}) == 1 for group in found)
    assert len(found) == sum(len(set(shard)) for shard in shards)


@pytest.mark.parametrize("groups", [((0, 1),), ((0, 1, 2), (3,)), ((0,), (1,), (2,), (2,)), ((0, 1), (2, 7)), ()])
def test_what_no_comparison_can_bring_about_changes_nothing(groups: ReplicaGroups) -> None:
    machine = Machine(
        replicas=((0, 1), (2, 3)), world_size=4, finish_timeout=1, save_timeout=1, progress=Progress(limit=9)
    )
    machine.joined(0, 0.0)
    machine.said(0, m.Regroup(replicas=groups, why="nonsense"), 0.0)
    assert (machine.replicas, machine.unlike) == (((0, 1), (2, 3)), "")
