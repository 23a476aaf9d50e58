"""How many nodes and processes: what torchrun would end at with a traceback is refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.distributed.run import determine_local_world_size

from lastgasp.errors import ConfigError
from lastgasp.launch.numbers import require_numbers
from lastgasp.testing.jobs import run_job
from support.launchers import environment


@pytest.mark.parametrize(
    ("nnodes", "processes"),
    [("1", "2"), ("1:4", "1"), ("2:2", "auto"), ("1", "cpu"), (" 1 ", "+2")],
)
def test_what_torchrun_can_start_is_taken(nnodes: str, processes: str) -> None:
    require_numbers(nnodes, processes, determine_local_world_size)


@pytest.mark.parametrize(
    ("nnodes", "processes", "told"),
    [
        ("2:1", "2", "--nnodes='2:1' is not allowed: expected a number of nodes from 1 on, or MIN:MAX"),
        ("0", "2", "--nnodes='0'"),
        ("1:2:3", "2", "--nnodes='1:2:3'"),
        ("1:", "2", "--nnodes='1:'"),
        ("abc", "2", "--nnodes='abc'"),
        ("1", "0", "--nproc-per-node='0' is not allowed: expected a number of processes from 1 on"),
        ("1", "-1", "--nproc-per-node='-1'"),
        ("1", "abc", "--nproc-per-node='abc' .*torchrun: Unsupported nproc_per_node value: abc"),
        ("1", "1.5", "--nproc-per-node='1.5'"),
    ],
)
def test_what_it_cannot_is_refused(nnodes: str, processes: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        require_numbers(nnodes, processes, determine_local_world_size)


def test_a_kind_of_device_that_is_not_there_is_refused() -> None:
    def none(word: str) -> int:
        raise ValueError("Cuda is not available.")

    with pytest.raises(ConfigError, match="torchrun: Cuda is not available"):
        require_numbers("1", "gpu", none)
    with pytest.raises(ConfigError, match="There is none here"):
        require_numbers("1", "gpu", lambda word: 0)


def test_it_is_one_line_and_wrong_usage(tmp_path: Path) -> None:
    """The number may also come from torchrun's variable."""
    command = [sys.executable, "-m", "lastgasp", "run", "--nnodes", "2:1", "nosuch.py"]
    done = run_job(command, tmp_path / "log", timeout=60.0, environ=environment(PET_NPROC_PER_NODE="2"))
    assert done.returncode == 2, done.output
    [line] = done.output.strip().splitlines()
    assert line.startswith("Error: --nnodes='2:1' is not allowed: expected"), done.output
