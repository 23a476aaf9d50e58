"""What a real job starts from: damage, empty directories, full disks, and the three ways to switch LastGasp on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from lastgasp import exitcodes
from lastgasp.checkpoint import SingleFile, candidates, verify
from lastgasp.errors import ConfigError
from lastgasp.events import Incident, decode_incident
from lastgasp.steps.recover import recover_orphans
from lastgasp.testing import corrupt
from lastgasp.testing.jobs import Finished, run_job
from lastgasp.testing.weights import differences
from lastgasp_lightning import LastGasp, last_good
from support import lean, taskd_reader
from support.matrix import SCRIPT
from support.train_tiny import Tiny
from support.waiting import until

LAYOUT = SingleFile(".ckpt")
LIMIT = 400.0
FULL = pytest.mark.full

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


def train(folder: Path, *more: str, world: int = 2, steps: int = 12, **environment: str) -> Finished:
    """One job under `lastgasp run` in `folder`."""
    command = [lean.python(), "-m", "lastgasp", "run", "--nproc-per-node", str(world), str(SCRIPT)]
    command += ["--dir", str(folder / "ckpts"), "--final", str(folder / "final.pt")]
    command += ["--devices", str(world), "--steps", str(steps), *more]
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    return run_job(command, log, timeout=LIMIT, environ=os.environ | environment)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that ended at step 8, with checkpoints at 4 and 8."""
    folder = tmp_path_factory.mktemp("eight")
    done = train(folder, steps=8)
    assert done.ok, done.output[-4000:]
    return folder


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job, uninterrupted to step 12."""
    folder = tmp_path_factory.mktemp("twelve")
    done = train(folder)
    assert done.ok, done.output[-4000:]
    return folder


def copy_of(folder: Path, target: Path) -> Path:
    """A job folder that a test may damage."""
    shutil.copytree(folder / "ckpts", target / "ckpts")
    return target / "ckpts"


def _manifest_bit(path: Path) -> None:
    corrupt.flip_bit(LAYOUT.manifest_path(path), 40, 3)


def _middle_bit(path: Path) -> None:
    corrupt.flip_bit(path, path.stat().st_size // 2, 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bit": _middle_bit,
    "truncated": lambda path: corrupt.truncate(path, path.stat().st_size - 100),
    "manifest": _manifest_bit,
}


@pytest.mark.parametrize("damage", ["bit", *(pytest.param(other, marks=FULL) for other in ("truncated", "manifest"))])
def test_both_ranks_fall_back_to_the_older_one_and_end_bit_equal(
    damage: str, tmp_path: Path, eight: Path, twelve: Path
) -> None:
    newest = copy_of(eight, tmp_path) / "step=8.ckpt"
    DAMAGES[damage](newest)
    done = train(tmp_path)
    assert done.ok, done.output[-4000:]
    assert "step=4.ckpt" in done.output
    assert "step=8.ckpt was not used" in done.output
    assert differences(twelve / "final.pt", tmp_path / "final.pt") == []
    moved = list((tmp_path / "ckpts").glob("step=8.ckpt.corrupt.reason.json"))
    assert len(moved) == 1, "proven damage is moved away, with the reason"


def test_all_bad_refuses_and_never_starts_from_scratch_silently(tmp_path: Path, eight: Path) -> None:
    directory = copy_of(eight, tmp_path)
    for path in directory.glob("*.ckpt"):
        _middle_bit(path)
    before = sorted(directory.iterdir())
    done = train(tmp_path, "--no-periodic", "--steps", "2")
    assert done.returncode == exitcodes.REFUSED, done.output[-4000:]
    assert done.output.count("errors.NoGoodCheckpoint: no checkpoint in") <= 2, "one traceback each: nobody tried again"
    assert "a rank refused to start, and would refuse again" in done.output
    assert "no checkpoint in" in done.output
    assert "step=8.ckpt: " in done.output
    assert "resume='never'" in done.output
    assert [p for p in before if not p.exists()] == []
    anew = train(tmp_path, "--no-periodic", "--steps", "2", LASTGASP_RESUME="never")
    assert anew.ok, anew.output[-4000:]


def test_a_ckpt_path_in_the_directory_gives_way_to_a_newer_one(eight: Path) -> None:
    assert last_good(eight / "ckpts") == str(eight / "ckpts" / "step=8.ckpt")
    assert last_good(eight / "nowhere") is None


@FULL
@pytest.mark.parametrize("kind", ["sigkill", "exception"])
def test_environment_alone_protects_a_job(kind: str, tmp_path: Path, twelve: Path) -> None:
    fault = f"kind={kind},rank=0,step=5,phase=backward"
    directory = str(tmp_path / "ckpts")
    done = train(tmp_path, "--no-callback", LASTGASP="1", LASTGASP_DIR=directory, LASTGASP_FAULT=fault)
    assert done.ok, done.output[-4000:]
    incident = incident_of(tmp_path)
    assert (incident.step_saved, incident.ending) == (5, "saved" if kind == "sigkill" else "in_place")
    assert differences(twelve / "final.pt", tmp_path / "final.pt") == []


@pytest.mark.parametrize("kind", ["exception", *(pytest.param(other, marks=FULL) for other in ("sigterm", "sigkill"))])
def test_a_single_process(kind: str, tmp_path: Path) -> None:
    fault = f"kind={kind},rank=0,step=6,phase=forward"
    plain = tmp_path / "plain"
    plain.mkdir()
    assert train(plain, world=1).ok
    done = train(tmp_path, world=1, LASTGASP_FAULT=fault)
    assert done.ok, done.output[-4000:]
    incident = incident_of(tmp_path)
    if kind == "sigkill":  # nobody is left to save: the job continues from the periodic checkpoint, and says so
        assert (incident.ending, incident.step_saved) == ("gave_up", None)
        assert incident.steps_lost is not None
    else:
        assert incident.ending == "saved"
        assert incident.steps_lost == 0
    assert differences(plain / "final.pt", tmp_path / "final.pt") == []


def test_a_plain_trainer_loads_a_gasp(tmp_path: Path) -> None:
    fault = "kind=exception,rank=0,step=7,phase=forward"
    done = train(tmp_path, "--no-periodic", "--steps", "12", LASTGASP_FAULT=fault, LASTGASP_RECOVERY="restart")
    assert done.ok, done.output[-4000:]
    gasp = tmp_path / "ckpts" / "gasp-step=00000007.ckpt"
    trainer = Trainer(
        accelerator="cpu", max_steps=8, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    x = torch.randn(40, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    trainer.fit(Tiny(), loader, ckpt_path=gasp, weights_only=False)
    assert trainer.global_step == 8


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=180k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    yield disk
    make_room(disk)
    command = ["umount", str(disk)]  # a process that has just been killed may still have a file open
    until(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, "the disk is unmounted")


def make_room(disk: Path) -> None:
    """What a full disk kept in the rings of step marks goes to it now, as it would at the next start."""
    for path in (*disk.glob("*.ckpt"), *disk.glob("ballast")):
        path.unlink()
    left = [found.problem for found in recover_orphans() if found.directory.startswith(str(disk.parent))]
    assert not any(left), left


def test_a_full_disk_does_not_end_training_and_harms_nothing_older(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "ckpts").symlink_to(small_disk)
    done = train(tmp_path)
    assert done.ok, done.output[-4000:]
    assert "could not be written" in done.output
    assert "No space left" in done.output
    found = candidates([small_disk], LAYOUT)
    assert [c.step for c in found] == [4]
    assert verify(found[0].path, LAYOUT).ok


@pytest.mark.full
def test_a_gasp_on_a_full_disk_is_reported_in_the_incident_and_on_exit(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "ckpts").symlink_to(small_disk)
    fault = "kind=sigkill,rank=0,step=6,phase=backward"
    (small_disk / "ballast").write_bytes(bytes(16384))
    command = ["--max-restarts", "0"]
    done = run_job(
        [lean.python(), "-m", "lastgasp", "run", *command, "--nproc-per-node", "2", str(SCRIPT), "--dir",
         str(tmp_path / "ckpts")],
        tmp_path / "log", timeout=LIMIT, environ=os.environ | {"LASTGASP_FAULT": fault},
    )  # fmt: skip
    assert done.returncode == exitcodes.GAVE_UP, done.output[-4000:]
    assert "No space left" in done.output
    make_room(small_disk)
    for rank in (0, 1):
        (folder,) = small_disk.glob(f"profiling/*/{rank}")
        assert sorted(taskd_reader.read(folder).steps) == [1, 2, 3, 4, 5, 6]


def incident_of(folder: Path) -> Incident:
    """The only record."""
    (path,) = (folder / "ckpts" / "incidents").glob("*.json")
    return decode_incident(path.read_bytes())


def test_a_strategy_that_is_not_supported_is_refused_at_start(tmp_path: Path, restored_environ: None) -> None:
    trainer = Trainer(
        accelerator="cpu", strategy=DDPStrategy(start_method="spawn"), devices=1, logger=False,
        callbacks=[LastGasp(tmp_path)], enable_progress_bar=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="strategy='DDPStrategy with start method spawn'"):
        LastGasp(tmp_path).setup(trainer, Tiny(), "fit")


def test_a_directory_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    callback = LastGasp(tmp_path / "file" / "ckpts")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[callback], enable_progress_bar=False)
    with pytest.raises(ConfigError, match="dir="):
        callback.setup(trainer, Tiny(), "fit")
