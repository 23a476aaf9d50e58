"""What ranks know of one another once the controller is gone: files in the directory that they share."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastgasp.errors import ControlError, DeadlineExceeded
from lastgasp.gasp.by_files import ByFiles, ControllerLost, gather_saved
from lastgasp.gasp.meeting import remove_meetings
from lastgasp.topology import Place

WORLD = 3


def ranks(folder: Path, since_s: int = 1000) -> list[ByFiles]:
    """One of each rank."""
    replicas = tuple((rank,) for rank in range(WORLD))
    return [ByFiles(folder, Place(rank=rank, world_size=WORLD, replicas=replicas, job="j"), since_s)
            for rank in range(WORLD)]  # fmt: skip


def gathered(those: list[ByFiles], tag: str, begin: int = 0, seconds: float = 20.0) -> list[Any]:
    """What each gets, or is raised there; all at once."""
    found: list[Any] = [None] * len(those)

    def run(number: int) -> None:
        try:
            found[number] = those[number].gather(tag, b"%d" % (begin + number), seconds)
        except (ControlError, DeadlineExceeded) as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(those))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_each_gets_what_all_have_also_for_the_same_again_and_little_is_left(tmp_path: Path) -> None:
    those = ranks(tmp_path)
    for begin in range(4):
        wanted = [b"%d" % (begin + number) for number in range(WORLD)]
        assert gathered(those, "loop/save/4", begin) == [wanted] * WORLD
    [folder] = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == WORLD + 1, "those of the last one"
    remove_meetings(tmp_path, "another job")
    assert list(tmp_path.iterdir()) == [folder]
    os.utime(folder, (1, 1))
    remove_meetings(tmp_path, "another job")
    assert list(tmp_path.iterdir()) == []


def test_another_run_s_files_count_for_nothing(tmp_path: Path) -> None:
    gathered(ranks(tmp_path), "a")
    [error] = gathered(ranks(tmp_path, since_s=2000)[:1], "a", seconds=0.1)
    assert isinstance(error, DeadlineExceeded)


def test_the_wait_has_an_end(tmp_path: Path) -> None:
    found = gathered(ranks(tmp_path)[1:], "a", seconds=0.1)
    assert all(isinstance(error, DeadlineExceeded) for error in found)


class Lost:
    """A session whose controller is gone."""

    def __init__(self, directory: Path) -> None:
        self.config, self.started_s = SimpleNamespace(directory=directory), 1000
        self.place = Place(rank=0, world_size=1, replicas=((0,),), job="j")

    def gather(self, tag: str, payload: bytes, seconds: float) -> list[bytes]:
        raise ControllerLost(tag)


def test_a_disk_that_refuses_costs_a_checkpoint_and_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ControlError, match="by files: "):
        gather_saved(Lost(tmp_path / "file"), "a", b"")
    assert gather_saved(Lost(tmp_path), "a", b"own") == [b"own"]
