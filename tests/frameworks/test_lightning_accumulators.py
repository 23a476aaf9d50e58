"""What `self.log` accumulates, as bytes: the values of this moment, encoded anew only where one has changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import tensor

from lastgasp_lightning.metrics import OwnAccumulators, as_first, decode_own, logged_alone, of_a_new_rank, with_others
from lastgasp_lightning.saves import watched_alone


def _log(results: Any, name: str, value: float, **options: Any) -> None:
    results.log("training_step", name, tensor(value), batch_size=2, **options)


def _values(data: bytes) -> dict[str, dict[str, float]]:
    return {row["key"]: {n: v.item() for n, v in row["states"].items()} for row in decode_own(data)}


def _accumulators() -> tuple[Any, OwnAccumulators]:
    results: Any = _ResultCollection(training=True)
    epoch = SimpleNamespace(_results=results)
    return results, OwnAccumulators(SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=epoch)))


def test_the_values_of_this_moment_are_encoded() -> None:
    results, own = _accumulators()
    assert own.encode() == b""
    _log(results, "loss", 3.0, on_step=True, on_epoch=True)
    first = own.encode()
    assert own.encode() is first
    mean = {"value": 6.0, "cumulated_batch_size": 2.0, "_forward_cache": 3.0}
    assert _values(first) == {"training_step.loss": mean}
    _log(results, "loss", 4.0, on_step=True, on_epoch=True)
    _log(results, "top", 5.0, on_step=False, on_epoch=True, reduce_fx=torch.max)  # one metric more
    mean = {"value": 14.0, "cumulated_batch_size": 4.0, "_forward_cache": 4.0}
    assert _values(own.encode()) == {"training_step.loss": mean, "training_step.top": {"value": 5.0}}
    results["training_step.loss"].compute()  # cached: a state that was not there
    assert _values(own.encode())["training_step.loss"]["_computed"] == 3.5


def test_that_one_was_reset_is_encoded() -> None:
    results, own = _accumulators()
    _log(results, "loss", 3.0, on_step=False, on_epoch=True)
    assert [row["has_reset"] for row in decode_own(own.encode())] == [False]
    results["training_step.loss"].reset()
    (row,) = decode_own(own.encode())
    assert (row["has_reset"], row["states"]["value"].item()) == (True, 0.0)
    assert row["states"]["value"].dtype is torch.float32
    assert row["states"]["cumulated_batch_size"].dtype is torch.int64


def test_metrics_of_a_collection_made_anew_are_found() -> None:
    results, own = _accumulators()
    _log(results, "loss", 3.0, on_step=True, on_epoch=False)
    own.encode()
    results.clear()
    assert own.encode() == b""
    _log(results, "loss", 7.0, on_step=True, on_epoch=False)
    assert _values(own.encode())["training_step.loss"]["value"] == 7.0


def _rows(*values: float) -> list[dict[str, Any]]:
    results, own = _accumulators()
    for value in values:
        _log(results, "loss", value, on_step=True, on_epoch=True)
        for name, how in (("mean", torch.mean), ("sum", torch.sum), ("top", torch.max), ("low", torch.min)):
            _log(results, name, value, on_step=False, on_epoch=True, reduce_fx=how, sync_dist=True)
    return decode_own(own.encode())


def _by_name(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {row["meta"]["name"]: [v.item() for v in row["states"].values()] for row in rows}


def test_what_missing_ranks_had_accumulated_is_added_where_all_are_reduced_to_one() -> None:
    found = _by_name(with_others(_rows(3.0), [_rows(1.0, 7.0), _rows(2.0)]))
    assert found == {
        "loss": [6.0, 2.0, 3.0], "mean": [26.0, 8.0], "sum": [13.0], "top": [7.0], "low": [1.0],
    }  # fmt: skip


def test_a_new_rank_adds_nothing_to_the_others() -> None:
    found = _by_name(of_a_new_rank(_rows(3.0)))
    assert found == {
        "loss": [6.0, 2.0, 3.0], "mean": [0.0, 0.0], "sum": [0.0], "top": [-torch.inf], "low": [torch.inf],
    }  # fmt: skip


def test_rank_0_logs_what_the_rank_did_that_was_0_before() -> None:
    rows = _rows(3.0)
    as_first(rows, _rows(1.0, 7.0))
    assert _by_name(rows) == {**_by_name(_rows(3.0)), "loss": [16.0, 4.0, 7.0]}


def test_what_rank_0_alone_had_accumulated_is_not_lost_with_it() -> None:
    rows: list[dict[str, Any]] = []
    as_first(rows, _rows(1.0, 7.0))
    assert _by_name(rows) == {"loss": [16.0, 4.0, 7.0]}


def _watching(*callbacks: Any, ranks: int = 2) -> Any:
    """A Trainer of so many ranks, which have logged."""
    train, val = _ResultCollection(training=True), _ResultCollection(training=False)
    _log(train, "loss", 3.0, on_step=True, on_epoch=True)
    _log(train, "shared", 3.0, on_step=False, on_epoch=True, sync_dist=True)
    val.log("validation_step", "error", tensor(1.0), batch_size=2, on_step=False, on_epoch=True)
    val.log("on_validation_epoch_end", "reduced", tensor(1.0), batch_size=2, on_step=False, on_epoch=True)
    loop = SimpleNamespace(_results=train, val_loop=SimpleNamespace(_results=val))
    return SimpleNamespace(world_size=ranks, callbacks=callbacks, fit_loop=SimpleNamespace(epoch_loop=loop))


def test_what_each_rank_watches_for_itself_is_known() -> None:
    best, none_yet = ModelCheckpoint(monitor="error"), ModelCheckpoint(monitor="loss")
    best.best_k_models = {"a.ckpt": tensor(1.0)}
    others = [EarlyStopping(monitor=name) for name in ("loss_epoch", "shared", "reduced")]
    expected = [("error", "ModelCheckpoint"), ("loss_epoch", "EarlyStopping")]
    assert watched_alone(_watching(best, none_yet, *others)) == expected
    assert watched_alone(_watching(best, *others, ranks=1)) == []


def test_which_loader_is_watched_is_part_of_the_name() -> None:
    trainer = _watching()
    trainer.fit_loop.epoch_loop.val_loop._results.dataloader_idx = 1
    trainer.fit_loop.epoch_loop.val_loop._results.log(
        "validation_step", "of", tensor(1.0), batch_size=2, on_step=False, on_epoch=True
    )
    found = logged_alone(trainer)
    assert "of/dataloader_idx_1" in found and "of" not in found
