"""examples/pytorch_resnet: the job as a guide has it and as it becomes, killed and resumed; what its README tells."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from lastgasp.cli.verify import examine
from lastgasp.events import decode_incident
from lastgasp.testing import corrupt
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import Finished, run_job
from support.ports import free_port

torch = pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[pytorch]'")
if importlib.util.find_spec("sklearn") is None:  # 2 s to import, and only the jobs need it
    pytest.skip("needs scikit-learn: pip install 'lastgasp[demo]'", allow_module_level=True)

from lastgasp.pytorch import load, newest_good  # noqa: E402

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/pytorch_resnet"
README = (EXAMPLE / "README.md").read_text()
LIMIT = 200.0
STEPS = 92
"""Four epochs of 23 batches for each of two ranks."""
LAUNCHED = [sys.executable, "-m", "lastgasp", "run", "--nproc-per-node", "2"]


def lines(name: str) -> list[str]:
    return (EXAMPLE / name).read_text().splitlines(keepends=True)


def test_the_diff_in_the_readme_is_the_true_one() -> None:
    diff = "".join(difflib.unified_diff(lines("before.py"), lines("train.py"), "before.py", "train.py"))
    [shown] = re.findall(r"^```diff\n(.*?)^```$", README, re.M | re.S)
    assert shown == diff


def test_the_numbers_in_the_readme_are_those_of_the_diff() -> None:
    diff = list(difflib.unified_diff(lines("before.py"), lines("train.py"), n=0))[2:]
    words = [line[1:].strip() for line in diff]
    gone = [w for w, line in zip(words, diff, strict=True) if line[0] == "-" and w]
    new = [w for w, line in zip(words, diff, strict=True) if line[0] == "+" and w]
    only_moved = [w for w in new if w in gone]  # indented by the `with`
    [told] = re.findall(r"\*\*(\d+) lines\s+go, (\d+) lines come\*\*", README)
    assert told == (str(len(gone) - len(only_moved)), str(len(new) - len(only_moved)))


def run(command: list[str], log: Path, **environ: str) -> Finished:
    """As in a shell with lastgasp installed; fails the test unless the job ends well."""
    own = {"PYTHONPATH": str(ROOT / "core"), "OMP_NUM_THREADS": "1"}
    done = run_job(command, log, timeout=LIMIT, environ=os.environ | own | environ)
    assert done.ok, done.output[-4000:]
    return done


def by_hand(script: str, folder: Path, *options: str) -> list[str]:
    """Two processes that get rank and address from the environment and have no launcher."""
    port = free_port()
    rank = shlex.join([sys.executable, str(EXAMPLE / script), "--dir", str(folder / "ckpts"), *options])
    shell = (
        f"export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}; RANK=0 {rank} & first=$!; RANK=1 {rank} & "
        "wait $! && wait $first"
    )
    return ["bash", "-c", shell]


def launched(script: str, folder: Path, *options: str) -> list[str]:
    return [*LAUNCHED, str(EXAMPLE / script), "--dir", str(folder / "ckpts"), *options]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(by_hand("train.py", folder, "--final", str(folder / "final.pt")), folder / "log")
    return folder


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def best(folder: Path, rank: int) -> Any:
    """The rank's file: batch norms have statistics of their own on each rank."""
    return load(folder / "ckpts" / "best" / f"model_best.rank{rank}.pth.tar")


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "rank", "step", "phase"),
    [
        pytest.param("sigkill", 0, 33, "backward", marks=pytest.mark.full),
        pytest.param("sigkill", 1, 60, "forward", marks=pytest.mark.full),
        pytest.param("sigkill", 0, 69, "data", marks=pytest.mark.full),  # between two epochs
        pytest.param("exception", 1, 25, "update", marks=pytest.mark.full),
        pytest.param("sigterm", 0, 50, "backward", marks=pytest.mark.full),
    ],
)
def test_killed_and_resumed_it_ends_with_the_same_bits(
    undisturbed: Path, tmp_path: Path, kind: str, rank: int, step: int, phase: str
) -> None:
    fault = {"LASTGASP_FAULT": f"kind={kind},rank={rank},step={step},phase={phase}"}
    fault["LASTGASP_FAULT_LOG"] = str(tmp_path / "faults")
    done = run(launched("train.py", tmp_path, "--final", str(tmp_path / "final.pt")), tmp_path / "log", **fault)
    [fired] = read_log(tmp_path / "faults")
    assert (fired["kind"], fired["rank"], fired["step"], fired["phase"]) == (kind, rank, step, phase)
    [record] = (tmp_path / "ckpts" / "incidents").glob("*.json")
    incident = decode_incident(record.read_bytes())
    assert incident.steps_lost == 0, incident
    assert same(torch.load(tmp_path / "final.pt"), torch.load(undisturbed / "final.pt"))
    for number in range(2):
        ours, theirs = best(tmp_path, number), best(undisturbed, number)
        assert same(ours["model"], theirs["model"]), number
        assert (ours["epoch"], ours["accuracy"]) == (theirs["epoch"], theirs["accuracy"])
        assert f"best accuracy {ours['accuracy']:.4f}" in done.output
    assert examine(tmp_path / "ckpts").exit_code == 0
    assert examine(tmp_path / "ckpts" / "best").exit_code == 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_best_model_of_the_other_rank_replaces_a_damaged_one(undisturbed: Path, tmp_path: Path) -> None:
    names = {path.name for path in (undisturbed / "ckpts" / "best").glob("*.tar")}
    assert names == {"model_best.rank0.pth.tar", "model_best.rank1.pth.tar"}
    for path in (undisturbed / "ckpts" / "best").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = newest_good(tmp_path)
    assert first is not None
    os.utime(first, (2e9, 2e9))  # a time stamp proves nothing
    corrupt.flip_bit(Path(first), 50_000)
    second = newest_good(tmp_path)
    assert second is not None
    assert {Path(first).name, Path(second).name} == names
    assert load(second)["accuracy"] == best(undisturbed, 0)["accuracy"] == best(undisturbed, 1)["accuracy"]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_job_as_it_was_trains_on_a_damaged_file(tmp_path: Path) -> None:
    """Why it changes: a flipped bit in the newest file goes unseen, whatever its time stamp says."""
    run(by_hand("before.py", tmp_path, "--epochs", "2"), tmp_path / "log")
    saved = sorted((tmp_path / "ckpts").glob("rank*/model_best.pth.tar"))
    assert len(saved) == 2
    for path in saved:
        values = torch.load(path)["model"]["module.6.weight"]
        raw = path.read_bytes()
        at = raw.index(values.numpy().tobytes()) + 3
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x20]) + raw[at + 1 :])  # one bit of an exponent
        assert not torch.equal(torch.load(path)["model"]["module.6.weight"], values)
        os.utime(path, (1e9, 1e9))
    final = tmp_path / "final.pt"
    run(by_hand("before.py", tmp_path, "--epochs", "3", "--final", str(final)), tmp_path / "second")
    assert final.exists()
