"""Epoch-level accumulators of `self.log`, encoded in plain values and rebuilt after a resume.

Lightning does not save them, so that a mean over an epoch would begin anew at a resume in its middle, and an
early stop or a plateau scheduler that watches it would decide differently. Each rank has its own: they are reduced
over the ranks only where the user asks for that, and at the end of the epoch. Metrics that are torchmetrics objects
keep their state themselves (`metric_objects`).
"""

from __future__ import annotations

import operator
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

from lastgasp.adapter.torch import changes_of

_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
           "dataloader_idx", "metric_attribute")  # fmt: skip
_STEPS = ("training_step", "validation_step")
_STATES = ("value", "cumulated_batch_size", "_forward_cache", "_computed")

_LENGTH, _BEHIND = struct.Struct("<I"), 1 << 31


class PerStep:
    """Bytes for a rank's auxiliary state that change in each step.

    What is on an accelerator is left out: to read it the host would wait for the device at every step.

    Args:
        trainer: of this fit, set up.
    """

    def __init__(self, trainer: Any) -> None:
        self._epoch = trainer.fit_loop.epoch_loop
        self._encoded, self._without = b"", (b"", b"")
        self._unsettled: bytes | None = None
        self._more = False

    def at(self, settled: bool) -> bytes:
        """For a record; as `behind` where the rank may be killed before what it has always logged behind an update."""
        found = self.encode()
        if not settled:
            self._unsettled = found
        elif self._unsettled is not None and self._unsettled is not found:
            self._more = True
        if settled or not self._more or not found:
            return found
        if found is not self._without[0]:
            self._without = found, self.behind(found)
        return self._without[1]

    def behind(self, found: bytes) -> bytes:
        """The same values, without what was logged behind the update; empty: they are of no use."""
        raise NotImplementedError

    def encode(self) -> bytes:
        """The values of this moment; the same object as before if nothing has changed."""
        raise NotImplementedError


class OwnAccumulators(PerStep):
    """This rank's accumulators of `self.log`."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._metrics: list[Any] = []
        self._rows: list[tuple[Any, tuple[str, ...], Callable[[Any], tuple[Any, ...]]]] = []
        self._names: list[tuple[str, Any, tuple[str, ...]]] = []
        self._changes, self._checks = changes_of(), list[Any]()
        self._types: list[torch.dtype | None] = []
        self._head = b""

    def behind(self, found: bytes) -> bytes:
        """As in the base. In manual optimization all is logged there: who resumes takes another rank's, and says so."""
        if not self._epoch.trainer.lightning_module.automatic_optimization:
            return b""
        (length,) = _LENGTH.unpack_from(found)
        return _LENGTH.pack(length | _BEHIND) + found[_LENGTH.size :]

    def encode(self) -> bytes:
        """As in the base."""
        results = self._epoch._results
        if not results:
            return b""
        if len(results) != len(self._metrics) or not all(map(operator.is_, results.values(), self._metrics)):
            self._arrange(results)
        # Lightning replaces these tensors at each update, it never changes them alone (result.py, `update`).
        if not self._rows:
            return b""
        if not self._checks or self._changes(self._checks) is not None:
            seen: list[Any] = []
            self._checks = []
            for metric, names, take in self._rows:
                attributes = vars(metric)
                found = take(attributes)
                self._checks.append((metric, type(metric), names, found, len(attributes)))
                seen += found
            self._encoded = self._encode(seen)
        return self._encoded

    def _arrange(self, results: Any) -> None:
        """A metric was added: hardly ever after the first steps."""
        self._metrics = [*results.values()]
        self._rows, self._names, self._checks, self._types = [], [], [], []
        for key, metric in results.items():
            if metric.is_tensor and metric.meta.sync.group is None:
                names = tuple(name for name in _STATES if name in vars(metric))
                there = ("has_reset", *names)
                self._rows.append((metric, there, operator.itemgetter(*there)))
                self._names.append((key, metric.meta, names))

    def _encode(self, seen: list[Any]) -> bytes:
        values: list[float] = []
        types: list[torch.dtype | None] = []
        for state in seen:
            if state is None or not isinstance(state, torch.Tensor):
                types.append(None)
                values += (state,) if state is True or state is False else ()  # has_reset
            elif state.is_cpu:
                types.append(state.dtype)
                values.append(state.item())
            else:
                return b""
        if types != self._types or not self._head:
            self._types, self._head = types, self._describe(iter(types))
        return _LENGTH.pack(len(self._head)) + struct.pack(f"<{len(values)}d", *values) + self._head

    def _describe(self, types: Iterator[torch.dtype | None]) -> bytes:
        rows = []
        for key, meta, names in self._names:
            next(types)  # of has_reset
            there = dict(zip(names, types, strict=False))  # in this order: the names end first
            rows.append((key, meta_of(meta), [there.get(name) for name in _STATES]))
        return pickle.dumps(rows)


def decode_own(data: bytes) -> list[dict[str, Any]]:
    """What `OwnAccumulators.encode` returned -> rows for `restore_results`."""
    if not data:
        return []
    length = _LENGTH.unpack_from(data)[0] & ~_BEHIND
    rows: list[dict[str, Any]] = []
    values = iter(struct.unpack(f"<{(len(data) - length - 4) // 8}d", data[4 : len(data) - length]))
    for key, meta, dtypes in pickle.loads(data[len(data) - length :]):
        reset = bool(next(values))
        found = zip(_STATES, dtypes, strict=True)
        states = {n: torch.tensor(next(values), dtype=torch.float64).to(d) for n, d in found if d is not None}
        rows.append({"key": key, **meta, "states": states, "has_reset": reset})
    return rows


def is_behind(data: bytes) -> bool:
    """Whether what was logged behind the update is not in what `OwnAccumulators.at` returned."""
    return bool(data) and bool(_LENGTH.unpack_from(data)[0] & _BEHIND)


def encode_results(results: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """What snapshots hold -> plain values and tensors."""
    return [_encode(*row) for row in results if row[1].is_tensor and row[1].meta.sync.group is None]


def _encode(key: str, metric: Any, *states: Any) -> dict[str, Any]:
    return {
        "key": key,
        **meta_of(metric.meta),
        "states": {n: _plain(v) for n, v in zip(_STATES, states, strict=False) if v is not None},
        "has_reset": states[-1],
    }


def is_summed(row: dict[str, Any]) -> bool:
    """Whether all ranks' accumulators are reduced to one at the end of the epoch."""
    return bool(row["sync"][0] and row["meta"]["on_epoch"])


def logged_alone(trainer: Any) -> set[str]:
    """Names under which callbacks find what the steps of training and validation log without `sync_dist`.

    What hooks log at the end of an epoch is left out: mostly they have reduced it themselves.
    """
    loop, found = trainer.fit_loop.epoch_loop, set()
    for one in (*(loop._results or {}).values(), *(loop.val_loop._results or {}).values()):
        meta = one.meta
        if one.is_tensor and not meta.sync.should and meta.fx.partition(".")[0] in _STEPS:
            which = f"/dataloader_idx_{meta.dataloader_idx}"
            whose = which if meta.add_dataloader_idx and meta.dataloader_idx is not None else ""
            found |= {meta.name + kind + whose for kind in ("", "_step", "_epoch")}
    return found


def is_own(row: dict[str, Any]) -> bool:
    """Whether each rank accumulates for itself over the epoch."""
    return bool(row["meta"]["on_epoch"] and not row["sync"][0])


def with_others(rows: list[dict[str, Any]], others: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A rank's accumulators, and in them those of ranks that are missing, where all are reduced to one."""
    own = {row["key"]: row for row in rows if is_summed(row)}
    for other in (row for each in others for row in each if row["key"] in own):
        states, more = own[other["key"]]["states"], other["states"]
        if other["reduce"] in ("max", "min"):
            states["value"] = getattr(torch, other["reduce"] + "imum")(states["value"], more["value"])
        else:
            states |= {name: states[name] + more[name] for name in ("value", "cumulated_batch_size") if name in more}
    return rows


def as_first(rows: list[dict[str, Any]], first: list[dict[str, Any]]) -> None:
    """Have rank 0, which logs, go on with what the rank had that was 0 before.

    That is what it did in the step of the boundary, which is logged once more, and all that it had accumulated
    alone.
    """
    for one in first:
        row = next((row for row in rows if row["key"] == one["key"]), None)
        if row is None:
            rows += [] if is_summed(one) else [one]
            continue
        names = ("_forward_cache",) if is_summed(row) else _STATES
        row["states"].update({name: one["states"][name] for name in names if name in one["states"]})


def of_a_new_rank(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Another rank's accumulators, without what is in that one's already: all ranks must have the same ones."""
    begin = {"max": -torch.inf, "min": torch.inf}
    for row in filter(is_summed, rows):
        states = {name: one for name, one in row["states"].items() if name in ("value", "cumulated_batch_size")}
        row["states"] = {
            name: torch.full_like(one, begin.get(row["reduce"], 0.0) if name == "value" else 0)
            for name, one in states.items()
        }
    return rows


def meta_of(meta: Any) -> dict[str, Any]:
    """How an entry is logged, in plain values."""
    return {
        "meta": {name: getattr(meta, name) for name in _FIELDS},
        "reduce": meta.reduce_fx.__name__,
        "sync": (meta.sync.should, meta.sync.rank_zero_only),
    }


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone()


def entry_of(trainer: Any, how: dict[str, Any], *, is_tensor: bool) -> Any:
    """A new entry of `self.log`, without its value; how: as `meta_of` says."""
    meta = _Metadata(**how["meta"], reduce_fx=getattr(torch, how["reduce"]))
    should, rank_zero_only = how["sync"]
    meta.sync = _Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only)
    entry = _ResultMetric(meta, is_tensor=is_tensor)
    entry._update_count = 1
    return entry


def restore_results(trainer: Any, rows: list[dict[str, Any]]) -> None:
    """Restore the accumulators of `trainer`'s training loop."""
    results, device = trainer.fit_loop.epoch_loop._results, trainer.strategy.root_device
    for row in rows:
        entry = entry_of(trainer, row, is_tensor=True)
        for name, value in row["states"].items():
            setattr(entry, name, value.to(device))
        entry.has_reset = row["has_reset"]
        results[row["key"]] = entry
