"""Slurm starts the ranks of a Lightning job itself, by `srun`: there is no launcher, and nobody restarts but Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.testing.weights import differences
from support import lean
from support.launchers import SUPPORT, Running, incidents, running
from support.ports import free_port

WORKER = SUPPORT / "train_requeued.py"
pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]


def srun(folder: Path, **variables: str) -> list[Running]:
    """Run both ranks of the job to their ends, in `folder`."""
    path = f"{folder}:/usr/bin:/bin"
    common = {
        "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "MASTER_PORT": str(free_port()),
        "PATH": path,
    }  # fmt: skip
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/requeued\n')
    (folder / "scontrol").chmod(0o755)
    script = [lean.python(), str(WORKER), str(folder / "d"), str(folder / "final.pt")]
    each = [["env", "-C", str(folder), f"SLURM_PROCID={rank}", f"SLURM_LOCALID={rank}", *script] for rank in range(2)]
    with running(folder, *each, **common, **variables) as ranks:
        for rank in ranks:
            rank.code()
    return ranks


def test_a_killed_rank_and_a_job_that_was_requeued(tmp_path: Path) -> None:
    """What Lightning saves when its time is up has a manifest, and what was saved after it, being newer, is taken."""
    plain, folder = tmp_path / "plain", tmp_path / "job"
    plain.mkdir()
    folder.mkdir()
    assert [rank.code() for rank in srun(plain, LASTGASP="0")] == [0, 0]
    ranks = srun(folder, REQUEUE_AT="5")
    assert (folder / "requeued").read_text() == "requeue 4711\n", ranks[0].output
    assert (folder / "hpc_ckpt_1.ckpt.manifest.json").exists()
    (folder / "final.pt").unlink()  # Slurm ends the job; nothing does so here
    ranks = srun(folder, LASTGASP_FAULT="kind=sigkill,rank=1,step=12,phase=backward")
    assert [rank.code() for rank in ranks] == [exitcodes.SAVED, -9], ranks[0].output
    assert "resumes from step 5" in ranks[0].output
    [incident] = incidents(folder / "d")
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 12, 0)
    ranks = srun(folder)
    assert [rank.code() for rank in ranks] == [0, 0], ranks[0].output
    assert "resumes from step 12" in ranks[0].output
    assert differences(plain / "final.pt", folder / "final.pt") == []
