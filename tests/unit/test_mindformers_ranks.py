"""Ranks before MindSpore's communication is up."""

from __future__ import annotations

import pytest

from lastgasp.errors import ConfigError
from lastgasp.topology import Place, data_parallel
from lastgasp_mindformers import ranks

VARIABLES = ("MS_WORKER_NUM", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE", "RANK_ID", "MS_NODE_ID", "OMPI_COMM_WORLD_RANK")


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, (0, 1)),
        ({"MS_WORKER_NUM": "4", "RANK_ID": "3", "RANK_SIZE": "8"}, (3, 4)),
        ({"RANK_SIZE": "8", "MS_NODE_ID": "5"}, (5, 8)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, (1, 2)),
    ],
)
def test_ranks_before_communication_is_up(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], wanted: tuple[int, int]
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert ranks.rank_and_size() == wanted


def test_a_rank_that_nobody_tells_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK_ID"):
        ranks.rank_and_size()
    monkeypatch.setenv("RANK_ID", "one")
    with pytest.raises(ConfigError, match="a number"):
        ranks.rank_and_size()


def test_since_when_checkpoints_are_of_this_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """msrun names a job of several nodes by its scheduler's address, which the next one has as well."""
    monkeypatch.delenv("MINDX_TASK_ID", raising=False)

    def since(started_s: int | None, said: int = 0) -> int:
        place = Place(rank=1, world_size=2, replicas=data_parallel(2), job="10.0.0.1:8118", since_ns=said)
        return ranks.dated(place, started_s).since_ns

    assert [since(7), since(7, said=5), since(None)] == [7_000_000_000, 5, 0]
    monkeypatch.setenv("MINDX_TASK_ID", "10.0.0.1:8118")
    assert since(7) == 0, "MindCluster gives this name to no other job, and it outlives launchers and pods"
