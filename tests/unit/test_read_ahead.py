"""What was saved is in the page cache when the ranks of the restarted job read it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
from benchmarks.harness import drop_cache

from lastgasp.gasp.read_ahead import ReadAhead

PAGES = 300
"""More than a file system reads at once when only its beginning is asked for."""


def cached(path: Path) -> bool:
    """Whether all of it is in memory. Only asked: a read, even one that does not wait, would bring it there."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        there = (ctypes.c_ubyte * (-(-len(pages) // mmap.PAGESIZE)))()
        first = ctypes.c_char.from_buffer(pages)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(pages)), there)
        del first
    assert not failed
    return all(one & 1 for one in there)


def put(path: Path) -> Path:
    """A file of which nothing is in the page cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(PAGES * 4096 + 100))
    drop_cache(path)
    if cached(path):
        pytest.skip("this file system holds its files in memory")
    return path


def read(ahead: ReadAhead, checkpoint: Path, alone: bool = True) -> None:
    """Let it end."""
    ahead.begin(str(checkpoint), alone)
    assert ahead.thread is not None
    ahead.thread.join(30)
    assert not ahead.thread.is_alive()


def test_a_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = put(tmp_path / "gasp-step=00000012.pt")
    read(ReadAhead(), path)
    assert cached(path)


def test_so_is_everything_in_a_directory_and_nothing_beside_it(tmp_path: Path) -> None:
    parts = [put(tmp_path / "gasp-step=00000012.dcp" / name) for name in ("a", "folder/b")]
    beside = put(tmp_path / "gasp-step=00000011.pt")
    read(ReadAhead(), parts[0].parent)
    assert all(map(cached, parts)) and not cached(beside)


def test_of_several_hosts_none_reads_what_is_for_the_others(tmp_path: Path) -> None:
    part, file = put(tmp_path / "gasp-step=00000012.dcp" / "a"), put(tmp_path / "gasp-step=00000012.pt")
    read(ReadAhead(), part.parent, alone=False)
    read(ReadAhead(), file, alone=False)
    assert cached(file) and not cached(part)


@pytest.mark.parametrize("room", [None, 4096])
def test_nothing_is_where_it_would_not_stay_in_memory(room: int | None, tmp_path: Path) -> None:
    path = put(tmp_path / "gasp-step=00000012.pt")
    read(ReadAhead(lambda: room), path)
    assert not cached(path)


def test_what_is_not_there_is_nobodys_problem(tmp_path: Path) -> None:
    read(ReadAhead(), tmp_path / "gasp-step=00000012.pt")


def test_a_pipe_in_it_is_left_alone(tmp_path: Path) -> None:
    path = put(tmp_path / "folder" / "part")
    os.mkfifo(tmp_path / "folder" / "a-pipe")
    read(ReadAhead(), tmp_path / "folder")
    assert cached(path)


def test_the_next_one_ends_the_one_before(tmp_path: Path) -> None:
    ahead, one = ReadAhead(), put(tmp_path / "one")
    ahead.begin(str(one), alone=True)
    first = ahead.thread
    read(ahead, put(tmp_path / "other"))
    assert first is not None
    first.join(30)
    assert not first.is_alive() and cached(tmp_path / "other")
