"""Every command and every piece of code that README and docs/ show is run: here, or in the test that is named here."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from lastgasp.cli import main
from lastgasp.jobs.acjob.check import check_source, source_of
from lastgasp.testing.jobs import run_job
from support import lean
from support.acjob import NAME, bare, ready
from support.pages import DOCS, ROOT, SHOWN, blocks, shell_lines
from support.switch_job import job_here

LIMIT = 400.0
DRILL = 'LASTGASP_FAULT="kind=sigkill,rank=0,step=20,phase=backward" lastgasp run --nproc-per-node 2 train.py'
NEED_A_JOB = ("lastgasp ps", "lastgasp switch")
ELSEWHERE = {
    'LASTGASP_FAULT="kind=sigkill,rank=1,step=33,phase=forward" examples/megatron_gpt/run.sh': (
        "tests/frameworks/test_megatron_example.py"
    ),
    "pip install -e '.[lightning,cli]'": "tests/e2e/test_readme.py::test_extras_are_those_of_the_package",
    "pip install -e '.[mindformers]' -e plugins/mindformers": "tests/unit/test_build_hook.py",
    "pip install -e '.[pytorch]' -e plugins/mindio": "tests/unit/test_mindio_names.py",
    "pip install -e . -e plugins/taskd": "tests/unit/test_build_hook.py",
    "pip install -e '.[cli]'": "tests/e2e/test_readme.py::test_extras_are_those_of_the_package",
    "LASTGASP=1 LASTGASP_DIR=ckpts python train.py": "tests/e2e/test_resume.py",
    "lastgasp run --min-ranks 2 --nproc-per-node 4 train.py": "tests/fault/test_elastic.py",
    "lastgasp run --nproc-per-node 2 train.py": "tests/e2e/test_shown.py::test_the_drill",  # with a fault in front
    "lastgasp run --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id job1 --rdzv-endpoint node1:29400 "
    "train.py": (
        "tests/fault/test_hosts_training.py"  # with other numbers; the options: test_the_start_on_several_nodes
    ),
    "torchrun --nproc-per-node 2 train.py": "tests/fault/test_launch.py",
    "python train.py": "tests/e2e/test_shown.py::test_each_piece_of_code_runs",
    "lastgasp run --dry-run --nproc-per-node 8 train.py": "tests/contract/test_run_ascend.py",
    "lastgasp run --dry-run --framework megatron --nproc-per-node 8 pretrain_gpt.py --save ckpts --load ckpts": (
        "tests/contract/test_run_ascend.py"
    ),
    "python -m benchmarks --quick": "tests/unit/test_benchmarks.py",
    "python -m benchmarks marks slow": "tests/unit/test_benchmarks.py",
    "python -m benchmarks --publish": "tests/unit/test_benchmarks.py",
}
"""Commands that are not run here -> the test that does; make's are compared with the Makefile."""
CODE_ELSEWHERE = {
    "from lastgasp_transformers import LastGasp": "tests/e2e/test_transformers_example.py::test_what_is_shown_runs",
    "from torch.distributed.fsdp import fully_shard": "tests/fault/test_sharded_faults.py::test_sharded_covering",
    "from torch.distributed.optim import ZeroRedundancyOptimizer": "tests/fault/test_zero_faults.py::test_zero",
    "from torch.distributed.checkpoint.format_utils import": (
        "tests/fault/test_zero_faults.py::test_without_lastgasp"
    ),
    "import deepspeed": "tests/fault/test_deepspeed_faults.py::test_deepspeed_covering",  # where it is installed
    "from lightning.pytorch import LightningModule, Trainer\nfrom lightning.pytorch.callbacks import ModelCheckpoint\n"
    "from lightning.pytorch.strategies import ModelParallelStrategy": (
        "tests/fault/test_lightning_sharded_faults.py::test_lightning_sharded_covering"
    ),
    "import lastgasp_megatron": "tests/contract/test_megatron_hooks.py",
    "from lastgasp_mindformers import LastGasp": "tests/frameworks/test_mindspore_callbacks.py",
    "from lastgasp.tensorflow import newest_good, seal": "tests/frameworks/test_tensorflow_real.py",
}
"""How a piece of code begins that needs another environment -> the test that runs the same calls there."""
LOOP_PAGE, AGAIN_PAGE = "plain-loop.md", "in-place.md"
PRELUDE = """\
import os, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
"""
BORING = "from lightning.pytorch.demos.boring_classes import BoringModel\nmodel = BoringModel()\n"
"""The user's model, with its data."""
HERE = {
    "lightning.md": BORING,
    "README.md": BORING,
    "getting-started.md": BORING,
    "elastic.md": """\
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
net = torch.nn.Linear(4, 1)
dataset = [(torch.full((4,), i / 8.0), torch.ones(1)) for i in range(20)]
""",
    "plain-files.md": "model, epoch, step = torch.nn.Linear(2, 1), 1, 10\nos.makedirs('ckpts', exist_ok=True)\n",
    LOOP_PAGE: """\
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
torch.distributed.init_process_group("gloo")
net = torch.nn.Linear(4, 1)
data = [(torch.full((4,), i / 8.0), torch.ones(1)) for i in range(8)]
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
evaluate = print
""",
}
"""Page -> what its pieces of code find."""


def pieces() -> list[tuple[str, str]]:
    """Page and text of each piece of code that one process can run. Two ranks cost as much as all of it: one device."""
    found = {text: page.name for page in SHOWN for text in blocks(page, "python")}
    return [
        (page, re.sub(r'devices=\d, strategy="ddp"', "devices=1", text))
        for text, page in found.items()
        if page not in (LOOP_PAGE, AGAIN_PAGE) and not text.lstrip().startswith(tuple(CODE_ELSEWHERE))
    ]


@pytest.fixture
def bin_of_lean(tmp_path: Path) -> Path:
    """`python`, `lastgasp` and `torchrun` of the environment that sees Lightning and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, module in (("python", ""), ("lastgasp", "-m lastgasp"), ("torchrun", "-m torch.distributed.run")):
        (folder / name).write_text(f'#!/bin/sh\nexec {lean.python()} {module} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def shell(line: str, folder: Path, programs: Path) -> str:
    """Run one of them as a user would, in `folder`. Returns the end of what it has written.

    Raises:
        AssertionError: it failed, or left processes.
    """
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    done = run_job(["bash", "-c", f"cd {folder} && {line}"], folder / "log", timeout=LIMIT, environ=environ)
    assert done.ok, f"{line}\n{done.output[-4000:]}"
    return done.output[-4000:]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(600)
def test_the_drill_and_the_commands_that_look_at_it(
    tmp_path: Path, bin_of_lean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the loop of docs/plain-loop.md, whose ranks start in a third of the time; Lightning's: test_matrix.py."""
    loop, _ = blocks(DOCS / LOOP_PAGE, "python")  # the other one: test_ignite.py
    (tmp_path / "train.py").write_text(PRELUDE + HERE[LOOP_PAGE] + loop.replace("s.epochs(90)", "s.epochs(12)"))
    assert DRILL in shell_lines()
    shell(DRILL, tmp_path, bin_of_lean)
    [record] = (tmp_path / "ckpts" / "incidents").glob("*.json")
    incident = json.loads(record.read_text())
    assert (incident["ending"], incident["step_saved"], incident["steps_lost"]) == ("saved", 20, 0)

    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(bare())
    Path("taskd_log").symlink_to("ckpts")  # where scripts that were edited for TaskD have their marks
    for line in in_this_process():
        command(line)


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(600)
def test_the_loop_that_is_entered_again(tmp_path: Path, bin_of_lean: Path) -> None:
    """With the data of docs/plain-loop.md; a step that fails on one rank is done again."""
    [loop] = blocks(DOCS / AGAIN_PAGE, "python")
    given = HERE[LOOP_PAGE].replace('torch.distributed.init_process_group("gloo")\n', "")
    given = given.replace("DistributedSampler(data)", "DistributedSampler(data, 2, int(os.environ['RANK']))")
    (tmp_path / "train.py").write_text(PRELUDE + given + loop.replace("s.epochs(90)", "s.epochs(12)"))
    fault = 'LASTGASP_FAULT="kind=exception,rank=1,step=20,phase=backward"'
    output = shell(f"{fault} lastgasp run --nproc-per-node 2 train.py", tmp_path, bin_of_lean)
    [record] = (tmp_path / "ckpts" / "incidents").glob("*.json")
    incident = json.loads(record.read_text())
    assert (incident["ending"], incident["rung"], incident["steps_lost"]) == ("in_place", "retry", 0), output


def in_this_process() -> list[str]:
    """Commands that start no job and need none."""
    ours = [line for line in shell_lines() if line.startswith("lastgasp ") and line not in ELSEWHERE]
    return [line for line in ours if not line.startswith(NEED_A_JOB)]


def command(line: str) -> None:
    """Run `lastgasp ...` up to the first pipe; what goes on for ever ends after a second."""
    words = shlex.split(line.partition(" | ")[0])[1:]
    words += ["--for", "1"] if "--follow" in words else []
    done = CliRunner().invoke(main, words)
    # A machine or a job file may have faults: then doctor and check end with 1, and say which.
    allowed = (0, 1) if words[0] == "doctor" or words[:2] == ["job", "check"] else (0,)
    assert done.exit_code in allowed, f"{line}\n{done.output[-3000:]}{done.exception!r}"
    assert done.output.strip(), line


def test_the_commands_for_a_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP_RUNTIME_DIR", str(tmp_path / "run"))
    lines = [line for line in shell_lines() if line.startswith(NEED_A_JOB)]
    assert len(lines) >= 4
    for line in lines:
        with job_here(6):
            command(line)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_piece_of_code_runs(tmp_path: Path, bin_of_lean: Path) -> None:
    """All in one process, one after the other, each in a folder of its own."""
    names = []
    for number, (page, text) in enumerate(pieces()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "piece.py").write_text(PRELUDE + HERE.get(page, "") + text)
        names.append(str(folder))
    assert len(names) >= 6
    run = "import os, runpy, sys\nfor folder in sys.argv[1:]:\n    os.chdir(folder)\n    runpy.run_path('piece.py')\n"
    (tmp_path / "all.py").write_text(run)
    shell(f"python all.py {' '.join(names)}", tmp_path, bin_of_lean)


def test_nothing_that_is_shown_is_left_out() -> None:
    known = {*ELSEWHERE, DRILL, *in_this_process()}
    left = [line for line in shell_lines() if line not in known and not line.startswith((*NEED_A_JOB, "make "))]
    assert left == []
    assert set(ELSEWHERE) <= set(shell_lines()), "not shown any more"
    for name in {*ELSEWHERE.values(), *CODE_ELSEWHERE.values()}:
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file() and f"def {test}" in (ROOT / path).read_text(), name
    shown = [text for page in SHOWN for text in blocks(page, "python")]
    assert all(any(text.lstrip().startswith(begin) for text in shown) for begin in CODE_ELSEWHERE)


def test_the_start_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line, the script for Slurm and the Job give lastgasp the same options, which it takes, given a secret."""
    page = DOCS / "getting-started.md"
    (script,), (job,) = blocks(page, "bash"), (YAML(typ="safe").load(text) for text in blocks(page, "yaml"))
    pod = job["spec"]["template"]["spec"]
    lines = [line for line in page.read_text().splitlines() if "run --nnodes" in line and "[" not in line]
    commands = [shlex.split(line.removeprefix("srun ")) for line in lines] + [pod["containers"][0]["command"]]
    assert len(commands) == 3 and f"srun {lines[1].removeprefix('srun ')}" in script
    assert len({tuple(word for word in words if word.startswith("--")) for words in commands}) == 1
    for words in commands:
        for secret, code in (("7" * 32, 0), ("", 2)):
            monkeypatch.setenv("LASTGASP_TOKEN", secret)
            done = CliRunner().invoke(main, ["run", "--dry-run", *words[2:]])
            assert done.exit_code == code, done.output
    assert pod["volumes"][0]["secret"]["defaultMode"] == 0o400


GUIDES = sorted(path for path in (DOCS / "guides").glob("*.md") if not path.name.endswith(".zh-CN.md"))


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guides_chinese_page_keeps_pace(page: Path) -> None:
    """The same commands and YAML, and a row for each row."""
    chinese = page.with_suffix(".zh-CN.md")
    for language in ("sh", "yaml"):
        assert blocks(chinese, language) == blocks(page, language)
    widths = [
        [line.replace("\\|", "").count("|") for line in path.read_text().splitlines() if line.startswith("|")]
        for path in (page, chinese)
    ]
    assert widths[0] == widths[1] and len(widths[0]) > 4
    assert f"({chinese.name})" in page.read_text() and f"({page.name})" in chinese.read_text()


def test_the_mounts_that_are_shown_are_right() -> None:
    """In every replica type of a job that is ready otherwise, MindCluster's rules find nothing in them."""
    (shown,) = blocks(DOCS / "guides/slow-nodes.md", "yaml")
    mounts, job = YAML(typ="safe").load(shown), YAML(typ="safe").load(ready())
    for replica in job["spec"]["replicaSpecs"].values():
        pod = replica["template"]["spec"]
        pod["containers"][0].setdefault("volumeMounts", []).extend(mounts["volumeMounts"])
        pod.setdefault("volumes", []).extend(mounts["volumes"])
    text = io.StringIO()
    YAML(typ="safe").dump(job, text)
    found = [one for one in check_source(source_of(NAME, text.getvalue().encode())) if "mount" in one.what]
    assert [one.what for one in found if one.severity == "error"] == []


def test_what_the_code_finds_is_for_pages_that_show_code() -> None:
    shown = {page.name for page in SHOWN if blocks(page, "python")}
    assert set(HERE) <= shown
