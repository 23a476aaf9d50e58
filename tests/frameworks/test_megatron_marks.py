"""Marks of real Megatron jobs without a line of the user's: every range is where it belongs, on every rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lastgasp.cli import main
from lastgasp.steps.report.job import Job, JobReader
from lastgasp.steps.report.records import RankReader
from lastgasp.steps.report.sources import data_files, locate
from lastgasp.steps.report.spans import Range, RangeFold
from lastgasp.testing.jobs import Finished
from support.megatron import place
from support.megatron.job import DIST_OPT, PIPELINE, TENSOR, GptJob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]

LIMIT = 400.0
LAST, EVERY, MICRO_BATCHES = 10, 5, 2
"""Iterations, those between two saves, micro-batches of each rank in an iteration (data parallel size 2)."""
OVERLAP = f"{DIST_OPT} --overlap-grad-reduce --overlap-param-gather"
LAUNCH = ("--framework", "megatron", "--max-restarts", "0")


@dataclass
class Ran:
    """A finished job, and what `lastgasp ps` said while it trained."""

    job: GptJob
    done: Finished
    seen: dict[str, Any]

    @property
    def profiling(self) -> Path:
        """Where its rows are, by default."""
        return self.job.checkpoints / "profiling"

    def ranges(self, rank: int) -> list[Range]:
        """All of a rank, by begin."""
        found: list[Range] = []
        fold, reader = RangeFold(found.append), RankReader(locate(self.profiling).ranks[rank])
        for rows in reader.read(lambda nbytes: None):
            fold.feed(rows)
        fold.end()
        assert fold.counts.unended == fold.counts.unbegun == 0
        return sorted(found, key=lambda one: one.host_begin)

    def report(self) -> Job:
        """As `lastgasp report` reads it."""
        reader = JobReader(locate(self.profiling))
        reader.read()
        reader.end()
        return reader.job()


def run(folder: Path, flags: str, **environ: str) -> Ran:
    """Train, and look at the table of workers meanwhile: the ranks wait until it has been complete."""
    whole = f"--bf16 {flags} --eval-interval {EVERY} --eval-iters 2"
    job = GptJob(folder=folder, flags=whole, last=LAST, every=EVERY, launcher="run", launch_options=LAUNCH)
    with ThreadPoolExecutor(1) as pool:
        go = folder / "go"
        running = pool.submit(job.run, environ | {"HOLD": str(go)}, timeout=LIMIT)
        seen = workers(lambda: running.done())
        go.touch()
        done = running.result()
    assert done.ok, done.output[-6000:]
    return Ran(job, done, seen)


def workers(over: Callable[[], bool]) -> dict[str, Any]:
    """The first complete table of `lastgasp ps`; empty if the job is over before there is one."""
    while not over():
        said = json.loads(CliRunner().invoke(main, ["ps", "--json"]).stdout)
        for one in said["jobs"]:
            if one["ranks"] and all(row.get("device") and (row["step"] or 0) > 0 for row in one["ranks"]):
                found: dict[str, Any] = one
                return found
        time.sleep(0.2)
    return {}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs of other tests announce themselves elsewhere."""
    variable = "LASTGASP_RUNTIME_DIR"
    before = os.environ[variable]
    os.environ[variable] = str(tmp_path_factory.mktemp("runtime"))
    yield
    os.environ[variable] = before


@pytest.fixture(scope="module")
def trained(runtime: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two ranks, the distributed optimizer, all marks, evaluation and saves."""
    return run(tmp_path_factory.mktemp("marks"), DIST_OPT, LASTGASP_MARKS="all")


def inside(ranges: list[Range], step: Range) -> list[Range]:
    return [one for one in ranges if step.host_begin <= one.host_begin and one.host_end <= step.host_end]


ONE_BATCH = ["dataloader", "forward", "backward"]


def test_every_step_of_every_rank_holds_its_parts(trained: Ran) -> None:
    for rank in (0, 1):
        ranges = [one for one in trained.ranges(rank) if one.domain == "default"]
        steps = [one for one in ranges if one.name.startswith("step ")]
        assert [step.name for step in steps] == [f"step {n}" for n in range(1, LAST + 1)]
        for step in steps:
            parts = [one.name for one in inside(ranges, step) if one is not step]
            assert parts == [*ONE_BATCH * MICRO_BATCHES, "backward", "optimizer"]


def test_neither_validation_nor_saves_lie_in_a_step(trained: Ran) -> None:
    ranges = [one for one in trained.ranges(0) if one.domain == "default"]
    steps = [one for one in ranges if one.name.startswith("step ")]
    held = [one for step in steps for one in inside(ranges, step)]
    outside = [one.name for one in ranges if one not in held]
    assert outside == ["save_checkpoint"] * (LAST // EVERY)
    assert trained.done.output.count("validation loss at iteration") >= 1, "it did not evaluate"


def test_collectives_of_gradients_and_weights_are_there_with_their_groups(trained: Ran) -> None:
    for rank, data in trained.report().ranks.items():
        names = {group.group_name for group in data.groups.values()}
        assert {"tp", "pp", "dp", "default_group"} <= names
        whole = {key for key, group in data.groups.items() if tuple(group.global_ranks) == (0, 1)}
        collectives = [one for one in trained.ranges(rank) if one.domain == "communication"]
        said = [json.loads(one.name) for one in collectives]
        assert {one["groupName"] for one in said} <= data.groups.keys()
        for operation, count in (("HcclReduceScatter", LAST), ("HcclAllGather", LAST)):
            found = [one for one in said if one["opName"] == operation and one["groupName"] in whole]
            assert len(found) >= count, f"{operation}: {found}"
            assert all(int(one["count"]) > 0 for one in found if one["dataType"] == "bfp16")


def test_the_report_reads_it(trained: Ran) -> None:
    done = CliRunner().invoke(main, ["report", str(trained.job.checkpoints), "--json"])
    assert done.exit_code == 0, done.output
    assert {one["rank"] for one in json.loads(done.stdout)["ranks"]} == {0, 1}
    for data in trained.report().ranks.values():
        assert list(data.table.numbers) == list(range(1, LAST + 1))
        assert (data.unreadable, data.dropped) == (0, 0)
        assert data.information.framework.startswith(f"megatron {place.VERSION}")
        assert data.device_rows == "host"
        for column in ("time", "forward", "backward", "optimizer", "data", "communication"):
            assert all(seconds > 0 for seconds in data.table.times(column)), column


def test_each_rank_has_registered_with_its_device_and_versions(trained: Ran) -> None:
    assert [row["rank"] for row in trained.seen["ranks"]] == [0, 1]
    for row in trained.seen["ranks"]:
        assert row["device"] == "cpu"
        assert row["versions"]["megatron-core"].startswith(place.VERSION)  # it may add a commit
        assert {"lastgasp", "python", "torch"} <= row["versions"].keys()
        assert row["marks"] == ["step", "forward", "dataloader", "save", "comm"]


def test_nothing_was_said_about_missing_places(trained: Ran) -> None:
    assert "no marks of" not in trained.done.output
    assert "not marked" not in trained.done.output


@pytest.mark.full
@pytest.mark.parametrize("flags", [TENSOR, PIPELINE, OVERLAP], ids=["tp2", "pp2", "overlap"])
def test_other_layouts_have_all_steps(runtime: None, flags: str, tmp_path: Path) -> None:
    ran = run(tmp_path, flags, LASTGASP_MARKS="all")
    for data in ran.report().ranks.values():
        assert list(data.table.numbers) == list(range(1, LAST + 1))
        name = {TENSOR: "tp", PIPELINE: "pp"}.get(flags, "dp")
        assert (0, 1) in {tuple(g.global_ranks) for g in data.groups.values() if g.group_name == name}
        for column in ("forward", "backward", "optimizer", "communication"):
            assert all(seconds > 0 for seconds in data.table.times(column)), column


@pytest.mark.full
def test_options_of_the_command_line(runtime: None, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    ran = run(tmp_path / "job", f"--lastgasp-marks step,save --lastgasp-profiling-dir {rows}")
    assert not ran.profiling.exists()
    for rank, folder in locate(rows).ranks.items():
        assert data_files(folder), f"rank {rank} wrote nothing"
    reader = JobReader(locate(rows))
    reader.read()
    reader.end()
    for data in reader.job().ranks.values():
        assert list(data.table.numbers) == list(range(1, LAST + 1))
        assert not any(data.table.times("forward"))


@pytest.mark.full
def test_switched_off_for_good_nothing_is_written(runtime: None, tmp_path: Path) -> None:
    ran = run(tmp_path, "--lastgasp-marks 0")
    assert not ran.profiling.exists()
    assert [row["marks"] for row in ran.seen["ranks"]] == [None, None]
