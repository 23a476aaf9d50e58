"""Loaders of other packages come back to where they stood, on tiny data sets; each where it is installed."""

from __future__ import annotations

import importlib
import importlib.machinery
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from frameworks.position_rig import Loop, Ran, Stopped
from frameworks.test_positions import Numbers, Stream
from lastgasp.pytorch import rng
from lastgasp.pytorch.position import CHANGED, STREAM, WORKERS, PassStart, position_of
from lastgasp.pytorch.position.accelerated import AcceleratedPosition
from lastgasp.pytorch.position.known import DatasetPosition, LitdataPosition, PipelinePosition, StreamingPosition
from lastgasp.pytorch.position.loaders import encoded
from lastgasp.pytorch.position.protocol import PREPARED

pytestmark = pytest.mark.usefixtures("childrens_signal")

STOPS = (1, 3, 5, 7, 10)
SOME = (2, 5, 7)


def package(name: str) -> Any:
    """It, or the reason why the test is skipped."""
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'lastgasp[loaders]'")


def stops(workers: int) -> tuple[int, ...]:
    return SOME if workers else STOPS


# -- torchdata ------------------------------------------------------------------------------------------------


def torchdata_loader(kind: str, workers: int) -> Callable[[], Any]:
    stateful = package("torchdata.stateful_dataloader").StatefulDataLoader
    data: Callable[[], Any] = {"shuffled": Numbers, "noisy": lambda: Numbers(True), "iterable": Stream}[kind]
    return lambda: stateful(data(), 4, shuffle=kind != "iterable", num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "iterable"])
def test_torchdata(kind: str, workers: int) -> None:
    loop = Loop(torchdata_loader(kind, workers))
    told = loop.check(stops(workers))
    assert told == (WORKERS if workers and kind == "shuffled" else "")


def test_torchdata_loads_random_augmentation_again_without_workers() -> None:
    loop = Loop(torchdata_loader("noisy", 0), epochs=3)
    loop.check(STOPS)
    loop.check_twice(6, 2)
    Loop(torchdata_loader("noisy", 0), epochs=3, most=3).check((2, 3, 4, 6))


def test_a_state_of_generators_is_encoded_fast() -> None:
    """Torch's own pickling of a tensor takes up to milliseconds."""
    loader = torchdata_loader("shuffled", 0)()
    position = position_of(loader, rng.RngRecorder())
    next(iter(loader))
    assert b"torch._utils" not in position.state() and b"storage" not in position.state()


# -- accelerate -----------------------------------------------------------------------------------------------


def accelerated(kind: str, workers: int) -> Callable[[], Any]:
    accelerate = package("accelerate")
    data: Callable[[], Any] = {"iterable": Stream, "noisy": lambda: Numbers(True)}.get(kind, Numbers)

    def make() -> Any:
        settings = accelerate.DataLoaderConfiguration(
            use_seedable_sampler=kind == "seeded", use_stateful_dataloader=kind == "stateful"
        )
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
        return accelerator.prepare(DataLoader(data(), 4, shuffle=kind != "iterable", num_workers=workers))

    return make


@pytest.mark.parametrize(
    ("kind", "workers"),
    [(kind, workers) for kind in ("shuffled", "seeded", "iterable") for workers in (0, 2)]
    + [("stateful", 0), ("noisy", 0)],
)
def test_accelerate(kind: str, workers: int, restored_environ: None) -> None:
    """It has `state_dict` by name only, fetches a batch ahead, and shuffles by the number of the pass."""
    loop = Loop(accelerated(kind, workers), epochs=3)
    assert loop.check(stops(workers)) == ""
    if not workers:
        loop.check_twice(6, 2)
        Loop(accelerated(kind, 0), epochs=3, most=3).check((2, 3, 4, 6))


class InTurn(Sampler[int]):
    """Draws each index when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(20, ())) for _ in range(20))

    def __len__(self) -> int:
        return 20


def test_accelerate_with_an_order_that_is_drawn_in_turn_is_reported(restored_environ: None) -> None:
    accelerator = package("accelerate").Accelerator(cpu=True)
    loop = Loop(lambda: accelerator.prepare(DataLoader(Numbers(), 4, sampler=InTurn())), epochs=1)
    stopped = loop.run(3)
    assert isinstance(stopped, Stopped)
    resumed = loop.run(start=stopped, number=99)
    assert isinstance(resumed, Ran) and resumed.inexact


@pytest.mark.parametrize("stop", [2, 7])
def test_accelerate_with_a_stateful_loader_and_workers(stop: int, restored_environ: None) -> None:
    """They begin the first pass when accelerate makes the loader, under the random state of then."""
    loop = Loop(accelerated("stateful", 2), epochs=2)
    whole, stopped = loop.whole(), loop.run(stop)
    assert isinstance(stopped, Stopped)
    for number in (3, 99):  # the second one is a script that sets no seed
        resumed = loop.run(start=stopped, number=number)
        assert isinstance(resumed, Ran)
        same = resumed.batches == whole.batches[stop:]
        assert (same, resumed.inexact == CHANGED) == ((number == 3 or stop == 7), not same)


def test_accelerate_goes_on_from_an_older_checkpoint(restored_environ: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which does not say whether a loader of torchdata's has begun."""
    begin = AcceleratedPosition.begin

    def as_before(self: AcceleratedPosition) -> None:
        begin(self)
        self.start.counters = pickle.dumps(pickle.loads(self.start.counters)[:2])

    loop = Loop(accelerated("seeded", 0), epochs=3)
    whole = loop.whole()
    monkeypatch.setattr(AcceleratedPosition, "begin", as_before)
    loop.check(SOME, whole)


class Drawn(IterableDataset[torch.Tensor]):
    """Numbers of a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.from_numpy(self.generator.integers(99, size=20))


@pytest.mark.parametrize("over", [True, False])
def test_a_loader_that_accelerate_had_not_prepared_before(over: bool, restored_environ: None) -> None:
    """The state of its generators is put back."""
    accelerate = package("accelerate")
    datasets = Drawn(), Drawn()
    loader = DataLoader(datasets[0], 4)
    before = position_of(loader, rng.RngRecorder())
    list(loader)
    after = position_of(accelerate.Accelerator(cpu=True).prepare(DataLoader(datasets[1], 4)), rng.RngRecorder())
    assert isinstance(after, AcceleratedPosition)
    assert after.resume(PassStart(), before.state(), 5, over) == (None if over else 5)
    first, second = (one.generator.bit_generator.state for one in datasets)
    assert (first == second) == over  # else the pass is drawn again first


# -- WebDataset -----------------------------------------------------------------------------------------------


def number_of(sample: dict[str, Any]) -> tuple[float]:
    return (float(sample["id.json"]),)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Five of four samples each."""
    wds = package("webdataset")
    folder = tmp_path_factory.mktemp("webdataset")
    for shard in range(5):
        with wds.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for i in range(4):
                writer.write({"__key__": f"{shard * 4 + i:03d}", "id.json": shard * 4 + i})
    return [str(folder / f"{shard}.tar") for shard in range(5)]


def pipeline(shards: list[str], kind: str, workers: int = 0, web: bool = True) -> Callable[[], Any]:
    wds = package("webdataset")

    def make() -> Any:
        known: dict[str, dict[str, Any]] = {
            "plain": {"shardshuffle": False},
            "clocked": {"shardshuffle": False},
            "det": {"shardshuffle": 5, "detshuffle": True},
            "seeded": {"shardshuffle": 5, "seed": 4},
            "resampled": {"resampled": True, "shardshuffle": False},
            "repeatable": {"resampled": True, "shardshuffle": False, "deterministic": True},
        }
        options = known[kind]
        deterministic = options.pop("deterministic", False)
        data = wds.WebDataset(shards, nodesplitter=wds.split_by_node, workersplitter=wds.split_by_worker, **options)
        if deterministic:
            data.pipeline[0].deterministic = True
        data = data.decode()
        if kind == "clocked":
            data = data.shuffle(10)
        if kind == "det":
            data = data.compose(wds.filters.detshuffle(10, seed=3))
        data = data.map(number_of).batched(4)
        data = data.with_epoch(5) if "resampled" in options else data
        return (wds.WebLoader if web else DataLoader)(data, batch_size=None, num_workers=workers)

    return make


@pytest.mark.parametrize("web", [True, False], ids=["WebLoader", "DataLoader"])
@pytest.mark.parametrize("kind", ["plain", "det", "seeded", "repeatable"])
def test_webdataset(kind: str, web: bool, shards: list[str]) -> None:
    loop = Loop(pipeline(shards, kind, web=web), epochs=3)
    assert loop.check(STOPS) == ""
    loop.check_twice(6, 2)
    Loop(pipeline(shards, kind, web=web), epochs=4, most=3).check((2, 3, 4, 6, 9))


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("prepared_before", [True, False])
def test_a_pipeline_that_accelerate_had_prepared_or_has_since(
    prepared_before: bool, over: bool, shards: list[str], restored_environ: None
) -> None:
    """The run goes on, and says what it does not know."""
    accelerate = package("accelerate")
    made = pipeline(shards, "det", web=False)
    loaders = made(), accelerate.Accelerator(cpu=True).prepare(made())
    before, after = (position_of(one, rng.RngRecorder()) for one in (loaders[::-1] if prepared_before else loaders))
    before.begin()
    list(loaders[prepared_before])
    assert after.resume(before.start, before.state(), 5, over) == (None if over else 5)
    assert after.inexact == PREPARED


@pytest.mark.parametrize("kind", ["plain", "det", "seeded"])
def test_webdataset_with_workers(kind: str, shards: list[str]) -> None:
    assert Loop(pipeline(shards, kind, 2)).check(SOME) == ""


@pytest.mark.parametrize(("kind", "name"), [("clocked", "shuffle"), ("resampled", "ResampledShards")])
def test_webdataset_that_shuffles_by_the_clock_is_reported(kind: str, name: str, shards: list[str]) -> None:
    loop = Loop(pipeline(shards, kind))
    whole = loop.whole()
    assert whole.inexact.startswith(f"{name} of the WebDataset pipeline")
    assert isinstance(position_of(loop.make(), rng.RngRecorder()), PipelinePosition)


# -- Hugging Face datasets ------------------------------------------------------------------------------------


def hugging_face(kind: str, workers: int = 0) -> Callable[[], Any]:
    datasets = package("datasets")
    rows = datasets.Dataset.from_dict({"id": [float(i) for i in range(20)]})

    def make() -> Any:
        if kind == "map-style":
            return DataLoader(rows.with_format("torch"), 4, shuffle=True, num_workers=workers)
        stream = rows.to_iterable_dataset(num_shards=4)
        if kind == "buffer":
            stream = stream.shuffle(seed=1, buffer_size=5)
        if kind == "mapped":
            stream = stream.map(lambda rows: {"id": rows["id"]}, batched=True, batch_size=3)
        if kind == "mapped-by-row":
            stream = stream.map(lambda row: {"id": row["id"]})
        if kind == "arrow":
            stream = stream.with_format("arrow").map(lambda table: table, batched=True, batch_size=3).with_format(None)
        return DataLoader(stream, 4, num_workers=workers)

    return make


def epoch_of_dataset(loader: Any, number: int) -> None:
    if hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(number)


@pytest.mark.parametrize("kind", ["map-style", "stream", "mapped", "mapped-by-row", "buffer", "arrow"])
def test_hugging_face(kind: str) -> None:
    loop = Loop(hugging_face(kind), epochs=3, epoch=epoch_of_dataset)
    assert loop.check(STOPS) == ""
    loop.check_twice(6, 2)
    Loop(hugging_face(kind), epochs=4, most=3, epoch=epoch_of_dataset).check((2, 3, 4, 6))


@pytest.mark.parametrize("kind", ["map-style", "stream", "buffer"])
def test_hugging_face_with_workers(kind: str) -> None:
    loop = Loop(hugging_face(kind, 2), epoch=epoch_of_dataset)
    assert loop.check(SOME) == (WORKERS if kind == "map-style" else "")


@pytest.mark.parametrize("kind", ["stream", "mapped-by-row", "buffer"])
def test_hugging_face_in_torchdatas_loader(kind: str) -> None:
    stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    made = hugging_face(kind)
    loop = Loop(lambda: stateful(made().dataset, 4), epochs=3, epoch=epoch_of_dataset)
    assert loop.check(STOPS) == ""


@pytest.mark.parametrize(("kind", "workers"), [("mapped-by-row", 0), ("stream", 2)])
def test_a_stream_that_had_a_state_before_is_iterated_again(kind: str, workers: int) -> None:
    """By an older lastgasp, or without the workers that it has now; also where a pass was over."""
    loader = hugging_face("stream")()
    list(loader)
    position = position_of(hugging_face(kind, workers)(), rng.RngRecorder())
    before = encoded(loader.dataset.state_dict())
    assert [position.resume(PassStart(), before, 5, over) for over in (True, False)] == [None, 5]
    assert position.inexact == ""


def test_a_stream_whose_buffer_is_taken_away_is_another_one() -> None:
    stopped = Loop(hugging_face("buffer"), epochs=3, epoch=epoch_of_dataset).run(7)
    assert isinstance(stopped, Stopped)
    resumed = Loop(hugging_face("stream"), epochs=3, epoch=epoch_of_dataset).run(start=stopped, number=99)
    assert isinstance(resumed, Ran) and resumed.inexact == CHANGED


def test_a_subclass_of_hugging_faces_dataset_in_torchdatas_loader() -> None:
    stateful = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    made = hugging_face("mapped-by-row")

    def make() -> Any:
        dataset = made().dataset
        dataset.__class__ = type("OfAUser", (type(dataset),), {"__module__": __name__})
        return stateful(dataset, 4)

    assert Loop(make, epochs=3, epoch=epoch_of_dataset).check(STOPS) == ""


def test_hugging_face_reads_nothing_again_where_its_state_is_exact() -> None:
    datasets = package("datasets")
    read: list[int] = []

    def noted(rows: list[dict[str, Any]]) -> Any:
        read.extend(row["id"] for row in rows)
        return {"id": [float(row["id"]) for row in rows]}

    def make() -> Any:
        stream = datasets.Dataset.from_dict({"id": list(range(20))}).to_iterable_dataset()
        return DataLoader(stream, 4, collate_fn=noted)

    loop = Loop(make)
    assert isinstance(position_of(make(), rng.RngRecorder()), DatasetPosition)
    stopped = loop.run(3)
    read.clear()
    assert isinstance(stopped, Stopped)
    loop.run(start=stopped)
    assert read[:2] == [12, 13]


# -- litData --------------------------------------------------------------------------------------------------


def same(number: int) -> float:
    return float(number)


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five of four samples each."""
    litdata = package("litdata")
    folder = tmp_path_factory.mktemp("litdata")
    method = multiprocessing.get_start_method(allow_none=True)
    litdata.optimize(fn=same, inputs=list(range(20)), output_dir=str(folder), chunk_size=4, num_workers=1)
    multiprocessing.set_start_method(method, force=True)  # it takes spawn, for good
    return folder


def lit(chunks: Path, shuffle: bool, workers: int) -> Callable[[], Any]:
    litdata = package("litdata")
    return lambda: litdata.StreamingDataLoader(
        litdata.StreamingDataset(str(chunks), shuffle=shuffle), batch_size=4, num_workers=workers
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_litdata(workers: int, chunks: Path) -> None:
    loop = Loop(lit(chunks, True, workers), epochs=3)
    assert isinstance(position_of(loop.make(), rng.RngRecorder()), LitdataPosition)
    assert loop.check(stops(workers)) == ""
    loop.check_twice(6, 2)
    Loop(lit(chunks, True, workers), epochs=4, most=3).check((2, 3, 4, 6))


def test_litdata_in_torchs_loader_is_reported(chunks: Path) -> None:
    litdata = package("litdata")
    position = position_of(DataLoader(litdata.StreamingDataset(str(chunks)), 4), rng.RngRecorder())
    assert position.kind == STREAM and "use that one" in position.inexact


# -- MosaicML streaming ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def streaming() -> Iterator[Any]:
    """The package. It imports torchvision for image data sets; a build of that for CUDA cannot be imported here."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        for name in ("", ".datasets", ".datasets.folder", ".transforms", ".transforms.functional"):
            stand_in: Any = MagicMock(__path__=[])
            stand_in.__spec__ = importlib.machinery.ModuleSpec(f"torchvision{name}", None)
            stand_in.VisionDataset = type("VisionDataset", (), {})
            sys.modules[f"torchvision{name}"] = stand_in
    found = package("streaming")
    yield found
    found.base.util.clean_stale_shared_memory()


@pytest.fixture(scope="module")
def mds(streaming: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty samples."""
    folder = tmp_path_factory.mktemp("streaming")
    with streaming.MDSWriter(out=str(folder), columns={"id": "int"}, size_limit=64) as writer:
        for i in range(20):
            writer.write({"id": i})
    return folder


def mosaic(streaming: Any, mds: Path, workers: int) -> Callable[[], Any]:
    def make() -> Any:
        data = streaming.StreamingDataset(local=str(mds), shuffle=True, batch_size=4, num_canonical_nodes=1)
        return streaming.StreamingDataLoader(data, batch_size=4, num_workers=workers)

    return make


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_mosaicml_streaming(workers: int, streaming: Any, mds: Path) -> None:
    loop = Loop(mosaic(streaming, mds, workers), epochs=3)
    assert isinstance(position_of(loop.make(), rng.RngRecorder()), StreamingPosition)
    assert loop.check(stops(workers)) == ""
    loop.check_twice(6, 2)
    Loop(mosaic(streaming, mds, workers), epochs=4, most=3).check((2, 3, 4, 6))
