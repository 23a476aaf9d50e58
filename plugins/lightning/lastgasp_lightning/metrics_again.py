"""What torchmetrics objects have accumulated (`metric_objects`), given back after a resume."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lastgasp_lightning.metric_objects import LENGTH, Held, Numbers, Objects, Row, made_of, metrics_of
from lastgasp_lightning.metrics import entry_of

log = logging.getLogger("lastgasp")

LOST_OBJECTS = "what torchmetrics objects had accumulated in this epoch on rank {} is lost"
BEGIN_ANEW = "torchmetrics objects begin anew, without what they had in this epoch: {}"

_MERGES: dict[Any, Callable[[Any, Any], Any]] = {
    dim_zero_sum: operator.add, dim_zero_cat: operator.add, dim_zero_max: torch.maximum, dim_zero_min: torch.minimum,
}  # fmt: skip
_decode, _encode = msgspec.msgpack.Decoder(Objects).decode, msgspec.msgpack.Encoder().encode
_decode_list = msgspec.msgpack.Decoder(list[Numbers]).decode


class Share(msgspec.Struct, array_like=True):
    """What a rank tells the others before they restore: theirs must be the same entries, in the same order.

    Args:
        has: it has its own metrics; names: that it can restore; lacks: those that have begun anew.
    """

    has: bool
    behind: bool
    names: list[str]
    lacks: list[str]
    rows: list[Row]
    order: list[str]
    groups: dict[str, list[list[str]]]


def restore_objects(
    trainer: Any, own: bytes, gather: Callable[[bytes], Sequence[bytes]], gone: Iterable[bytes] = (), first: bytes = b""
) -> tuple[list[int], list[str], bool]:
    """Give the module's metrics, and the entries of `self.log` that hold them, what they had. All ranks call it.

    Args:
        own: of this rank (`OwnObjects.encode`); empty where it was lost. gather: from all ranks, in their order.
        gone: of ranks that are missing, which this one has too from now on; first: of rank 0 before, if that is one.

    Returns:
        The ranks that had none, where others had; names of metrics of which a part is lost; whether this rank lacks
        what was added behind the update of the step.
    """
    metrics = dict(metrics_of(trainer.lightning_module))
    mine, others = _decoded(own), [*map(_decoded, filter(None, gone))]
    lacks = {name for one in (mine, *others) for name in one.left}
    lacks |= {name for one in others for name, held in one.metrics.items() if not _can_merge(metrics.get(name), held)}
    others_now = {name for name, held in mine.metrics.items() if _is_another(metrics.get(name), held)}
    there = [*((mine.metrics.keys() & metrics.keys()) - others_now)]
    share = Share(bool(own), mine.behind, there, [*lacks | others_now], mine.rows, mine.order, mine.groups)
    shares = [msgspec.msgpack.decode(one, type=Share) for one in gather(_encode(share))]
    known = sorted((one for one in shares if one.has), key=lambda one: one.behind)
    if not known:
        return [], [], False
    names = set.intersection(*(set(one.names) for one in known))
    failed: set[str] = set()
    for name in names & mine.metrics.keys():
        try:
            _give(metrics[name], mine.metrics[name])
            for other in others:
                if name in other.metrics and name not in lacks:
                    _merge(metrics[name], other.metrics[name])
        except Exception:  # it is another one now
            log.debug("metric %s cannot be restored", name, exc_info=True)
            metrics[name].reset()
            failed.add(name)
    leader = share if share.has and not share.behind else known[0]
    _share_states(trainer.lightning_module, leader.groups, names - failed)
    _restore_rows(trainer, leader, {name: metrics[name] for name in names & metrics.keys()}, _decoded(first).rows)
    lost = [rank for rank, one in enumerate(shares) if not one.has]
    return lost, sorted(failed.union(*(one.lacks for one in known))), mine.behind


def accumulated(own: bytes) -> bool:
    """Whether a rank's metrics have something that a reduction over the ranks would lack without it."""
    return any(one.count for one in _decoded(own).metrics.values())


def _decoded(own: bytes) -> Objects:
    return _decode(own) if own else Objects({}, [], [], [], {})


def _give(metric: Any, held: Held) -> None:
    metric._update_count, metric._computed, metric._forward_cache = held.count, None, None
    for name, value in held.plain.items():
        setattr(metric, name, value)
    for name, numbers in held.tensors.items():
        setattr(metric, name, _tensor(numbers).to(getattr(metric, name).device))
    for name, data in held.lists.items():
        setattr(metric, name, [one.to(metric.device) for one in _list(data)])


def _is_another(metric: Any, held: Held) -> bool:
    """Whether the script makes it with other settings now, by which what it had is no use."""
    return metric is not None and held.made not in ("", made_of(metric))


def _can_merge(metric: Any, held: Held) -> bool:
    """Whether what a rank that is missing had can be added to another rank's."""
    if metric is None or not held.count:
        return True
    return not metric.sync_on_compute or all(reduce in _MERGES for reduce in metric._reductions.values())


def _merge(metric: Any, held: Held) -> None:
    """Add what a rank that is missing had, where the metric is put together over the ranks that there are."""
    if not metric.sync_on_compute or not held.count:
        return
    for name, reduce in metric._reductions.items():
        here = getattr(metric, name)
        there: Any = _list(held.lists[name]) if name in held.lists else _tensor(held.tensors[name]).to(here.device)
        setattr(metric, name, _MERGES[reduce](here, there))
    metric._update_count, metric._computed = metric._update_count + held.count, None


def _share_states(module: nn.Module, groups: dict[str, list[list[str]]], restored: set[str]) -> None:
    """Where all of a collection's are there again; else it finds the groups itself, at the next update."""
    for name, one in module.named_modules():
        if not isinstance(one, MetricCollection) or name not in groups:
            continue
        members = {key for group in groups[name] for key in group}
        if members == set(one._modules) and all(f"{name}.{key}" in restored for key in members):
            one._groups, one._groups_checked = dict(enumerate(groups[name])), True
            one._state_is_copy = False
            one._compute_groups_create_state_ref()


def _restore_rows(trainer: Any, leader: Share, metrics: dict[str, Metric], first: Iterable[Row]) -> None:
    results: Any = trainer.fit_loop.epoch_loop._results
    logged = {row.key: row.cache for row in first}
    for row in leader.rows:
        if (metric := metrics.get(row.meta["meta"]["metric_attribute"])) is None:
            continue
        entry, cache = entry_of(trainer, row.meta, is_tensor=False), logged.get(row.key, row.cache)
        entry.value, entry._forward_cache = metric, None if cache is None else _tensor(cache).to(metric.device)
        entry.has_reset = row.reset
        results[row.key] = entry
    ordered = {key: results[key] for key in (*(k for k in leader.order if k in results), *results)}
    results.clear()
    results.update(ordered)


def _tensor(numbers: Numbers) -> Tensor:
    dtype = getattr(torch, numbers.dtype)
    if not numbers.data:
        return torch.empty(numbers.shape, dtype=dtype)
    return torch.frombuffer(bytearray(numbers.data), dtype=dtype).reshape(numbers.shape)


def _list(data: bytes) -> list[Tensor]:
    found: list[Tensor] = []
    at = 0
    while at < len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size + length
        found += map(_tensor, _decode_list(data[at - length : at]))
    return found
