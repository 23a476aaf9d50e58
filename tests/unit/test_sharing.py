"""A checkpoint directory of which each host has its own is refused; each host reads all of a checkpoint."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from lastgasp import sharing
from lastgasp.adapter import CheckpointSelector, SelectionPolicy
from lastgasp.config import GaspConfig
from lastgasp.errors import ConfigError
from lastgasp.ports import Gather
from lastgasp.sharing import require_shared
from lastgasp.topology import Place, data_parallel
from support.checkpoint_kit import FILES, as_ranks, put_file


class Gathers:
    """An all-gather over threads."""

    def __init__(self, world: int) -> None:
        self._parts: dict[str, dict[int, bytes]] = {}
        self._barrier = threading.Barrier(world)

    def of(self, rank: int) -> Gather:
        """The gather of one rank."""

        def gather(tag: str, payload: bytes) -> list[bytes]:
            self._parts.setdefault(tag, {})[rank] = payload
            self._barrier.wait(60)
            return [part for _, part in sorted(self._parts[tag].items())]

        return gather


def outcomes(directories: list[Path], hosts: list[str]) -> list[str]:
    """What each rank hears; empty where nothing is wrong."""
    gathers, found = Gathers(len(hosts)), [""] * len(hosts)

    def run(rank: int) -> None:
        place = Place(rank=rank, world_size=len(hosts), replicas=data_parallel(len(hosts)))
        try:
            require_shared(directories[rank], place, gathers.of(rank), hosts[rank])
        except ConfigError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def test_one_directory_for_all_hosts(tmp_path: Path) -> None:
    assert outcomes([tmp_path] * 3, ["a", "a", "b"]) == ["", "", ""]
    assert list(tmp_path.iterdir()) == []


def test_each_host_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "SEEN_WITHIN", 0.2)
    ours, theirs = tmp_path / "a", tmp_path / "b"
    ours.mkdir()
    theirs.mkdir()
    found = outcomes([ours, ours, theirs, theirs], ["a", "a", "b", "b"])
    for said in found:
        assert "a directory that all hosts share: rank 2, 3 did not see in 0.2 s what rank 0 wrote" in said
    assert list(ours.iterdir()) == list(theirs.iterdir()) == []


def test_a_file_system_that_shows_it_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listdir = sharing.os.listdir  # type: ignore[attr-defined]
    late = [0]

    def slow(directory: Path) -> list[str]:
        late[0] += 1
        return listdir(directory) if late[0] > 3 else []

    monkeypatch.setattr("lastgasp.sharing.os.listdir", slow)
    assert outcomes([tmp_path] * 2, ["a", "b"]) == ["", ""]
    assert late[0] == 4


def test_on_one_host_nothing_is_looked_for(tmp_path: Path) -> None:
    assert outcomes([tmp_path, tmp_path / "none"], ["a", "a"]) == ["", ""]


@pytest.mark.parametrize("hosts", ["aa", "aabb", "abab", "abbb"])
def test_each_host_reads_all_of_a_checkpoint_once_whatever_numbers_its_ranks_have(
    hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torchrun --virtual-local-rank` gives all ranks LOCAL_RANK=0; srun and mpirun give numbers in any order."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(sharing, "host_identity", lambda: hosts[int(threading.current_thread().name)])
    put_file(tmp_path, 10)
    read: dict[str, list[int]] = {host: [] for host in hosts}
    moving: dict[str, int] = dict.fromkeys(hosts, 0)

    def select(rank: int, gather: Gather) -> None:
        threading.current_thread().name = str(rank)
        place = Place(rank=rank, world_size=len(hosts), replicas=data_parallel(len(hosts)), job="job")
        policy = SelectionPolicy(GaspConfig.resolve(tmp_path), place, [tmp_path], FILES)
        found = CheckpointSelector(policy, gather).select()
        assert found is not None
        number, count = policy.local
        read[hosts[rank]] += range(5)[number::count]
        moving[hosts[rank]] += policy.may_move

    as_ranks(len(hosts), select)
    assert all(sorted(chunks) == [*range(5)] for chunks in read.values()), read
    assert set(moving.values()) == {1}


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_ranks_of_different_users_that_cannot_read_one_another_are_told(
    hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With umask 077: a fault would be answered by a save, and the restart find nothing that it may read."""
    opened = Path.open

    def denied(path: Path, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "1":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(sharing.os, "geteuid", lambda: 7 + int(threading.current_thread().name))  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "lastgasp"):
        assert outcomes([tmp_path] * 2, [*hosts]) == ["", ""]
    [said] = caplog.messages
    assert said.startswith(f"rank 1 (user 8) cannot read what rank 0 (user 7) writes in {tmp_path} (Permission denied)")
    assert "umask 027" in said and list(tmp_path.iterdir()) == []


def test_ranks_of_different_users_that_can_read_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sharing.os, "geteuid", lambda: 7 + int(threading.current_thread().name))  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "lastgasp"):
        assert outcomes([tmp_path] * 2, ["a", "a"]) == ["", ""]
    assert caplog.messages == []
