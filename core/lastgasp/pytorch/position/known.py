"""Loaders of other packages whose position does not follow from their methods alone. None of them is imported here."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lastgasp.pytorch.position.loaders import StatefulPosition, StreamPosition, encoded, is_stateful
from lastgasp.pytorch.position.protocol import PREPARED, WORKERS, LoaderPosition, PassStart
from lastgasp.pytorch.position.registry import builtin_position, register_loader
from lastgasp.pytorch.rng import RngRecorder


class TorchdataPosition(StatefulPosition):
    """torchdata's StatefulDataLoader: exact but for what worker processes draw for a map-style dataset."""

    @property
    def inexact(self) -> str:
        """Its workers begin with new random numbers, unless they go forward by loading again."""
        own = not self.loader.num_workers or is_stateful(self.loader.dataset)
        return super().inexact or ("" if own or isinstance(self.loader.dataset, IterableDataset) else WORKERS)

    def load(self, state: Any, over: bool) -> None:
        """A pass that is over leaves nothing behind: whatever state it had, the next one begins anew."""
        if not over:
            super().load(state, over)


class LitdataPosition(StatefulPosition):
    """litData's StreamingDataLoader: after the last batch of an epoch its state means that epoch from its beginning."""

    def resume(self, start: PassStart, state: bytes, consumed: int, over: bool = False) -> int | None:
        """Nothing is left of an epoch whose last batch was consumed."""
        return super().resume(start, state, consumed, over or (bool(state) and consumed >= len(self.loader)))

    def load(self, state: Any, over: bool) -> None:
        """The next iteration continues the epoch, or is the next epoch."""
        super().load(state, over)
        self.loader.restore = not over
        epoch = state["dataset"].get("current_epoch")
        if epoch is not None:  # only the workers' copies of the dataset would know, and the next state would lack it
            self.loader.dataset.current_epoch = epoch


class StreamingPosition(StatefulPosition):
    """MosaicML's StreamingDataLoader: a pass that is over has its epoch counted."""

    def load(self, state: Any, over: bool) -> None:
        """The next iteration continues the epoch, or is the next epoch."""
        if state is not None:
            state = state | {"epoch": state["epoch"] + 1, "sample_in_epoch": 0} if over else state
            super().load(state, over)


class DatasetPosition(StreamPosition):
    """A DataLoader without workers over an iterable dataset that knows its own position (Hugging Face `datasets`)."""

    live = True

    def begin(self) -> None:
        """The dataset would begin each of its iterations where it was resumed."""
        if vars(self.loader.dataset).pop(_LOADED, False):
            self.loader.dataset.load_state_dict(None)
        super().begin()

    def resume(self, start: PassStart, state: bytes, consumed: int, over: bool = False) -> int | None:
        """Load the dataset's state; where that is not known, or the loader was of another shape then, draw again."""
        if over or not state.startswith(pickle.PROTO):
            return super().resume(start, state, consumed, over)
        self.restore(start, consumed)
        self.loader.dataset.load_state_dict(pickle.loads(state))
        vars(self.loader.dataset)[_LOADED] = True
        return 0

    def state(self) -> bytes:
        """That of the dataset. Without workers nothing is loaded ahead."""
        return encoded(self.loader.dataset.state_dict())


_LOADED = "_lastgasp_loaded"


class PipelinePosition(StreamPosition):
    """A WebDataset pipeline, by `webdataset.WebLoader` or torch's DataLoader: it has no state, and is drawn again.

    Its stages count epochs and have seeds, which are put back. A stage that seeds itself by the clock gives another
    order each time.
    """

    live, _unlike = True, False

    def begin(self) -> None:
        """Remember the stages' epochs and seeds."""
        super().begin()
        self.start.counters = self.state()

    def resume(self, start: PassStart, state: bytes, consumed: int, over: bool = False) -> int | None:
        """Put them back: those of the pass's beginning, or of its end."""
        self._count(state if over else start.counters)
        return super().resume(start, state, consumed, over)

    def state(self) -> bytes:
        """The epochs and seeds of the stages."""
        return pickle.dumps([_own(stage) for stage in stages(self.loader)])

    def _count(self, counters: bytes) -> None:
        rows = pickle.loads(counters) if counters.startswith(pickle.PROTO) else None
        self._unlike = bool(counters) and not isinstance(rows, list)  # accelerate had prepared the loader
        for stage, row in zip(stages(self.loader), rows if isinstance(rows, list) else [], strict=False):
            vars(stage).update(row["own"])
            getattr(stage, "kw", {}).update(row["kw"])

    @property
    def inexact(self) -> str:
        """By stages that seed themselves, and by workers that live on."""
        clocked = sorted({name for stage in stages(self.loader) if (name := _seeded_by_clock(stage))})
        if clocked:
            return (
                f"{', '.join(clocked)} of the WebDataset pipeline shuffles by the clock, so that its order cannot be "
                "repeated (give it a seed, or use detshuffle, or deterministic=True where shards are resampled)"
            )
        if super().inexact or self._unlike:
            return super().inexact or PREPARED
        loaders = [part for part in getattr(self.loader, "pipeline", []) if isinstance(part, DataLoader)]
        return WORKERS if any(part.num_workers and part.persistent_workers for part in loaders) else ""


def stages(subject: Any) -> Iterator[Any]:
    """The stages of a pipeline, those behind its loader first to last."""
    for part in getattr(subject, "pipeline", None) or [getattr(subject, "dataset", None)]:
        if part is None:
            continue
        yield part
        yield from stages(part)


def _own(stage: Any) -> dict[str, Any]:
    own = {name: value for name in ("epoch", "seed") if isinstance(value := getattr(stage, name, None), int | float)}
    kw = getattr(stage, "kw", {})
    return {"own": own, "kw": {"seed": kw["seed"]} if isinstance(kw.get("seed"), int | float) else {}}


def _seeded_by_clock(stage: Any) -> str:
    name = getattr(getattr(stage, "f", None), "__name__", "")
    if name == "resampled_":
        return "resampled"
    kw, args = getattr(stage, "kw", {}), getattr(stage, "args", ())
    if name == "_shuffle" and kw.get("seed") is None and kw.get("rng") is None and (not args or int(args[0]) > 1):
        return "shuffle"
    return "ResampledShards" if getattr(stage, "deterministic", True) is False else ""


class UncountedPosition(StreamPosition):
    """A streaming dataset in torch's DataLoader, where only its package's own loader counts what was consumed."""

    @property
    def inexact(self) -> str:
        """The epoch is counted by the process, from 0."""
        package = type(self.loader.dataset).__module__.partition(".")[0]
        return f"{package} counts epochs and samples in its own StreamingDataLoader only: use that one"


def _hugging_face(loader: Any, recorder: RngRecorder) -> LoaderPosition:
    dataset = getattr(loader, "dataset", None)
    if type(loader) is not DataLoader or loader.num_workers or not is_stateful(dataset) or _loses_some(dataset):
        return builtin_position(loader, recorder)
    return DatasetPosition(loader, recorder)


def _loses_some(dataset: Any) -> bool:
    """Its state is not exact: what is in a shuffle buffer, or in a batch of Arrow rows that is mapped, is lost.

    So is the rest of a shard of a `Dataset` (`to_iterable_dataset`) that is mapped or filtered, in datasets 4.4.1.
    """
    nodes = list(_nodes(dataset._ex_iterable))
    table = any(getattr(getattr(node, "formatting", None), "is_table", False) for node in [*nodes, dataset])
    table = table or getattr(getattr(dataset, "_formatting", None), "is_table", False)
    buffered = any("Buffer" in type(node).__name__ for node in nodes)
    names = {type(node).__name__ for node in nodes}
    rest = {"FormattedExamplesIterable", "ArrowExamplesIterable"} <= names
    return buffered or rest or (table and any(getattr(node, "batched", False) for node in nodes))


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for inner in [*getattr(node, "ex_iterables", []), getattr(node, "ex_iterable", None)]:
        if inner is not None:
            yield from _nodes(inner)


def _torchdata(loader: Any, recorder: RngRecorder) -> LoaderPosition:
    """Its state has in it that of its dataset, which may be inexact: it is iterated again then."""
    if hasattr(loader.dataset, "_ex_iterable") and _loses_some(loader.dataset):  # Hugging Face's, or a subclass of it
        return StreamPosition(loader, recorder)
    return TorchdataPosition(loader, recorder)


def _uncounted(loader: Any, recorder: RngRecorder) -> LoaderPosition:
    return UncountedPosition(loader, recorder) if type(loader) is DataLoader else builtin_position(loader, recorder)


register_loader("streaming.base.dataset:StreamingDataset", _uncounted)
register_loader("litdata.streaming.dataset:StreamingDataset", _uncounted)
register_loader("datasets.iterable_dataset:IterableDataset", _hugging_face)
register_loader("webdataset.pipeline:DataPipeline", PipelinePosition)
register_loader("litdata.streaming.dataloader:StreamingDataLoader", LitdataPosition)
register_loader("streaming.base.dataloader:StreamingDataLoader", StreamingPosition)
register_loader("torchdata.stateful_dataloader:StatefulDataLoader", _torchdata)
