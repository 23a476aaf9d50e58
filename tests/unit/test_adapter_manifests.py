"""Manifests of native saves: what rank 0 adds is there before any rank lists the files."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Literal

import pytest

from lastgasp.adapter import ManifestWriter, NativeManifests, NativeSave, Place, RankStatus, data_parallel
from lastgasp.adapter.checkpoint import DirectoryLayout, Manifest, read_manifest, verify, write_manifest

LAYOUT = DirectoryLayout("checkpoint-*")
WORLD = 3
LIMIT = 120.0


class Meeting:
    """An all-gather between threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(WORLD, timeout=LIMIT)
        self._payloads: dict[str, dict[int, bytes]] = {}

    def gather(self, rank: int, tag: str, payload: bytes) -> list[bytes]:
        """Of one rank."""
        self._payloads.setdefault(tag, {})[rank] = payload
        self._barrier.wait()
        return [self._payloads[tag][rank] for rank in range(WORLD)]


class Slow(NativeManifests):
    """Adds a file and removes another one, once the other ranks have had time to list too early."""

    def __init__(self, meeting: Meeting, rank: int, fails: bool) -> None:
        place = Place(rank=rank, world_size=WORLD, replicas=data_parallel(WORLD), attempt=0, job="a job")
        super().__init__(
            ManifestWriter("test", place, sha256=True), lambda tag, data: meeting.gather(rank, tag, data), RankStatus()
        )
        self._fails = fails

    def add_aux(self, save: NativeSave, aux: Mapping[int, bytes]) -> None:
        """On rank 0."""
        threading.Event().wait(0.2)
        if self._fails:
            raise OSError("no space left")
        (save.path / "aux").write_bytes(b"".join(aux[rank] for rank in range(WORLD)))
        (save.path / "incomplete").unlink()


@pytest.mark.parametrize("fails", [False, True])
def test_files_are_listed_after_auxiliary_states_were_added(tmp_path: Path, fails: bool) -> None:
    path, meeting = tmp_path / "checkpoint-3", Meeting()
    path.mkdir()
    for name in ("a", "b", "c", "incomplete"):
        (path / name).write_text(name)
    done: dict[int, bool] = {}

    def rank(number: int) -> None:
        done[number] = Slow(meeting, number, fails).commit(NativeSave(path, LAYOUT, 3, f"{number}".encode()))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert done == dict.fromkeys(range(WORLD), not fails)
    assert LAYOUT.manifest_path(path).exists() is not fails
    if not fails:
        assert verify(path, LAYOUT).ok
        assert (path / "aux").read_text() == "012"
        manifest = read_manifest(LAYOUT.manifest_path(path))
        assert isinstance(manifest, Manifest)
        found = {entry.path.rpartition("/")[2]: entry.sha256 for entry in manifest.files}
        assert found == {name: sha256(data).hexdigest() for name, data in
                         {"a": b"a", "b": b"b", "c": b"c", "aux": b"012"}.items()}  # fmt: skip


@pytest.mark.parametrize("kind", ["gasp", "periodic"])
def test_a_save_whose_place_a_gasp_has_taken_is_not_called_damaged(
    kind: Literal["gasp", "periodic"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGTERM in a step in which the framework saves as well: the gasp is whole, and stands in the same place."""
    path = tmp_path / "checkpoint-3"
    path.mkdir()
    (path / "a").write_text("a")
    writer = ManifestWriter("test", Place(rank=0, world_size=1, replicas=data_parallel(1), attempt=0, job="a job"))
    saves, save = NativeManifests(writer, lambda tag, data: [data], RankStatus()), NativeSave(path, LAYOUT, 3)
    assert saves.commit(save, alone=True)
    found = read_manifest(LAYOUT.manifest_path(path))
    assert isinstance(found, Manifest)
    write_manifest(path, LAYOUT, writer.provenance(3, kind, folder=tmp_path), found.files)
    (path / "a").unlink()
    assert not saves.commit(save, alone=True)
    assert ("will not be trusted" in caplog.text) == (kind != "gasp")
    assert ("was saved after a fault" in caplog.text) == (kind == "gasp")
