"""The real Megatron without lastgasp, and after uninstall: not one attribute differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.megatron import place
from support.megatron.job import SCRIPT, GptJob

PROGRAM = Path(__file__).parents[1] / "support/megatron_off.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


def told(mode: str, folder: Path) -> dict[str, Any]:
    """Three iterations with a save, on one rank."""
    job = GptJob(folder=folder, flags="--bf16 --train-iters 3 --save-interval 2 --lr-warmup-iters 1", last=100)
    (folder / "losses").mkdir()
    command = job.command()
    arguments = command[command.index(str(SCRIPT)) + 1 :]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), mode, *arguments],
        env=job.environment() | {"LASTGASP_MARKS": "all"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_not_one_attribute_of_megatron_differs(tmp_path: Path) -> None:
    (tmp_path / "stock").mkdir()
    (tmp_path / "undone").mkdir()
    stock, undone = told("stock", tmp_path / "stock"), told("undone", tmp_path / "undone")
    # Where lastgasp is installed, torch itself loads the entry point that serves `torchrun`; it does nothing in a rank.
    hook = {"lastgasp", "lastgasp._version", "lastgasp.exitcodes", "lastgasp.launch", "lastgasp.launch.torchrun_hook"}
    assert set(stock["loaded"]) <= hook, "without lastgasp nothing of it is imported"
    assert stock["placed"] == stock["left"] == []
    assert "lastgasp_megatron.marks" in undone["loaded"]
    names = {name.rpartition(".")[2] for name in undone["placed"]}
    assert {"train_step", "pretrain", "save_checkpoint", "load_checkpoint", "parse_args"} <= names, "it was installed"
    assert undone["left"] == []
    assert undone["changed"] == stock["changed"]
    assert sorted(path.name for path in (tmp_path / "undone/ckpt").glob("iter_*3*")) == [
        "iter_0000003",
        "iter_0000003.manifest.json",
    ]
