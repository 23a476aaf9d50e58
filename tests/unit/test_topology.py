"""Ranks and replica groups: what is refused, and that it says what to fix."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.errors import ConfigError
from lastgasp.topology import Place, ReplicaGroups, check_replicas, data_parallel, host_identity


@given(st.integers(1, 64))
def test_data_parallel_is_one_group_of_all(world: int) -> None:
    assert data_parallel(world) == (tuple(range(world)),)
    for rank in (0, world - 1):
        Place(rank=rank, world_size=world, replicas=data_parallel(world))


@given(st.integers(1, 4), st.lists(st.lists(st.integers(-1, 4), max_size=4).map(tuple), max_size=3).map(tuple))
def test_groups_are_refused_exactly_when_they_make_no_sense(world: int, groups: ReplicaGroups) -> None:
    good = bool(groups) and all(
        group and len(set(group)) == len(group) and set(group) <= set(range(world)) for group in groups
    )
    if good:
        check_replicas(groups, world)
    else:
        with pytest.raises(ConfigError, match=r"replicas=.* is not allowed: expected .* Fix the adapter's topology"):
            check_replicas(groups, world)


@pytest.mark.parametrize(
    ("field", "rank", "world", "attempt"),
    [("rank", 2, 2, 0), ("rank", -1, 2, 0), ("world_size", 0, 0, 0), ("attempt", 0, 2, -1)],
)
def test_a_rank_outside_its_job_is_refused(field: str, rank: int, world: int, attempt: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Place(rank=rank, world_size=world, replicas=data_parallel(2), attempt=attempt)
    assert caught.value.field == field
    assert caught.value.remedy


def test_processes_of_one_host_have_one_identity() -> None:
    code = "from lastgasp.topology import host_identity; print(host_identity())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert other.stdout.strip() == host_identity()
