"""Ranks whose directories have a time or a process id in their names take one."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from lastgasp.pytorch import common_directory
from lastgasp.pytorch.common_directory import Names


def asked(ranks: list[Names], names: list[str], store: HashStore, incarnation: str) -> list[str]:
    """What each of these ranks is told."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        told = [pool.submit(one.common, names[rank], store, rank, len(ranks), incarnation)
                for rank, one in enumerate(ranks)]  # fmt: skip
        return [one.result(60) for one in told]


def test_all_take_rank_0s_and_a_new_process_takes_that_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    store, ranks = HashStore(), [Names(), Names(), Names()]
    with caplog.at_level(logging.WARNING, "lastgasp"):
        assert asked(ranks, ["a", "b", "b"], store, "0") == ["a", "a", "a"]
    assert len(caplog.records) == 2
    assert asked(ranks, ["c", "c", "c"], store, "0") == ["c", "c", "c"]  # another training
    ranks[0] = Names()  # replaced, so that it asks for the first time
    assert asked(ranks, ["new", "b", "b"], store, "1") == ["a", "a", "a"]
    assert asked(ranks[1:], ["b", "b"], store, "2") == ["a", "a"]  # renumbered
    assert [one.known("b") for one in (ranks[1], Names())] == ["a", "b"]


def test_a_rank_that_does_not_come_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common_directory, "LIMIT", 0.05)
    with pytest.raises(TimeoutError):
        Names().common("a", HashStore(), 1, 2, "0")


def test_a_rank_that_comes_late_takes_at_once_what_the_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited as long again, for nobody, and had a directory of its own then."""
    store, (first, second, late) = HashStore(), [Names(), Names(), Names()]
    monkeypatch.setattr(common_directory, "LIMIT", 0.05)
    first.common("a", store, 0, 3, "0")
    monkeypatch.setattr(common_directory, "LIMIT", 60.0)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits"))
    assert [one.common("b", store, rank, 3, "0") for rank, one in ((2, late), (1, second))] == ["a", "a"]
    assert first.known("a") == "a"
