"""The public test kit: jobs that leave nothing, damage, and weights compared bit by bit."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from lastgasp.errors import CheckpointError
from lastgasp.testing.corrupt import flip_bit
from lastgasp.testing.jobs import MARK, marked, run_job
from lastgasp.testing.weights import differences, records

NAP = "import time; print(1, flush=True); time.sleep(600)"
DETACHED = (
    f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {NAP!r}], "
    "stdout=subprocess.PIPE, start_new_session=True); child.stdout.readline()"
)
"""Ends when that one runs: before, /proc shows neither its environment nor its command line."""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_job_that_ends_well(tmp_path: Path) -> None:
    code = "import os; print('hello', os.environ['WHO'], 'PATH' in os.environ)"
    done = run_job(python(code), tmp_path / "log", timeout=150, environ={"WHO": "you"})
    assert (done.returncode, done.output, done.left, done.ok) == (0, "hello you False\n", (), True)


def test_a_job_that_fails(tmp_path: Path) -> None:
    done = run_job(python("raise SystemExit(7)"), tmp_path / "log", timeout=150)
    assert (done.returncode, done.ok) == (7, False)


def test_a_job_that_does_not_end_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    done = run_job(python(f"{DETACHED}; {NAP}"), tmp_path / "log", timeout=1)
    assert (done.returncode, done.ok) == (None, False)


def test_a_process_that_outlives_its_job_is_reported_and_killed(tmp_path: Path) -> None:
    done = run_job(python(DETACHED), tmp_path / "log", timeout=150, grace=0.3)
    assert (done.returncode, done.ok) == (0, False)
    assert [NAP in process for process in done.left] == [True]


def test_marked_does_not_find_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "me")
    assert list(marked(MARK, "me")) == []
    assert os.getpid()


def test_one_bit_and_only_one_is_flipped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x00" * 10)
    flip_bit(path, 3, bit=5)
    assert path.read_bytes() == b"\x00\x00\x00\x20" + b"\x00" * 6
    flip_bit(path, 3, bit=5)
    assert path.read_bytes() == b"\x00" * 10
    with pytest.raises(ValueError, match="no byte 10"):
        flip_bit(path, 10)


def test_equal_weights_are_equal_whatever_their_file_is_called(tmp_path: Path) -> None:
    weights = {"a": torch.arange(4.0), "b": torch.tensor([1])}
    torch.save(weights, tmp_path / "one.pt")
    torch.save({name: value.clone() for name, value in weights.items()}, tmp_path / "other.pt")
    assert len(records(tmp_path / "one.pt")) == 3
    assert differences(tmp_path / "one.pt", tmp_path / "other.pt") == []


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.tensor([0.0, 1.0, 2.0, 3.0000002])},
        {"a": torch.arange(4.0) * -0.0 + torch.tensor([-0.0, 1, 2, 3])},
        {"a": torch.arange(4.0).view(2, 2)},
        {"a": torch.arange(4.0), "b": torch.zeros(1)},
        {"A": torch.arange(4.0)},
    ],
)
def test_any_difference_is_seen(changed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4.0)}, tmp_path / "one.pt")
    torch.save(changed, tmp_path / "other.pt")
    assert differences(tmp_path / "one.pt", tmp_path / "other.pt") != []


def test_what_is_not_an_archive_or_is_damaged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("weights")
    with pytest.raises(CheckpointError, match="not written by torch"):
        records(tmp_path / "text")
    torch.save({"a": torch.arange(4000.0)}, tmp_path / "one.pt")
    with zipfile.ZipFile(tmp_path / "one.pt") as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    flip_bit(tmp_path / "one.pt", largest.header_offset + 8000)
    with pytest.raises(CheckpointError, match="CRC"):
        records(tmp_path / "one.pt")
