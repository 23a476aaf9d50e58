"""Real MindFormers jobs over damaged checkpoints: they fall back, all ranks to the same step (mindformers.md §5).

One job leaves checkpoints of steps 4, 8, 12 and 16, or of others where a rank was killed on the way; each is damaged in
another way, and the next job goes on behind the newest that is good, with the losses that it had before.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastgasp import exitcodes
from lastgasp.adapter.mindspore import ITERATIONS, LEGACY
from lastgasp.checkpoint import candidates, verify
from lastgasp.cli.manifest import adopt_all
from lastgasp.events import decode_incident
from lastgasp.mindspore.content import read_content
from lastgasp.steps.report.job import JobReader
from lastgasp.steps.report.sources import locate
from lastgasp.testing import corrupt
from lastgasp.testing.faults import read_log
from support.mindspore import place
from support.mindspore.job import LlamaJob

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]
LIMIT = 400.0
"""Seconds for one job on a loaded machine; 20 on an idle one."""
EACH_EPOCH, LAST, KILLED = 8, 16, 11
NAMES = {4: "1_4", 8: "1_8", 12: "2_4", 16: "2_8"}


def _job(folder: Path, ext: str, ranks: int, version: str = place.MAIN, **changes: Any) -> LlamaJob:
    own = {
        "lastgasp": {"enable": True},
        "load_ckpt_format": ext,
        "callbacks.1.checkpoint_format": ext,
        "callbacks.1.keep_checkpoint_max": 8,
    }
    return LlamaJob(folder=folder, ranks=ranks, launcher="run", version=version, changes=own | changes)


def _trained(job: LlamaJob, ext: str) -> LlamaJob:
    done = job.run(timeout=LIMIT)
    assert done.returncode == 0, done.output[-4000:]
    found = candidates([job.checkpoints], LEGACY)
    assert [c.step for c in found] == [16, 12, 8, 4], done.output[-4000:]
    assert all(verify(c.path, LEGACY).ok for c in found)
    for step, name in NAMES.items():
        assert read_content(job.checkpoints / f"rank_0/tiny_rank_0-{name}.{ext}").numbers["step_num"] == step
    return job


def _goes_on_from(job: LlamaJob, step: int) -> str:
    """The next job starts behind `step` on each rank, and its losses are those of the first one."""
    done = job.run(timeout=LIMIT)
    assert done.returncode == 0, done.output[-4000:]
    for rank in range(job.ranks):
        assert job.steps(rank)[-1] == list(range(step + 1, LAST + 1))
    assert all(len(set(losses)) == 1 for losses in job.losses().values())
    return done.output


def _file(job: LlamaJob, step: int, rank: int, ext: str) -> Path:
    return job.checkpoints / f"rank_{rank}/tiny_rank_{rank}-{NAMES[step]}.{ext}"


def _killed(job: LlamaJob) -> list[str]:
    """Train, with a rank killed on the way: the step that was saved is resumed, and each step of both has its marks.

    The other one is held up behind its update, so that its callbacks never see the end of that step. For much less than
    the two seconds after which a rank ends that does not leave its training: it would not mark that step.

    Returns the names of the checkpoints, the newest first; MindFormers counts anew from where it was resumed.
    """
    fired = job.folder / "fired"
    faults = (
        f"kind=sleep:0.4,rank=0,step={KILLED - 1},phase=after_update",
        f"kind=sigkill,rank=1,step={KILLED},phase=forward",
    )
    fault = {"LASTGASP_FAULT": ";".join(faults), "LASTGASP_FAULT_LOG": str(fired)}
    done = job.run(fault, timeout=LIMIT)
    assert done.returncode == 0, done.output[-4000:]
    assert len(read_log(fired)) == 2
    found = candidates([job.checkpoints], LEGACY)
    assert [c.step for c in found] == [16, 15, KILLED, 8, 4], done.output[-4000:]
    assert all(verify(c.path, LEGACY).ok for c in found)
    [incident] = [decode_incident(path.read_bytes()) for path in (job.folder / "output/incidents").glob("*.json")]
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", KILLED, 0)
    for rank in (0, 1):
        assert job.steps(rank)[-1] == list(range(KILLED + 1, LAST + 1))
    reader = JobReader(locate(job.folder / "output/profiling"))
    reader.read()
    reader.end()
    ranks = reader.job().ranks
    assert set(ranks) == {0, 1}
    for data in ranks.values():
        assert set(data.table.numbers) == set(range(1, LAST + 1))
        assert (data.unreadable, data.dropped) == (0, 0)
        assert all(seconds > 0 for seconds in data.table.times("time"))
        assert any(seconds > 0 for seconds in data.table.times("data"))
    return [c.path.name for c in found]


@pytest.mark.parametrize("version", [place.MAIN, pytest.param(place.OLD, marks=pytest.mark.full)])
def test_killed_then_flipped_truncated_and_missing_with_two_ranks(tmp_path: Path, version: str) -> None:
    if place.missing(version):
        pytest.skip(place.missing(version))
    job = _job(tmp_path, "safetensors", 2, version)
    names = _killed(job)
    mine = [job.checkpoints / "rank_1" / name.replace("tiny_rank", "tiny_rank_1", 1) for name in names]
    flipped, cut, missing = mine[:3]
    corrupt.flip_bit(flipped, flipped.stat().st_size // 2, 3)
    corrupt.truncate(cut, cut.stat().st_size // 2)
    corrupt.drop(missing)
    corrupt.truncate(job.checkpoints / "rank_1" / "meta.json", 9)
    said = _goes_on_from(job, 8)
    for path in (flipped, cut, missing):
        assert f"rank_1/{path.name} bytes" in said
    moved = sorted(path.name for path in job.checkpoints.glob("*.corrupt"))
    assert moved == sorted(f"{name}.corrupt" for name in names[:2])


def _begin(data: bytes, name: bytes) -> int:
    """Where the first parameter of that name begins: a newline and its length, a newline, the length of its name."""
    named = data.index(name) - 2
    for size in (1, 2, 3, 4):
        length = data[named - size : named]
        whole = all(byte & 0x80 for byte in length[:-1]) and not length[-1] & 0x80
        if whole and data[named - size - 1] == ord("\n"):
            return named - size - 1
    raise AssertionError("no parameter begins there")


@pytest.mark.full
def test_a_ckpt_cut_between_two_parameters_with_two_ranks(tmp_path: Path) -> None:
    job = _trained(_job(tmp_path, "ckpt", 2, run_mode="finetune"), "ckpt")
    cut, flipped = _file(job, 16, 1, "ckpt"), _file(job, 12, 0, "ckpt")
    corrupt.truncate(cut, _begin(cut.read_bytes(), b"adam_m."))
    assert "adam_m." not in read_content(cut).sizes  # a whole file, as far as the format tells
    corrupt.flip_bit(flipped, flipped.stat().st_size // 2, 3)
    said = _goes_on_from(job, 8)
    assert f"rank_1/{cut.name} bytes" in said


@pytest.mark.full
def test_one_rank_falls_back_and_refuses_when_all_are_bad(tmp_path: Path) -> None:
    job = _trained(_job(tmp_path, "safetensors", 1), "safetensors")
    files = {step: _file(job, step, 0, "safetensors") for step in NAMES}
    for step in (16, 12):
        corrupt.flip_bit(files[step], files[step].stat().st_size // 2, 3)
    shutil.copytree(job.checkpoints, tmp_path / "kept")
    _goes_on_from(job, 8)
    shutil.rmtree(job.checkpoints)
    (tmp_path / "kept").rename(job.checkpoints)
    for step in (8, 4):
        corrupt.truncate(files[step], 100)
    before = sorted(job.checkpoints.rglob("*.*"))
    done = job.run(timeout=LIMIT)
    assert done.returncode == exitcodes.REFUSED
    assert "can be trusted, and there are 4" in done.output
    assert sorted(job.checkpoints.rglob("*.*")) == before


@pytest.mark.full
def test_the_first_start_asks_to_resume_from_nothing(tmp_path: Path) -> None:
    wish: dict[str, Any] = {"resume_training": True, "load_checkpoint": str(tmp_path / "output" / "checkpoint")}
    job = _job(tmp_path, "safetensors", 1, **wish)
    done = job.run(timeout=LIMIT)
    assert done.returncode == 0, done.output[-4000:]
    assert job.steps(0) == [list(range(1, LAST + 1))]


@pytest.mark.full
def test_the_newer_format_truncated_and_flipped(tmp_path: Path) -> None:
    job = _job(tmp_path, "safetensors", 1, use_legacy_format=False)
    done = job.run(timeout=LIMIT)
    assert done.returncode == 0, done.output[-4000:]
    found = candidates([job.checkpoints], ITERATIONS)
    assert [c.step for c in found] == [16, 12, 8, 4], done.output[-4000:]
    cut, flipped = (next(path.path.glob("tiny-model-*.safetensors")) for path in found[:2])
    corrupt.truncate(cut, cut.stat().st_size // 2)
    corrupt.flip_bit(flipped, flipped.stat().st_size // 2, 3)
    said = _goes_on_from(job, 8)
    for path in (cut, flipped):
        assert f"{path.parent.name}/{path.name} bytes" in said
    assert len(list(job.checkpoints.glob("iteration_*.corrupt"))) == 2


def _reshape(path: Path) -> None:
    """Turn a weight of a whole safetensors file on its side, as if it were of another network."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    shapes = [told["shape"] for name, told in sorted(header.items()) if name != "__metadata__"]
    next(shape for shape in shapes if len(shape) == 2 and shape[0] != shape[1]).reverse()
    told = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    assert len(told) == size
    path.write_bytes(data[:8] + told + data[8 + size :])


@pytest.mark.full
def test_what_verifies_and_does_not_load_is_passed_over_with_two_ranks(tmp_path: Path) -> None:
    job = _trained(_job(tmp_path, "safetensors", 2), "safetensors")
    newest = job.checkpoints / "tiny_rank-2_8.safetensors"
    LEGACY.manifest_path(newest).unlink()
    for rank in (0, 1):
        _reshape(_file(job, 16, rank, "safetensors"))
    assert next(row.state for row in adopt_all(job.checkpoints)) == "written"
    said = _goes_on_from(job, 12)
    assert (job.checkpoints / f"{newest.name}.unfit").is_dir(), said[-4000:]
    [incident] = [decode_incident(path.read_bytes()) for path in (tmp_path / "output/incidents").glob("*.json")]
    causes = [fault.cause for fault in incident.faults if fault.kind == "exception"]
    assert causes and all("DoesNotLoad" in cause and newest.name in cause for cause in causes)
    assert incident.reason == "training had not begun"
    assert any("4 steps are trained again" in note for note in incident.notes), incident.notes
    _refuses_them_all(job)


def _refuses_them_all(job: LlamaJob) -> None:
    """A layer more: MindFormers would load the others, and train on with one that is drawn anew."""
    for path in (*job.checkpoints.glob("tiny_rank-1_*"), *job.checkpoints.glob("rank_*/tiny_rank_?-1_*")):
        path.unlink()
    before, trained = sorted(job.checkpoints.rglob("*.safetensors")), job.losses()
    deeper = replace(job, changes={**job.changes, "model.model_config.num_layers": 3})
    done = deeper.run(timeout=LIMIT)
    assert done.returncode == exitcodes.REFUSED, done.output[-4000:]
    assert "NothingLoads" in done.output and "it is of another network" in done.output
    assert (sorted(job.checkpoints.rglob("*.safetensors")), deeper.losses()) == (before, trained)
