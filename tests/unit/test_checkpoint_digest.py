"""The hashing writer and the verified reader."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgasp._fs import DISK, Disk, is_direct
from lastgasp.checkpoint import HashingWriter, VerifiedFile, digest, digest_file
from lastgasp.errors import DamagedCheckpoint
from lastgasp.testing.corrupt import flip_bit
from support.checkpoint_kit import FILES, put_file

CHUNK = 4 << 20


def _writer(path: Path, sha256: bool = False, disk: Disk = DISK) -> HashingWriter:
    return HashingWriter(DISK.create(path, direct=True), sha256=sha256, disk=disk)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 4097])
def test_content_and_digests(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    writer = _writer(tmp_path / "f", sha256=True)
    writer.write(data)
    assert writer.tell() == size
    writer.finish()
    entry = writer.entry("f")
    assert (tmp_path / "f").read_bytes() == data
    assert entry.size == size
    assert entry.xxh3_128 == xxhash.xxh3_128_hexdigest(data)
    assert entry.sha256 == hashlib.sha256(data).hexdigest()
    starts = range(0, size, CHUNK)
    assert entry.chunks == tuple(xxhash.xxh3_128_hexdigest(data[at : at + CHUNK]) for at in starts)
    assert digest_file(tmp_path / "f", "f").chunks == entry.chunks


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=70_000), max_size=8))
def test_any_sequence_of_writes(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("writes") / "f"
    writer = HashingWriter(DISK.create(path, direct=True), chunk_size=4096)
    for part in parts:
        assert writer.write(memoryview(part)) == len(part)
    writer.finish()
    whole = b"".join(parts)
    assert path.read_bytes() == whole
    assert writer.entry("f") == digest_file(path, "f", 4096)


def test_first_byte_and_states(tmp_path: Path) -> None:
    writer = _writer(tmp_path / "f")
    assert writer.first_byte_ns is None
    assert not hasattr(writer, "fileno")
    with pytest.raises(ValueError, match="after finish"):
        writer.entry("f")
    writer.write(b"x")
    assert writer.first_byte_ns is not None
    writer.finish()
    writer.finish()
    with pytest.raises(ValueError, match="finished"):
        writer.write(b"y")


@pytest.mark.parametrize("direct", [False, True])
def test_a_long_file_in_the_page_cache_is_synced_on_the_way(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the fsync at its end takes as long as all of it; each chunk is told of as progress."""
    monkeypatch.setattr(digest, "SYNC_SIZE", 2 * 4096)
    synced, moved = list[int](), list[int]()

    class Watched(Disk):
        def fsync(self, fd: int) -> None:
            synced.append(fd)
            super().fsync(fd)

    disk = Watched()
    fd = disk.create(tmp_path / "f", direct=direct)
    passes = is_direct(fd)  # not on each file system
    writer = HashingWriter(fd, chunk_size=4096, disk=disk, moved=lambda: moved.append(1))
    writer.write(os.urandom(5 * 4096 + 1))
    writer.finish()
    assert (len(synced), len(moved)) == (1 if passes else 3, 5)


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = threading.active_count()
    for end in ("finish", "close"):
        writer = _writer(tmp_path / end)
        writer.write(bytes(3 * CHUNK))
        getattr(writer, end)()
    assert threading.active_count() == before


class _Grudging(Disk):
    """Writes at most 5000 bytes a call, and none that O_DIRECT would not take."""

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        return os.pwrite(fd, data[:5000], offset)


def test_short_writes_and_a_refused_o_direct(tmp_path: Path) -> None:
    data = os.urandom(CHUNK + 777)
    writer = _writer(tmp_path / "f", disk=_Grudging())
    writer.write(data)
    writer.finish()
    assert (tmp_path / "f").read_bytes() == data


def test_torch_saves_into_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from lastgasp.pytorch.io import without_crc32

    state = {"big": torch.randn(1500, 1000), "small": torch.arange(3), "text": "x"}
    before = torch.serialization.get_crc32_options()
    writer = _writer(tmp_path / "f.ckpt")
    with without_crc32():
        torch.save(state, writer)
    writer.finish()
    assert torch.serialization.get_crc32_options() == before
    loaded = torch.load(tmp_path / "f.ckpt")
    assert torch.equal(loaded["big"], state["big"])
    assert writer.entry("f.ckpt") == digest_file(tmp_path / "f.ckpt", "f.ckpt")


def test_reader_gives_the_bytes(tmp_path: Path) -> None:
    data = os.urandom(3 * CHUNK + 5)
    path = put_file(tmp_path, 1, data)
    with VerifiedFile(path, FILES) as file:
        assert file.read(10) == data[:10]
        assert file.seek(-5, io.SEEK_END) == 3 * CHUNK
        assert file.read(100) == data[-5:]
        assert file.read(1) == b""
        file.seek(CHUNK - 3)
        assert file.read(9) == data[CHUNK - 3 : CHUNK + 6]
        file.finish()


@pytest.mark.parametrize("size", [0, 1])
def test_reader_of_tiny_files(tmp_path: Path, size: int) -> None:
    with VerifiedFile(put_file(tmp_path, 1, b"x" * size), FILES) as file:
        assert file.readall() == b"x" * size
        file.finish()


def test_reader_never_gives_a_damaged_byte(tmp_path: Path) -> None:
    path = put_file(tmp_path, 1, os.urandom(3 * CHUNK))
    flip_bit(path, CHUNK + 1)
    with VerifiedFile(path, FILES, threads=1) as file:
        file.seek(CHUNK)
        with pytest.raises(DamagedCheckpoint, match=f"bytes {CHUNK}-{2 * CHUNK}"):
            file.read(1)
        with pytest.raises(DamagedCheckpoint):
            file.finish()


def test_reader_left_early_leaves_no_thread(tmp_path: Path) -> None:
    path, before = put_file(tmp_path, 1, bytes(40 << 20)), threading.active_count()
    with VerifiedFile(path, FILES):
        pass
    assert threading.active_count() == before


def test_load_verified(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from lastgasp.checkpoint import Staged
    from lastgasp.pytorch.io import load_verified, save_verified
    from support.checkpoint_kit import provenance

    path, state = tmp_path / "step-1.ckpt", {"w": torch.randn(3000, 1000)}
    with Staged(path, FILES) as staged:
        save_verified(state, staged)
        staged.publish(provenance(1))
    loaded = load_verified(path)
    flip_bit(path, 5_000_000)
    assert torch.equal(loaded["w"], state["w"])
    with pytest.raises(DamagedCheckpoint, match="bytes 4194304-8388608"):
        load_verified(path)
    flip_bit(path, 5_000_000)
    flip_bit(path, 100)
    with pytest.raises(DamagedCheckpoint, match="bytes 0-4194304"):
        load_verified(path)
    FILES.manifest_path(path).unlink()
    with pytest.raises(DamagedCheckpoint, match="no manifest"):
        load_verified(path)
