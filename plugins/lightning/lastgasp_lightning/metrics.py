"""Epoch-level accumulators of `self.log`, encoded in plain values and rebuilt after a resume.

Lightning does not save them, so that a mean over an epoch would begin anew at a resume in its middle, and an
early stop or a plateau scheduler that watches it would decide differently. Each rank has its own: they are reduced
over the ranks only where the user asks for that, and at the end of the epoch. Metrics that are torchmetrics objects
keep their state themselves and are not covered.
"""

from __future__ import annotations

import operator
import pickle
import struct
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
           "dataloader_idx", "metric_attribute")  # fmt: skip
_STATES = ("value", "cumulated_batch_size", "_forward_cache", "_computed")


class OwnAccumulators:
    """This rank's accumulators of `self.log`, as bytes for its auxiliary state.

    Those on an accelerator are left out: to read them the host would wait for the device at every step.

    Args:
        trainer: of this fit, set up.
    """

    def __init__(self, trainer: Any) -> None:
        self._epoch = trainer.fit_loop.epoch_loop
        self._metas: tuple[list[tuple[Any, ...]], bytes] = ([], b"")
        self._last: tuple[list[float], bytes] = ([], b"")
        self._seen: list[Any] = []
        self._encoded = b""

    def encode(self) -> bytes:
        """Their current values; the same object as before if nothing has changed."""
        results = self._epoch._results
        if not results:
            return b""
        # Lightning replaces these tensors at each update, it never changes them alone (result.py, `update`).
        seen: list[Any] = []
        for metric in results.values():
            there = vars(metric).get
            seen += (metric, there("value"), there("cumulated_batch_size"), there("_forward_cache"),
                     there("_computed"), metric.has_reset)  # fmt: skip
        if len(seen) != len(self._seen) or not all(map(operator.is_, seen, self._seen)):
            self._encoded, self._seen = self._encode(results), seen
        return self._encoded

    def _encode(self, results: Any) -> bytes:
        metrics = [(k, m) for k, m in results.items() if m.is_tensor and m.meta.sync.group is None]
        if not metrics or any(m.value.device.type != "cpu" for _, m in metrics):
            return b""
        values: list[float] = []
        signature: list[tuple[Any, ...]] = []
        for key, metric in metrics:
            states = [vars(metric).get(name) for name in _STATES]
            there = [s for s in states if isinstance(s, torch.Tensor)]
            values += [float(metric.has_reset), *(s.item() for s in there)]
            signature.append((key, metric.meta, *(s.dtype if isinstance(s, torch.Tensor) else None for s in states)))
        if signature != self._metas[0]:
            rows = [(key, _meta(meta), dtypes) for key, meta, *dtypes in signature]
            self._metas = signature, pickle.dumps(rows)
        elif values == self._last[0]:
            return self._last[1]
        head = self._metas[1]
        self._last = values, struct.pack(f"<I{len(values)}d", len(head), *values) + head
        return self._last[1]


def decode_own(data: bytes) -> list[dict[str, Any]]:
    """What `OwnAccumulators.encode` returned -> rows for `restore_results`."""
    if not data:
        return []
    (length,) = struct.unpack_from("<I", data)
    rows: list[dict[str, Any]] = []
    values = iter(struct.unpack(f"<{(len(data) - length - 4) // 8}d", data[4 : len(data) - length]))
    for key, meta, dtypes in pickle.loads(data[len(data) - length :]):
        reset = bool(next(values))
        found = zip(_STATES, dtypes, strict=True)
        states = {n: torch.tensor(next(values), dtype=torch.float64).to(d) for n, d in found if d is not None}
        rows.append({"key": key, **meta, "states": states, "has_reset": reset})
    return rows


def encode_results(results: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """What snapshots hold -> plain values and tensors."""
    return [_encode(*row) for row in results if row[1].is_tensor and row[1].meta.sync.group is None]


def _encode(key: str, metric: Any, *states: Any) -> dict[str, Any]:
    return {
        "key": key,
        **_meta(metric.meta),
        "states": {n: _plain(v) for n, v in zip(_STATES, states, strict=False) if v is not None},
        "has_reset": states[-1],
    }


def _meta(meta: Any) -> dict[str, Any]:
    return {
        "meta": {name: getattr(meta, name) for name in _FIELDS},
        "reduce": meta.reduce_fx.__name__,
        "sync": (meta.sync.should, meta.sync.rank_zero_only),
    }


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone()


def restore_results(trainer: Any, rows: list[dict[str, Any]]) -> None:
    """Restore the accumulators of `trainer`'s training loop."""
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
