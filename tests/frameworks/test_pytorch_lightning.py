"""Lightning under its two names: each has a plugin of its own, and an environment without a wish disturbs nobody."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lastgasp import trainer_callbacks
from lastgasp.errors import ConfigError
from lastgasp_lightning import LastGasp
from lastgasp_lightning.compat import LightningChanged

NAMES = ("lightning.pytorch", "pytorch_lightning")
PLUGINS = {"lightning.pytorch": "lastgasp_lightning", "pytorch_lightning": "lastgasp_pytorch_lightning"}

pytestmark = pytest.mark.usefixtures("restored_environ")


def fitted(name: str, folder: Path, *callbacks: Any) -> Any:
    """A trainer of that package, behind three steps."""
    package = importlib.import_module(name)

    class Net(package.LightningModule):  # type: ignore[name-defined,misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saves = importlib.import_module(f"{name}.callbacks").ModelCheckpoint(folder, "{step}", every_n_train_steps=3)
    trainer = package.Trainer(
        accelerator="cpu", devices=1, max_steps=3, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saves, *callbacks],
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(12, 2)), batch_size=4))
    return trainer


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_alone_protects_a_script_of_either(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTGASP", "1")
    monkeypatch.setenv("LASTGASP_DIR", str(tmp_path))
    trainer = fitted(name, tmp_path)
    assert [type(one).__module__.partition(".")[0] for one in trainer.callbacks].count(PLUGINS[name]) == 1
    assert list(tmp_path.glob("*step=3*.json")) != []  # the manifest of what ModelCheckpoint has saved


@pytest.mark.parametrize("name", NAMES)
def test_the_plugin_of_the_other_name_is_refused_with_what_to_write(name: str, tmp_path: Path) -> None:
    [other] = set(NAMES) - {name}
    callback = importlib.import_module(PLUGINS[other]).LastGasp(tmp_path)
    with pytest.raises(ConfigError, match=f"`from {PLUGINS[name]} import LastGasp`"):
        fitted(name, tmp_path, callback)


def test_a_lightning_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "__version__", "2.4.0")
    with pytest.raises(LightningChanged, match=r"Lightning 2\.4\.0 is too old.*lightning>=2\.5"):
        fitted("lightning.pytorch", tmp_path, LastGasp(tmp_path))


@pytest.mark.parametrize("name", NAMES)
def test_a_plugin_that_cannot_be_imported_disturbs_only_who_has_asked_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, f"{PLUGINS[name]}.entry", None)  # as where a name that it imports is not there
    package.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.setenv("LASTGASP", "1")
    with pytest.raises(ImportError):
        package.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


def test_what_is_not_asked_for_imports_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP", "0")
    monkeypatch.setattr(trainer_callbacks, "import_module", lambda name: pytest.fail(f"imports {name}"))
    assert trainer_callbacks.of_lightning() == trainer_callbacks.of_pytorch_lightning() == []
