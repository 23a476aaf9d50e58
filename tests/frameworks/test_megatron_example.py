"""examples/megatron_gpt as its README says: real text, killed, resumed, the losses of a run that was not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.events import decode_incident
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import Finished, run_job
from support.megatron import place

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/megatron_gpt"
LIMIT = 400.0
LAYOUT = DirectoryLayout("iter_*")
LOSS = re.compile(r"iteration +(\d+)/ .*? lm loss: (\S+) ")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


def environment() -> dict[str, str]:
    """As in a shell with lastgasp and Megatron installed."""
    paths = [place.folder(), *(ROOT / path for path in ("core", "plugins/megatron"))]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prepare.py writes."""
    folder = tmp_path_factory.mktemp("gpt") / "data"
    command = [sys.executable, str(EXAMPLE / "prepare.py"), str(folder)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def run(out: Path, data: Path, *options: str, **environ: str) -> Finished:
    """run.sh on prepared data."""
    out.mkdir()
    (out / "data").symlink_to(data)
    command = [str(EXAMPLE / "run.sh"), *options]
    return run_job(command, out / "log", timeout=LIMIT, environ=environment() | {"OUT": str(out)} | environ)


def losses(done: Finished) -> dict[int, list[str]]:
    """Iteration -> each loss that was logged for it."""
    found: dict[int, list[str]] = {}
    for iteration, loss in LOSS.findall(done.output):
        found.setdefault(int(iteration), []).append(loss)
    return found


def test_the_text_is_all_there(data: Path) -> None:
    numpy = pytest.importorskip("numpy")
    words = json.loads((data / "vocabulary.json").read_text())
    assert len(words) == len(set(words)) == 511
    text, documents = "", []
    for number in numpy.fromfile(data / "topics.bin", dtype=numpy.uint16):
        if number == len(words):
            documents.append(text)
            text = ""
        else:
            text += words[number]
    assert documents == [text for _, text in sorted(topics.items())]
    assert (data / "topics.idx").stat().st_size > 0


def check(folder: Path, data: Path, last: int, fault: int, *options: str) -> None:
    """Uninterrupted, and killed with `fault` completed iterations: the same losses."""
    ends = ("--exit-interval", str(last), *options)
    whole = run(folder / "whole", data, *ends)
    assert whole.ok, whole.output[-4000:]
    fired = folder / "fired"
    kill = {"LASTGASP_FAULT": f"kind=sigkill,rank=1,step={fault},phase=forward", "LASTGASP_FAULT_LOG": str(fired)}
    broken = run(folder / "broken", data, *ends, **kill)
    assert broken.ok, broken.output[-4000:]
    assert len(read_log(fired)) == 1
    (record,) = (folder / "broken/ckpt/incidents").glob("*.json")
    incident = decode_incident(record.read_bytes())
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", fault, 0)
    found = candidates([folder / "broken/ckpt"], LAYOUT)
    assert {fault, last} <= {c.step for c in found} and all(verify(c.path, LAYOUT).ok for c in found)
    expected, got = losses(whole), losses(broken)
    assert list(expected) == list(got) == list(range(1, last + 1))
    assert float(expected[last][0]) < float(expected[1][0]) - 0.5, "it learns"
    averaged = fault + 2  # Megatron's second line after a start is the mean of two iterations (megatron.md §6)
    assert {n: v for n, v in got.items() if n != averaged} == {n: v for n, v in expected.items() if n != averaged}


@pytest.mark.full
@pytest.mark.fault
def test_killed_and_resumed_the_losses_are_equal(data: Path, tmp_path: Path) -> None:
    check(tmp_path, data, 12, 6, "--save-interval", "5")


@pytest.mark.fault
@pytest.mark.full
def test_killed_and_resumed_at_its_full_length(data: Path, tmp_path: Path) -> None:
    check(tmp_path, data, 60, 33)
