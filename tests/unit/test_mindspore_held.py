"""Arenas of MindSpore's ranks: what is copied, and the files that another rank writes of it. Needs no MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest

from lastgasp.adapter import ManifestWriter, NotSaveable
from lastgasp.adapter.arenas import Arena, Wanted
from lastgasp.adapter.mindspore import FORMAT, LEGACY, decode_aux
from lastgasp.checkpoint import verify
from lastgasp.config import GaspConfig
from lastgasp.topology import Place
from lastgasp_mindformers.aux_state import AuxState, Numbers
from lastgasp_mindformers.image import Image, encoded
from lastgasp_mindformers.source import MindSporeSource
from unit.test_mindspore_state import Native, Rank, aux_state, numbers


class Param:
    """A parameter of MindSpore's, by what is asked of it."""

    def __init__(self, value: Any, dtype: str = "Float32") -> None:
        self.value, self.dtype, self.shape = numpy.asarray(value), dtype, numpy.asarray(value).shape

    def asnumpy(self) -> Any:
        """The live values, where numpy has the type."""
        if self.dtype == "BFloat16":
            raise TypeError("For asnumpy, the type of tensor cannot be BFloat16")
        return self.value

    def get_bytes(self) -> bytes:
        """Of a type that numpy has not."""
        return bytes(self.value.tobytes())


class Shards(Native):
    """Has two parameters."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.params: Mapping[str, Any] = {
            "w": Param(numpy.arange(6, dtype=numpy.float32).reshape(2, 3)),
            "b": Param(numpy.arange(3, dtype=numpy.uint16), "BFloat16"),
        }

    def parameters(self) -> Mapping[str, Any]:
        """As they are now."""
        return self.params

    def write_image(self, folder: Path, files: Any, image: Image, numbers: Numbers, statistics: Any) -> None:
        """What the image holds."""
        self.written.append(folder / files[0])
        self.written[-1].write_bytes(b"".join(image.bytes_of(one) for one in image.held.values()))


def aux_of(rank: int, step: int = 4) -> bytes:
    """One that tells its rank."""
    state = msgspec.msgpack.decode(aux_state(b"", "mean"), type=AuxState)
    return msgspec.msgpack.encode(msgspec.structs.replace(state, numbers=numbers(step), data=f"of rank {rank}"))


def payload(rank: int, params: Mapping[str, Any], step: int = 4) -> memoryview:
    """As an arena has it."""
    return memoryview(b"".join(encoded(rank, aux_of(rank, step), params)))


def test_parameters_come_back_from_their_bytes() -> None:
    params = {"w": Param(numpy.arange(6.0).reshape(2, 3), "Float64"), "none": Param(numpy.zeros((0, 4), numpy.int32)),
              "one": Param(numpy.array(7, numpy.int32), "Int32"), "b": Param(numpy.ones(3, numpy.uint16), "BFloat16"),
              "turned": Param(numpy.arange(6, dtype=numpy.int32).reshape(2, 3).T, "Int32")}  # fmt: skip
    image = Image(payload(1, params))
    assert (image.rank, image.aux, image.numbers) == (1, aux_of(1), numbers(4))
    assert {name: (one.kind, one.shape) for name, one in image.held.items()} == {
        name: (param.dtype, param.shape) for name, param in params.items()
    }
    for name, one in image.held.items():
        assert bytes(image.bytes_of(one)) == params[name].value.tobytes()
    assert image.differing(params, ()) == []
    params["w"].value[0, 0] += 1
    params["one"].value += 1
    assert image.differing(params, ["one"]) == ["w"]


@pytest.mark.parametrize("damage", [b"", b"\0" * 16, b"\1" * 400])
def test_what_is_no_image_is_not_saved(damage: bytes) -> None:
    with pytest.raises(NotSaveable, match="does not hold a step of MindSpore"):
        Image(memoryview(damage))


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MindSporeSource]:
    """Of rank 0 of two, at step 4 and in the graph of step 5; its arena holds step 4."""
    place = Place(rank=0, world_size=2, replicas=((0,), (1,)), job="job")
    rank, native = Rank(monkeypatch), Shards(tmp_path)
    found = MindSporeSource(rank.state, native, ManifestWriter(FORMAT, place), GaspConfig(directory=tmp_path))
    monkeypatch.setattr(found, "capture", lambda step: aux_of(0))
    found.arena = arena = Arena()
    arena.reserve(1 << 16)
    arena.copy(4, encoded(0, aux_of(0), native.params))
    yield found
    arena.close()


def nothing() -> None:
    """The payloads are what was copied."""


def test_a_survivor_writes_its_own_files_and_those_of_an_arena(source: MindSporeSource, tmp_path: Path) -> None:
    theirs = payload(1, {"w": Param(numpy.full(3, 7, numpy.float32))})
    known = {1: aux_of(1)}
    saved = source.save_shards(4, known, "because", Wanted(own=True, arenas={1: theirs}, common=0, verify=nothing))
    source.publish(saved, {0: saved.part})
    path = Path(saved.path)
    assert verify(path, LEGACY).ok
    assert (tmp_path / "rank_1/tiny_rank_1-1_4.ckpt").read_bytes() == numpy.full(3, 7, numpy.float32).tobytes()
    assert (tmp_path / "rank_0/tiny_rank_0-1_4.ckpt").read_text() == "4"
    assert decode_aux((tmp_path / "tiny_rank-1_4.ckpt.small").read_bytes()) == {0: aux_of(0), 1: aux_of(1)}


def test_an_older_step_than_the_live_one_is_written_from_arenas_alone(
    source: MindSporeSource, tmp_path: Path
) -> None:
    arenas = {rank: payload(rank, {"w": Param(numpy.full(3, rank, numpy.float32))}, 3) for rank in (0, 1)}
    saved = source.save_shards(3, {}, "because", Wanted(own=False, arenas=arenas, common=0, verify=nothing))
    source.publish(saved, {0: saved.part})
    for rank in (0, 1):
        assert (tmp_path / f"rank_{rank}/tiny_rank_{rank}-1_3.ckpt").read_bytes() == bytes(arenas[rank][-64:-52])
    assert verify(Path(saved.path), LEGACY).ok


def test_what_callbacks_have_changed_behind_the_copy_is_not_mixed_with_it(
    source: MindSporeSource, tmp_path: Path
) -> None:
    native: Any = source._native
    native.params["w"].value += 1
    with pytest.raises(NotSaveable, match="callbacks have changed w behind the copy"):
        source.save_shards(4, {}, "because", Wanted(own=True, arenas={1: payload(1, {})}, common=0, verify=nothing))
    assert not list(tmp_path.iterdir())
    source.discard(source.save(4, {}, "because"))  # each rank its own: those are all as they are now


def test_a_damaged_arena_is_not_even_looked_at(source: MindSporeSource, tmp_path: Path) -> None:
    def damaged() -> None:
        raise RuntimeError("does not match its digest")

    with pytest.raises(RuntimeError, match="digest"):
        source.save_shards(4, {}, "because", Wanted(own=True, arenas={1: memoryview(b"")}, common=0, verify=damaged))
    assert not list(tmp_path.iterdir())


def test_a_step_is_copied_before_anybody_knows_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, seen = Rank(monkeypatch), list[tuple[int, bytes, int]]()
    rank.state.keep = lambda numbers, aux: seen.append((numbers.step, aux, rank.status.step))

    def capture(numbers: Numbers, before: Callable[[bytes], None] = lambda data: None) -> None:
        before(b"aux")

    monkeypatch.setattr(rank.aux, "capture", capture)
    rank.gate.counters = (5, 5)
    rank.state.step_end(numbers(5))
    assert (seen, rank.status.step) == ([(5, b"aux", 4)], 5)
    rank.state.capture_again()
    assert len(seen) == 1
