"""Rank 0's word over an abstract unix socket: order, stale sockets, another user, nobody there."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lastgasp import rankzero
from lastgasp.errors import AuthenticationError, ConfigError
from lastgasp.rankzero import RankZero


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


def test_all_ranks_get_the_values_of_rank_0_in_order(key: str) -> None:
    values: list[Any] = ["job", ["127.0.0.1:1", "secret"], None]
    ready = threading.Barrier(3)

    def rank(number: int) -> list[Any]:
        ready.wait(60)
        told = RankZero(key, number, 3, wait=60)
        answers = [told(value if number == 0 else "mine") for value in values]
        ready.wait(60)
        told.close()
        return answers

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank, range(3))) == [values] * 3


def test_one_rank_needs_nobody(key: str) -> None:
    assert RankZero(key, 0, 1)("value") == "value"


def test_another_job_s_key_is_another_job(key: str) -> None:
    first = RankZero(key, 0, 2, wait=60)
    first("secret")
    with pytest.raises(ConfigError, match="rank 0 did not answer on this machine"):
        RankZero(f"{key}x", 1, 2, wait=0.2)("mine")
    first.close()


def test_a_rank_0_that_lives_on_keeps_the_name(key: str) -> None:
    first = RankZero(key, 0, 2, wait=60)
    with pytest.raises(ConfigError, match="one job at a time"):
        RankZero(key, 0, 2, wait=0.2)
    first.close()
    RankZero(key, 0, 2, wait=60).close()


def test_a_forked_worker_that_outlives_rank_0_does_not_keep_the_name(key: str) -> None:
    """A data-loading process that a killed rank 0 has left."""
    first = RankZero(key, 0, 2, wait=60)
    fork = multiprocessing.get_context("fork")
    over = fork.Event()
    worker = fork.Process(target=over.wait, args=(600,))
    worker.start()
    try:
        first.close()
        RankZero(key, 0, 2, wait=60).close()
    finally:
        over.set()
        worker.join(30)


def test_an_answer_of_another_user_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RankZero(key, 0, 2, wait=60)
    first("secret")

    def other(connection: socket.socket) -> int:
        return os.geteuid() + (threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(rankzero, "_user", other)
    with pytest.raises(AuthenticationError, match="answers in place of rank 0"):
        RankZero(key, 1, 2, wait=60)("mine")
    first.close()
