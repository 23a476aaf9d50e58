"""Real Megatron jobs that start over damaged checkpoints: the newest good iteration, or an exit that is a failure."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.events import decode_incident
from lastgasp.testing import corrupt
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import Finished
from support.megatron import place
from support.megatron.job import DIST_OPT, PIPELINE, TWO_INSTANCES, GptJob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]

LIMIT = 400.0
"""Seconds for one job on a loaded machine; 25 on an idle one."""
LAYOUT = DirectoryLayout("iter_*")
LAUNCH = ("--framework", "megatron")
FLAGS = {
    "torch": f"--bf16 {DIST_OPT}",
    "torch_dist": f"--bf16 {DIST_OPT} --ckpt-format torch_dist",
    "async": f"--bf16 {DIST_OPT} --ckpt-format torch_dist --async-save --use-persistent-ckpt-worker "
    "--async-strategy mcore",
    "stages": f"--bf16 {PIPELINE}",
    "integrity": f"--bf16 {DIST_OPT} --ckpt-format torch_dist --verify-integrity",
}
Damage = Callable[[Path], object]
ITERATION = "iter_0000020"
TRACKER = "latest_checkpointed_iteration.txt"


def job(folder: Path, kind: str, last: int) -> GptJob:
    """Saves at 10 and 20 and at its end."""
    return GptJob(folder=folder, flags=FLAGS[kind], last=last, launcher="run", launch_options=LAUNCH)


@pytest.fixture(scope="module")
def shelves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of iterations 10 and 20 by format, written once."""
    return _Shelves(tmp_path_factory.mktemp("shelves"))


class _Shelves(dict[str, Path]):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, kind: str) -> Path:
        made = job(self._folder / kind, kind, 20)
        done = made.run(timeout=LIMIT)
        assert done.ok, done.output[-4000:]
        found = candidates([made.checkpoints], LAYOUT)
        assert [(c.step, verify(c.path, LAYOUT).ok) for c in found] == [(20, True), (10, True)]
        self[kind] = made.checkpoints
        return self[kind]


def start(stored: Path, folder: Path, flags: str, damage: Damage) -> tuple[GptJob, Finished]:
    """A job on a damaged copy."""
    shutil.copytree(stored, folder / "ckpt")
    damage(folder / "ckpt")
    again = GptJob(folder=folder, flags=flags, last=22, launcher="run", launch_options=LAUNCH)
    return again, again.run(timeout=LIMIT)


def _file(name: str) -> Callable[[Path], Path]:
    return lambda directory: directory / ITERATION / name


def _no_manifests(directory: Path) -> None:
    for path in directory.glob("*.manifest.json"):
        path.unlink()


MODEL, OPTIMIZER = _file("mp_rank_00/model_optim_rng.pt"), _file("mp_rank_00/distrib_optim.pt")
FIRST, SECOND = _file("__0_0.distcp"), _file("__1_0.distcp")
ROWS: dict[tuple[str, str], tuple[Damage, int]] = {
    ("torch", "model empty"): (lambda d: corrupt.empty(MODEL(d)), 10),
    ("torch", "model truncated"): (lambda d: corrupt.truncate(MODEL(d), 5000), 10),
    ("torch", "optimizer truncated"): (lambda d: corrupt.truncate(OPTIMIZER(d), 5000), 10),
    ("torch", "bit of the model"): (lambda d: corrupt.flip_bit(MODEL(d), 30_000, 3), 10),
    ("torch", "bit of the optimizer"): (lambda d: corrupt.flip_bit(OPTIMIZER(d), 30_000, 3), 10),
    ("torch", "tracker empty"): (lambda d: corrupt.empty(d / TRACKER), 20),
    ("torch", "tracker missing"): (lambda d: corrupt.drop(d / TRACKER), 20),
    ("torch", "iteration missing"): (lambda d: shutil.rmtree(d / ITERATION), 10),
    ("torch_dist", "data truncated"): (lambda d: corrupt.truncate(FIRST(d), 5000), 10),
    ("torch_dist", "bit of the data"): (lambda d: corrupt.flip_bit(FIRST(d), 20_000, 3), 10),
    ("torch_dist", "data missing"): (lambda d: corrupt.drop(SECOND(d)), 10),
    ("torch_dist", "metadata truncated"): (lambda d: corrupt.truncate(_file(".metadata")(d), 100), 10),
    ("torch_dist", "metadata missing"): (lambda d: corrupt.drop(_file(".metadata")(d)), 10),
    ("torch_dist", "metadata.json missing"): (lambda d: corrupt.drop(_file("metadata.json")(d)), 10),
    ("stages", "model of one stage truncated"): (
        lambda d: corrupt.truncate(_file("mp_rank_00_001/model_optim_rng.pt")(d), 5000), 10,
    ),
    ("integrity", "bit of the data"): (lambda d: corrupt.flip_bit(FIRST(d), 20_000, 3), 10),
    ("async", "bit of the data"): (lambda d: corrupt.flip_bit(SECOND(d), 20_000, 3), 10),
}  # fmt: skip
DEFAULT = [("torch", "bit of the optimizer")]


def _check(shelves: dict[str, Path], folder: Path, row: tuple[str, str]) -> None:
    kind, (damage, step) = row[0], ROWS[row]
    again, done = start(shelves[kind], folder, FLAGS[kind], damage)
    assert done.ok, done.output[-4000:]
    assert {iteration for _, iteration in again.losses()} == set(range(step, 22))
    assert {rank for rank, _ in again.losses()} == ({1} if kind == "stages" else {0, 1})
    assert (again.checkpoints / TRACKER).read_text() == "22"
    assert verify(again.checkpoints / "iter_0000022", LAYOUT).ok


@pytest.mark.parametrize("row", DEFAULT, ids=": ".join)
def test_damage(row: tuple[str, str], shelves: dict[str, Path], tmp_path: Path) -> None:
    _check(shelves, tmp_path, row)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in ROWS if row not in DEFAULT], ids=": ".join)
def test_other_damage(row: tuple[str, str], shelves: dict[str, Path], tmp_path: Path) -> None:
    _check(shelves, tmp_path, row)


@pytest.mark.full
def test_what_was_asked_for_is_loaded_whole(shelves: dict[str, Path], tmp_path: Path) -> None:
    """Megatron alone takes the optimizer's weights and moments, and the iteration, from where the tracker says."""
    stored = shelves["torch"]
    undisturbed = job(stored.parent, "torch", 20).losses()
    again, done = start(stored, tmp_path, f"{FLAGS['torch']} --ckpt-step 10", lambda _: None)
    assert done.ok, done.output[-4000:]
    losses = again.losses()
    assert {iteration for _, iteration in losses} == set(range(10, 22))
    assert {at: losses[at] for at in losses if at[1] < 20} == {at: undisturbed[at] for at in losses if at[1] < 20}


@pytest.mark.full
def test_a_training_that_had_ended_leaves_its_last_checkpoint_alone(tmp_path: Path) -> None:
    made = GptJob(folder=tmp_path, flags=f"{FLAGS['torch']} --train-iters 13", launcher="run", launch_options=LAUNCH)
    files = []
    for _ in range(2):
        done = made.run(timeout=LIMIT)
        assert done.ok, done.output[-4000:]
        found = (made.checkpoints / "iter_0000013").rglob("*.pt")
        files.append({path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in found})
    assert files[0] == files[1] and len(files[0]) == 2
    assert {iteration for _, iteration in made.losses()} == set(range(13)), "nothing was trained again"
    assert "is not saved again" in done.output


@pytest.mark.full
@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
def test_settings_from_a_checkpoint_are_those_of_one_that_can_be_read(
    kind: str, shelves: dict[str, Path], tmp_path: Path
) -> None:
    """--use-checkpoint-args is answered in the script, before training begins: Megatron alone exits with code 0."""

    def damage(directory: Path) -> None:
        corrupt.truncate(MODEL(directory) if kind == "torch" else _file(".metadata")(directory), 100)

    again, done = start(shelves[kind], tmp_path, f"{FLAGS[kind]} --use-checkpoint-args", damage)
    assert done.ok, done.output[-4000:]
    assert {iteration for _, iteration in again.losses()} == set(range(10, 22))
    assert "the model's settings are taken from" in done.output


@pytest.mark.full
def test_nothing_good_is_no_success_and_nothing_is_trained(shelves: dict[str, Path], tmp_path: Path) -> None:
    def spoil(directory: Path) -> None:
        for path in directory.glob("iter_*/mp_rank_00/model_optim_rng.pt"):
            corrupt.truncate(path, 100)

    again, done = start(shelves["torch"], tmp_path, FLAGS["torch"], spoil)
    assert done.returncode == exitcodes.REFUSED, done.output[-4000:]
    assert "NoGoodCheckpoint" in done.output
    assert again.losses() == {}
    assert (again.checkpoints / ITERATION).is_dir()


@pytest.mark.full
def test_without_manifests_it_is_loaded_with_a_warning(shelves: dict[str, Path], tmp_path: Path) -> None:
    again, done = start(shelves["torch"], tmp_path, FLAGS["torch"], _no_manifests)
    assert done.ok, done.output[-4000:]
    assert "iter_0000020 has no manifest" in done.output and "lastgasp manifest" in done.output
    assert {iteration for _, iteration in again.losses()} == {20, 21}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "option", "said"),
    [
        ("torch", "--lastgasp-require-manifest", "NoGoodCheckpoint"),
        ("torch_dist", "--verify-integrity", "Integrity manifest not found"),
    ],
)
def test_without_what_the_user_requires_it_is_no_success(
    kind: str, option: str, said: str, shelves: dict[str, Path], tmp_path: Path
) -> None:
    again, done = start(shelves[kind], tmp_path, f"{FLAGS[kind]} {option}", _no_manifests)
    assert done.returncode == exitcodes.REFUSED, done.output[-4000:]
    assert said in done.output
    assert again.losses() == {}


@pytest.mark.full
def test_plain_megatron_resumes_from_a_repaired_directory(shelves: dict[str, Path], tmp_path: Path) -> None:
    _check(shelves, tmp_path / "ours", ("torch", "model empty"))
    shutil.rmtree(tmp_path / "ours/losses")
    plain = GptJob(folder=tmp_path / "ours", flags=FLAGS["torch"], last=24)
    done = plain.run(timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    assert {iteration for _, iteration in plain.losses()} == {22, 23}


@pytest.mark.full
def test_async_saves_get_their_manifests_when_they_are_finalized(tmp_path: Path) -> None:
    made = job(tmp_path, "async", 20)
    done = made.run(timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    found = candidates([made.checkpoints], LAYOUT)
    assert [(c.step, verify(c.path, LAYOUT).ok) for c in found] == [(20, True), (10, True)]
    assert (made.checkpoints / TRACKER).read_text() == "20"


@pytest.mark.full
@pytest.mark.fault
def test_helpers_of_a_killed_rank_are_ended_before_the_restart(tmp_path: Path) -> None:
    flags = FLAGS["async"].replace(DIST_OPT, TWO_INSTANCES)
    made = GptJob(folder=tmp_path, flags=flags, last=20, launcher="run", launch_options=LAUNCH)
    fired = tmp_path / "fired"
    kill = {"LASTGASP_FAULT": "kind=sigkill,rank=1,step=13,phase=forward", "LASTGASP_FAULT_LOG": str(fired)}
    done = made.run(kill, timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    assert len(read_log(fired)) == 1
    assert re.search(r"ended [1-9]\d* helper processes that dead ranks had left", done.output)
    (record,) = (made.checkpoints / "incidents").glob("*.json")
    assert decode_incident(record.read_bytes()).step_saved == 13
    found = candidates([made.checkpoints], LAYOUT)
    assert [(c.step, verify(c.path, LAYOUT).ok) for c in found] == [(20, True), (13, True), (10, True)]


@pytest.mark.full
def test_an_exit_of_megatrons_with_code_0_over_a_good_file_is_no_success(tmp_path: Path) -> None:
    without_rng = GptJob(folder=tmp_path, flags="--bf16 --no-save-rng", last=10)
    assert without_rng.run(timeout=LIMIT).ok
    shutil.rmtree(tmp_path / "losses")
    silent = GptJob(folder=tmp_path, flags="--bf16", last=12)
    done = silent.run(timeout=LIMIT)
    assert (done.returncode, silent.losses()) == (0, {}), "without lastgasp it looks like a success"
    said = GptJob(folder=tmp_path, flags="--bf16", last=12, launcher="run", launch_options=LAUNCH)
    done = said.run(timeout=LIMIT)
    assert done.returncode == exitcodes.REFUSED, done.output[-4000:]
    assert "NotLoaded: Megatron could not load the checkpoint and wanted to exit with code 0" in done.output
    assert said.losses() == {}
    [incident] = [decode_incident(path.read_bytes()) for path in (said.checkpoints / "incidents").glob("*.json")]
    causes = [fault.cause for fault in incident.faults if fault.kind == "exception"]
    assert causes and all("iter_0000010: " in cause and "NotLoaded" in cause for cause in causes), incident
