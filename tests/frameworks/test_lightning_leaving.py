"""What a fit of shards leaves in arenas for its restart, and when it leaves nothing."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from lastgasp_lightning import LastGasp
from lastgasp_lightning.leaving import Leaving, Restored, hooked


class _Module(LightningModule):
    pass


class _Hooked(LightningModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        raise AssertionError("it may write files: not at each step")


class _Callback(Callback):
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Something of the user's."""


def trainer(module: Any = None, *callbacks: Callback) -> Any:
    return SimpleNamespace(lightning_module=module or _Module(), callbacks=list(callbacks))


def leaving(found: Any, number: int = 0, model: str = "a") -> Leaving:
    fit = SimpleNamespace(number=lambda: number, fit=SimpleNamespace(model=model))
    place, config = SimpleNamespace(rank=0), SimpleNamespace(directory=Path("ckpts"))
    return Leaving(SimpleNamespace(trainer=found, fit=fit, place=place, config=config))


def payload(more: bytes) -> Any:
    return SimpleNamespace(more=memoryview(more))


def test_whose_hook_takes_part_in_a_checkpoint(tmp_path: Path) -> None:
    ours, saves = LastGasp(tmp_path), ModelCheckpoint(tmp_path)
    assert hooked(trainer(None, ours, saves, LambdaCallback())) == ""
    assert hooked(trainer(_Hooked())) == "_Hooked"
    assert hooked(trainer(None, ours, _Callback())) == "_Callback"
    assert hooked(trainer(None, LambdaCallback(on_save_checkpoint=print))) == "LambdaCallback"


def test_with_such_a_hook_nothing_is_left_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    one = leaving(trainer(_Hooked()))
    with caplog.at_level("INFO", "lastgasp"):
        assert one.written(lambda: pytest.fail("not called")) == b"" == one.written(lambda: pytest.fail("not called"))
    assert len([record for record in caplog.records if "_Hooked.on_save_checkpoint" in record.message]) == 1


def test_what_cannot_be_dumped_costs_the_restart_from_arenas_alone(caplog: pytest.LogCaptureFixture) -> None:
    one = leaving(trainer())
    with caplog.at_level("INFO", "lastgasp"):
        assert one.written(lambda: ({"callbacks": lambda: None}, {})) == b""
    assert one.written(lambda: ({}, {})) == b""
    assert "cannot be dumped" in caplog.text


def test_only_the_same_fit_of_the_same_model_takes_it() -> None:
    record = {"param_groups": [[{"lr": 0.1}]], "small": {0: b"zero", 1: b"one"}}
    left = leaving(trainer()).written(lambda: ({"global_step": 5}, record))
    assert leaving(trainer()).why_not(payload(left)) == ""
    assert "fit 1" in leaving(trainer(), number=1).why_not(payload(left))
    assert "another model" in leaving(trainer(), model="b").why_not(payload(left))
    assert "cannot be read" in leaving(trainer()).why_not(payload(left[:-9]))
    assert "cannot be read" in leaving(trainer()).why_not(payload(pickle.dumps(3)))
    kept = Restored.of(5, left, {1: b"own"})
    checkpoint, found = kept.files({0: b"first"})
    assert (kept.step, kept.groups, checkpoint) == (5, [[{"lr": 0.1}]], {"global_step": 5})
    assert found["small"] == {0: b"first", 1: b"own"}
    assert kept.files({})[0] is not checkpoint
