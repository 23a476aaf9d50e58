"""`examples/transformers_tiny` as its README shows it, and the code that README and docs/transformers.md show."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences
from support.pages import DOCS, README, ROOT, blocks

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

SCRIPT = ROOT / "examples/transformers_tiny/train.py"
LIMIT = 400.0
USERS = """\
import sys
sys.path.insert(0, {tests!r})
from support.train_transformers import Tokens, model
from transformers import Trainer, TrainingArguments
model, dataset = model(), Tokens(16)
arguments = TrainingArguments("hf_readme", max_steps=2, use_cpu=True, report_to=[])
"""
"""What the user has."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_what_is_shown_runs(tmp_path: Path) -> None:
    for page in (README, DOCS / "transformers.md"):
        [shown] = [text for text in blocks(page, "python") if "lastgasp_transformers" in text]
        (tmp_path / f"shown_{page.stem}.py").write_text(USERS.format(tests=str(ROOT / "tests")) + shown)
    run = f"cd {tmp_path} && {sys.executable} shown_README.py && exec {sys.executable} shown_transformers.py"
    environ = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = run_job(["sh", "-c", run], tmp_path / "log", timeout=LIMIT, environ=environ)
    assert done.ok, done.output[-4000:]
    assert (tmp_path / "hf_out/checkpoint-12.manifest.json").exists()


@pytest.mark.full
@pytest.mark.fault
def test_the_example_is_killed_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    text = (SCRIPT.parent / "README.md").read_text()
    fault = text.partition('LASTGASP_FAULT="')[2].partition('"')[0]
    assert fault == "kind=sigkill,rank=1,step=33,phase=forward"
    for name, environ in {"straight": {}, "killed": {"LASTGASP_FAULT": fault}}.items():
        command = [sys.executable, "-m", "lastgasp", "run", "--nproc-per-node", "2", str(SCRIPT)]
        command += ["--dir", str(tmp_path / name), "--final", str(tmp_path / f"{name}.pt")]
        done = run_job(command, tmp_path / "log", timeout=LIMIT, environ=os.environ | environ)
        assert done.ok, done.output[-4000:]
    steps = sorted(int(path.name.split("-")[1]) for path in (tmp_path / "killed").glob("checkpoint-*[0-9]"))
    assert steps == [20, 33, 40, 60]
    assert differences(tmp_path / "straight.pt", tmp_path / "killed.pt") == []
