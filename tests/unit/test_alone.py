"""`adapter.alone`: whether another process has a directory, by real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lastgasp.adapter.alone import NAME, claim

HOLDER = """
import os, sys, time
from pathlib import Path
from lastgasp.adapter.alone import claim
print(claim(Path(sys.argv[1]))[0] or "alone", flush=True)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


@contextmanager
def holder(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process that has claimed the directory, with a child as of a data loader; and what it was told."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        told, child = process.stdout.readline().strip(), int(process.stdout.readline())
        try:
            yield process, told
        finally:
            os.kill(child, 9)
            process.kill()


def test_a_directory_belongs_to_one_living_process(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, told):
        assert told == "alone"
        found, release = claim(tmp_path)
        assert found == f"process {process.pid}"
        release()
        process.kill()
        process.wait(60)
        found, release = claim(tmp_path)  # its child lives, and has nothing
        assert found == ""
        again, also = claim(tmp_path)  # a second training of the same process
        assert again == ""
        also()
        release()
    assert not list(tmp_path.iterdir())
    with holder(tmp_path) as (_, told):
        assert told == "alone"


def test_what_cannot_be_known_is_not_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    assert claim(tmp_path)[0] == ""
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / NAME).unlink()

    def none(fd: int, command: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", none)
    found, release = claim(tmp_path)
    assert found == ""
    release()
