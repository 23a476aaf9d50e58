"""What a fit begins with where Lightning itself would begin with a file: `ckpt_path`, Slurm's `hpc_ckpt_N.ckpt`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from frameworks.fit_rig import Job, Small, data, fit, seed, weights
from lastgasp.adapter import DamagedCheckpoint, GaspConfig
from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.manifest import Fit, Kind, Provenance
from lastgasp.testing import corrupt
from lastgasp.topology import Place, data_parallel
from lastgasp_lightning.checkpoint_io import LAYOUT, VerifiedCheckpointIO
from lastgasp_lightning.selection import LightningSelector

MODEL = "0123456789abcdef"


def put(path: Path, step: int, *, home: str | None = None, kind: Kind = "periodic", model: str = MODEL) -> Path:
    """A checkpoint of a fit that counts its fits in `home`, seen from the folder of `path`; None: in that folder."""
    fit = Fit(number=0, model=model) if home is None else Fit(number=0, model=model, home=home)
    path.parent.mkdir(parents=True, exist_ok=True)
    with Staged(path, LAYOUT) as staged:
        staged.open().write(b"step %d" % step * 1000)
        staged.publish(Provenance(format="lightning", step=step, kind=kind, job="before", fit=fit))
    return path


def begins_with(root: Path, given: Path, resume: str | None = None) -> Path:
    """The file that one rank is restored from."""
    trainer = SimpleNamespace(strategy=None, checkpoint_callbacks=[], default_root_dir=str(root))
    fit: Any = SimpleNamespace(look_at_model=lambda: Fit(number=0, model=MODEL), resumed=lambda *about: None)
    config = GaspConfig.resolve(root / "ckpts", resume=resume)
    place = Place(rank=0, world_size=1, replicas=data_parallel(1), job="now")
    selector, loaded = LightningSelector(trainer, config, place, lambda tag, own: [own], fit), list[Path]()
    found = selector.load(loaded.append, str(given))
    assert found is bool(loaded)
    return loaded[-1] if found else given  # Lightning goes on with what it was given


def test_the_newer_of_what_slurm_and_what_a_fault_has_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A fault long ago must not throw a requeued job back, nor what was saved at the time limit a newer gasp."""
    gasp = put(tmp_path / "ckpts/gasp-step=00000012.ckpt", 12, kind="gasp")
    hpc = put(tmp_path / "hpc_ckpt_1.ckpt", 500, home="ckpts")
    assert begins_with(tmp_path, hpc) == hpc
    assert caplog.text == ""
    newer = put(tmp_path / "ckpts/gasp-step=00000612.ckpt", 612, kind="gasp")
    assert begins_with(tmp_path, hpc) == newer
    assert f"{hpc} was not used: {newer} is newer" in caplog.text
    assert begins_with(tmp_path, hpc, "never") == hpc
    assert gasp.exists()


def test_a_damaged_one_of_slurm_stays_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gasp = put(tmp_path / "ckpts/gasp-step=00000012.ckpt", 12, kind="gasp")
    hpc = put(tmp_path / "hpc_ckpt_1.ckpt", 500, home="ckpts")
    corrupt.flip_bit(hpc, 100)
    assert begins_with(tmp_path, hpc) == gasp
    assert hpc.exists() and f"{gasp} is the newest good one" in caplog.text


def test_a_fine_tuning_goes_on_with_its_own_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the number of steps that its weights come from, and whenever they were saved last."""
    own = put(tmp_path / "ckpts/gasp-step=00000012.ckpt", 12, kind="gasp")
    weights = put(tmp_path / "pretraining/last.ckpt", 90_000)
    assert begins_with(tmp_path, weights) == own
    assert f"{weights} was not used: it is not of this training, which has saved {own} itself" in caplog.text
    assert "newer" not in caplog.text


def test_weights_of_another_model_are_lightnings_business(tmp_path: Path) -> None:
    (tmp_path / "ckpts").mkdir()
    other = put(tmp_path / "other.ckpt", 7, home="ckpts", model="fedcba9876543210")
    assert begins_with(tmp_path, other) == other


def test_of_what_has_no_manifest_nobody_says_that_it_is_older(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = put(tmp_path / "ckpts/gasp-step=00000012.ckpt", 12, kind="gasp")
    bare = tmp_path / "hpc_ckpt_1.ckpt"
    bare.write_bytes(b"of a job without lastgasp")
    assert begins_with(tmp_path, bare) == own
    assert f"{bare} was not used: it has no manifest, and this training has saved {own} itself" in caplog.text
    assert "which is newer is not known" in caplog.text


def test_an_older_one_of_the_same_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = put(tmp_path / "ckpts/step=5.ckpt", 5)
    newer = put(tmp_path / "ckpts/step=9.ckpt", 9)
    assert begins_with(tmp_path, given) == newer
    assert f"{given} was not used: {newer} is newer" in caplog.text


def test_a_link_is_what_it_leads_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`ModelCheckpoint(save_last="link")`: the manifest has the name of the file."""
    put(tmp_path / "ckpts/gasp-step=00000012.ckpt", 12, kind="gasp")
    put(tmp_path / "version_0/step=20.ckpt", 20, home="../ckpts")
    link = tmp_path / "version_0/last.ckpt"
    link.symlink_to("step=20.ckpt")
    assert begins_with(tmp_path, link) == link
    assert caplog.text == ""
    own = put(tmp_path / "ckpts/step=30.ckpt", 30)
    assert begins_with(tmp_path, link) == own
    assert f"{link} was not used: {own} is newer" in caplog.text


def test_a_link_to_what_is_chosen_is_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = put(tmp_path / "ckpts/step=12.ckpt", 12)
    (tmp_path / "ckpts/last.ckpt").symlink_to(own.name)
    assert begins_with(tmp_path, tmp_path / "ckpts/last.ckpt") == own
    assert caplog.text == ""


def test_what_a_link_leads_to_is_verified(tmp_path: Path) -> None:
    path = put(tmp_path / "step=12.ckpt", 12)
    corrupt.flip_bit(path, 100)
    link = tmp_path / "last.ckpt"
    link.symlink_to(path.name)
    nothing: Any = SimpleNamespace()
    io = VerifiedCheckpointIO(TorchCheckpointIO(), GaspConfig.resolve(tmp_path), nothing, nothing, [])
    with pytest.raises(DamagedCheckpoint):
        io.load_checkpoint(link)


def test_a_fault_in_the_epoch_in_which_a_plain_checkpoint_was_saved(tmp_path: Path) -> None:
    """Lightning alone counts on in that epoch, and begins with its data: so many as it counts have not been used."""
    plain = ModelCheckpoint(tmp_path / "plain", every_n_train_steps=4)
    seed(5)
    trainer = L.Trainer(max_steps=4, logger=False, callbacks=[plain], accelerator="cpu", default_root_dir=tmp_path,
                        enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    assert fit(trainer, Small(), DataLoader(data(size=40), 4, shuffle=True))
    found = []
    for folder, strikes in (("straight", [None]), ("faulted", [6, 7, 12, None])):
        job = Job(tmp_path / folder)
        for strike in strikes:
            job.restart()
            seed(9)
            model, trainer = Small(), job.make(strike=strike)
            loader = DataLoader(data(size=40), 4, shuffle=True)
            assert fit(trainer, model, loader, ckpt_path=plain.best_model_path) == (strike is None)
        found.append((weights(model), trainer.optimizers[0].state_dict()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
