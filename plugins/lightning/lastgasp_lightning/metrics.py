"""Epoch-level accumulators of `self.log`, encoded in plain values and rebuilt after a resume.

Lightning does not save them, so that a mean over an epoch would begin anew at a resume in its middle, and an
early stop or a plateau scheduler that watches it would decide differently. Metrics that are torchmetrics
objects keep their state themselves and are not covered.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
           "dataloader_idx", "metric_attribute")  # fmt: skip
_STATES = ("value", "cumulated_batch_size", "_forward_cache", "_computed")


def encode_results(results: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """What snapshots hold -> plain values and tensors."""
    return [_encode(*row) for row in results if row[1].is_tensor and row[1].meta.sync.group is None]


def _encode(key: str, metric: Any, *states: Any) -> dict[str, Any]:
    meta = metric.meta
    return {
        "key": key,
        "meta": {name: getattr(meta, name) for name in _FIELDS},
        "reduce": meta.reduce_fx.__name__,
        "sync": (meta.sync.should, meta.sync.rank_zero_only),
        "states": {n: _plain(v) for n, v in zip(_STATES, states, strict=False) if v is not None},
        "has_reset": states[-1],
    }


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone()


def restore_results(trainer: Any, rows: list[dict[str, Any]]) -> None:
    """Put the accumulators back into the training loop of `trainer`."""
    results = trainer.fit_loop.epoch_loop._results
    for row in rows:
        meta = _Metadata(**row["meta"], reduce_fx=getattr(torch, row["reduce"]))
        should, rank_zero_only = row["sync"]
        meta.sync = _Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only)
        metric = _ResultMetric(meta, is_tensor=True)
        device = trainer.strategy.root_device
        for name, value in row["states"].items():
            setattr(metric, name, value.to(device))
        metric._update_count = 1
        metric.has_reset = row["has_reset"]
        results[row["key"]] = metric
