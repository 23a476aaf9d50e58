"""What a file of MindSpore itself contains; the files here are equal to real ones (docs/facts/mindformers.md §5)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lastgasp.mindspore.content import Unreadable, read_content
from lastgasp.testing import corrupt
from support.mindspore_files import boundary, ckpt, state, write

FORMATS = [(ext, crc) for ext in ("ckpt", "safetensors") for crc in (False, True)]
each_format = pytest.mark.parametrize(("ext", "crc"), FORMATS, ids=[f"{e}{'+crc' * c}" for e, c in FORMATS])


@each_format
def test_parameters_and_numbers(tmp_path: Path, ext: str, crc: bool) -> None:
    values = state(12, 2)
    content = read_content(write(tmp_path / f"a.{ext}", values, crc=crc))
    assert content.numbers == {"global_step": 12, "epoch_num": 2, "step_num": 12}
    assert content.step == 12
    assert content.sizes == {name: len(value[2]) for name, value in values.items()}
    assert content.checksum == crc


@each_format
def test_every_cut_is_seen_but_those_between_two_parameters(tmp_path: Path, ext: str, crc: bool) -> None:
    values = state(12, 2, parameters=1)
    whole = write(tmp_path / f"a.{ext}", values, crc=crc).read_bytes()
    unseen = []
    for size in itertools.chain(range(0, len(whole), 7), [len(whole) - 1], [boundary(values, n) for n in range(1, 6)]):
        path = tmp_path / f"cut.{ext}"
        path.write_bytes(whole[:size])
        try:
            read_content(path)
        except Unreadable:
            continue
        unseen.append(size)
    between = {boundary(values, number) for number in range(1, len(values) + 1)}
    assert set(unseen) <= between
    assert bool(unseen) == (ext == "ckpt")


@each_format
def test_a_flipped_bit_is_seen_where_there_is_a_checksum(tmp_path: Path, ext: str, crc: bool) -> None:
    path = write(tmp_path / f"a.{ext}", state(12, 2), crc=crc)
    corrupt.flip_bit(path, path.read_bytes().index(b"weight", 3000) - 400 if ext == "ckpt" else -9, 3)
    if crc:
        with pytest.raises(Unreadable, match="checksum"):
            read_content(path)
    else:
        read_content(path)


NONE = [b"", b"\0" * 64, b"PK\3\4" + b"x" * 100, b"\x0a", b"\x0a\xff", b"\x0a\x02\x0a\xff", b"\xff" * 40, b"\x12\0"]


@pytest.mark.parametrize("data", NONE)
@pytest.mark.parametrize("ext", ["ckpt", "safetensors"])
def test_what_is_none_is_unreadable_and_nothing_else(tmp_path: Path, data: bytes, ext: str) -> None:
    path = tmp_path / f"a.{ext}"
    path.write_bytes(data)
    with pytest.raises(Unreadable):
        read_content(path)


def test_a_slice_that_is_missing_is_seen(tmp_path: Path) -> None:
    values = state(12, 2)
    name, (kind, dims, content) = next(iter(values.items()))
    half = ckpt({name: (kind, dims, content[: len(content) // 2])})
    path = tmp_path / "a.ckpt"
    path.write_bytes(half + ckpt({k: v for k, v in values.items() if k != name}))
    with pytest.raises(Unreadable, match="its shape needs 1200"):
        read_content(path)
    path.write_bytes(half + ckpt({name: (kind, dims, content[len(content) // 2 :])}))  # two slices, as of a large one
    assert read_content(path).sizes == {name: 1200}
