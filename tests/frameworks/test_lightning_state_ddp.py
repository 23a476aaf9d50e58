"""Two real DDP ranks over gloo: a dump without a collective, on either rank, resumes bit-equal on both."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from frameworks.state_rig import differences
from lastgasp_lightning.state import LightningState
from support import lean

ROOT = Path(__file__).parent.parent.parent
CHILD = Path(__file__).parent / "ddp_state_child.py"


def launch(directory: Path, what: str, **extra: str) -> list[int]:
    """Run both ranks; the rendezvous port is chosen by the kernel (torchrun's standalone mode)."""
    path = os.pathsep.join(str(ROOT / p) for p in ("core", "plugins/lightning", "tests"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}
    command = [lean.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    job = subprocess.run(
        [*command, lean.python(), "-W", "ignore", str(CHILD), str(directory), what],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=250,
    )
    if job.returncode and "exitcode  : 7" not in job.stderr:
        pytest.fail(job.stderr[-4000:])
    return [job.returncode]


def left(directory: Path, kind: str, rank: int) -> Any:
    return torch.load(directory / f"{kind}{rank}.pt", weights_only=False)


def compare(directory: Path, resumed: str, skip: tuple[str, ...] = ()) -> None:
    for rank in range(2):
        straight, other = left(directory, "straight", rank), left(directory, resumed, rank)
        tail = {k: v for k, v in straight["losses"].items() if k in other["losses"]}
        assert other["losses"]
        assert tail == other["losses"]
        for value in (straight, other):
            for name in ("losses", *skip):
                value.pop(name)
        assert differences(straight, other) == []


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({}, False),
        ({"broadcast_buffers": None}, False),
        ({"broadcast_buffers": True}, False),
        ({"broadcast_buffers": False}, True),
        ({"forward_sync_buffers": False}, True),  # as torch 2.13 calls it
        ({"forward_sync_buffers": True, "broadcast_buffers": False}, False),
    ],
)
def test_whose_buffers_a_rank_has(given: dict[str, Any], own: bool) -> None:
    state: Any = object.__new__(LightningState)
    module = SimpleNamespace(automatic_optimization=True)
    state._trainer = SimpleNamespace(world_size=2, strategy=DDPStrategy(**given), lightning_module=module)
    assert state.per_rank_buffers is own


@pytest.mark.full
@pytest.mark.fault
@pytest.mark.parametrize("broadcast", ["1", pytest.param("0", marks=pytest.mark.full)])
def test_ddp_resumes_bit_equal(broadcast: str, tmp_path: Path) -> None:
    environment = {"BROADCAST_BUFFERS": broadcast}
    launch(tmp_path, "straight", **environment)
    launch(tmp_path, "dump:6", **environment)
    for rank in range(2):
        launch(tmp_path, f"resume:{tmp_path / f'gasp{rank}.ckpt'}", **environment)
        compare(tmp_path, "resume")
    # a periodic checkpoint holds every rank's auxiliary state too
    launch(tmp_path, f"resume:{tmp_path / 'step=4.ckpt'}", **environment)
    compare(tmp_path, "resume")
