"""Ranks before MindSpore's communication is up."""

from __future__ import annotations

import pytest

from lastgasp.errors import ConfigError
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
