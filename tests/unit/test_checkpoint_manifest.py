"""The manifest: frozen format, round trip, and no changed byte goes unseen."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.checkpoint import FileEntry, Manifest, ManifestProblem, Provenance, World
from lastgasp.checkpoint.manifest import Creator, build, decode, encode, read

GOLDEN = Path(__file__).parent.parent / "golden" / "manifest-v1.json"
DIGEST = st.binary(max_size=3).map(xxhash.xxh3_128_hexdigest)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\\\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)


@st.composite
def entries(draw: st.DrawFn) -> FileEntry:
    size, chunk = draw(st.integers(0, 40)), draw(st.integers(1, 16))
    count = -(-size // chunk)
    return FileEntry(
        path="/".join(draw(st.lists(NAMES, min_size=1, max_size=3))),
        size=size,
        xxh3_128=draw(DIGEST),
        chunk_size=chunk,
        chunks=tuple(draw(st.lists(DIGEST, min_size=count, max_size=count))),
        sha256=draw(st.none() | st.just("0" * 64)),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    provenance = Provenance(
        format=draw(st.text(max_size=5)),
        step=draw(st.integers(0, 1 << 62)),
        kind=draw(st.sampled_from(["gasp", "periodic"])),
        job=draw(st.text(max_size=8)),
        attempt=draw(st.integers(0, 9)),
        world=World(world_size=4, replica_groups=((0, 1), (2, 3))),
        parent=draw(st.none() | st.text(max_size=5)),
    )
    return build(provenance, tuple(draw(st.lists(entries(), min_size=1, max_size=3, unique_by=lambda e: e.path))))


SAMPLE = build(
    Provenance(format="lightning", step=12, kind="gasp", job="sample"),
    (FileEntry(path="a.ckpt", size=3, xxh3_128="0" * 32, chunk_size=4, chunks=("1" * 32,)),),
)


def test_golden_file() -> None:
    found = decode(GOLDEN.read_bytes())
    assert isinstance(found, Manifest), found
    assert encode(found) == GOLDEN.read_bytes()
    assert found.creator == Creator(version="0.1.0", host="node-1", pid=4242, time_ns=1795000000000000000)
    assert (found.step, found.kind, found.job, found.parent) == (12, "gasp", "golden", "step-00000010.ckpt")
    assert found.world == World(world_size=2, replica_groups=((0, 1),))
    assert found.files[0].chunks == (xxhash.xxh3_128_hexdigest(b"gold"), xxhash.xxh3_128_hexdigest(b"en"))
    assert found.files[0].xxh3_128 == xxhash.xxh3_128_hexdigest(b"golden")


@given(manifests())
def test_round_trip(manifest: Manifest) -> None:
    assert decode(encode(manifest)) == manifest


@given(manifests(), st.data())
def test_a_mutation_never_crashes_and_never_passes(manifest: Manifest, data: st.DataObject) -> None:
    document = encode(manifest)
    at = data.draw(st.integers(0, len(document)))
    end = at + data.draw(st.integers(0, 8))
    changed = document[:at] + data.draw(st.binary(max_size=8)) + document[end:]
    found = decode(changed)
    assert changed == document or isinstance(found, ManifestProblem)


def test_every_single_bit_counts() -> None:
    document = encode(SAMPLE)
    for offset in range(len(document)):
        for bit in range(8):
            changed = bytearray(document)
            changed[offset] ^= 1 << bit
            assert isinstance(decode(bytes(changed)), ManifestProblem), (offset, bit)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_problem(data: bytes) -> None:
    assert isinstance(decode(data), ManifestProblem)


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"{}", b'{"version":1}', b'{"version":true}', b"null"])
def test_documents_that_are_none(data: bytes) -> None:
    found = decode(data)
    assert isinstance(found, ManifestProblem)
    assert found.kind == "damaged"


def test_a_newer_version_is_no_damage() -> None:
    found = decode(b'{"version": 4, "whatever": []}')
    assert isinstance(found, ManifestProblem)
    assert found.kind == "newer"
    assert "update lastgasp" in found.text


@pytest.mark.parametrize("path", ["../x", "/x", "a/../x", "a//x", "", "a/.", "a\\..\\x", "a\0"])
def test_paths_that_lead_out_are_refused(path: str) -> None:
    raw = msgspec.json.decode(encode(SAMPLE))
    raw["files"][0]["path"] = path
    found = decode(msgspec.json.encode(raw))
    assert isinstance(found, ManifestProblem)
    assert "leads out" in found.text


def test_the_number_of_chunks_must_fit() -> None:
    with pytest.raises(ValueError, match="chunks do not make"):
        FileEntry(path="a", size=9, xxh3_128="0" * 32, chunk_size=4, chunks=())


def test_no_file_twice_and_at_least_one() -> None:
    about = Provenance(format="x", step=1, kind="gasp", job="j")
    for files in ((), (SAMPLE.files[0], SAMPLE.files[0])):
        with pytest.raises(ValueError, match="at least one file"):
            build(about, files)


def test_reading_what_is_not_there_or_not_a_file(tmp_path: Path) -> None:
    missing, unreadable = read(tmp_path / "none.json"), read(tmp_path)
    assert isinstance(missing, ManifestProblem)
    assert isinstance(unreadable, ManifestProblem)
    assert (missing.kind, unreadable.kind) == ("missing", "unreadable")
