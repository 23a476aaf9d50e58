"""`lastgasp.pytorch.save`, `load`, `newest_good`: a drop-in for torch's, whatever happens to process or disk."""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lastgasp import _fs
from lastgasp.checkpoint import Manifest, Provenance, Staged
from lastgasp.checkpoint.adopt import ADOPTED
from lastgasp.checkpoint.layout import next_path
from lastgasp.errors import CheckpointError, ConfigError, DamagedCheckpoint, NoGoodCheckpoint
from lastgasp.testing import corrupt
from support.checkpoint_kit import Died, DyingDisk
from support.waiting import PATIENCE

torch = pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[pytorch]'")

from lastgasp.pytorch import load, newest_good, plain, save  # noqa: E402


def state(number: int) -> dict[str, Any]:
    torch.manual_seed(number)
    return {"model": {"w": torch.randn(30_000), "b": torch.zeros(3)}, "epoch": number, "best": 0.5}


def same(loaded: Any, number: int) -> bool:
    want = state(number)
    return bool(torch.equal(loaded["model"]["w"], want["model"]["w"])) and loaded["epoch"] == number


def manifest_of(path: Path) -> Path:
    return plain.FILES.manifest_path(path)


@pytest.mark.parametrize("name", ["model.pt", "model_best.pth.tar", "model", "a.ckpt", "deep/er/model.pth"])
@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"map_location": "cpu"}])
def test_what_was_saved_is_loaded(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    manifest = save(state(3), tmp_path / name)
    assert isinstance(manifest, Manifest)
    assert (manifest.format, manifest.step, manifest.kind) == ("pytorch", 0, "periodic")
    assert same(load(str(tmp_path / name), **options), 3)
    assert newest_good((tmp_path / name).parent) == str(tmp_path / name)


def test_arguments_are_those_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save(state(1), path, pickle, 4)
    assert same(load(path, "cpu", weights_only=False), 1)
    save(state(2), path, pickle_protocol=2, _use_new_zipfile_serialization=False)
    assert same(load(path), 2)
    assert same(load(path, None, pickle, weights_only=False, encoding="utf-8"), 2)
    assert same(torch.load(path), 2)  # torch's own format: loaded without lastgasp as well


class Bomb:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return os.putenv, ("TESTS_BOMB", "1")


def test_only_weights_by_default(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save({"w": torch.ones(2), "bomb": Bomb()}, path)
    for options in ({}, {"weights_only": None}, {"mmap": True}):
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            load(path, **options)
    assert load(path, weights_only=False)["bomb"] is None
    with pytest.raises(ConfigError, match="weights_only=False"):
        load(path, pickle_module=pickle)


@pytest.mark.parametrize("target", [io.BytesIO(), "s3://bucket/model.pt", "", 3])
def test_what_cannot_be_replaced_atomically_is_refused(target: Any) -> None:
    for call in (lambda: save(state(1), target), lambda: load(target), lambda: newest_good(target)):
        with pytest.raises(ConfigError, match=r"use torch\.save and torch\.load"):
            call()


@pytest.mark.parametrize("step", [-1, True, "seven", 0.5])
def test_a_wrong_step_is_refused(tmp_path: Path, step: int) -> None:
    with pytest.raises(ConfigError, match="step"):
        save(state(1), tmp_path / "model.pt", step=step)
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Checkpoints:
    """Files of steps 1 and 2; the test spoils the second."""

    old: Path
    new: Path


@dataclass(frozen=True)
class Case:
    name: str
    spoil: Callable[[Checkpoints], object]
    reason: str
    error: type[Exception] = DamagedCheckpoint
    moved: bool = True
    """Whether the content is proven bad, so that it goes to quarantine."""


def _of_another_job(stored: Checkpoints) -> None:
    other = stored.new.parent.parent / "other" / stored.new.name
    save(state(7), other)
    corrupt.copy_over(manifest_of(other), manifest_of(stored.new))


CASES = [
    Case("truncate", lambda s: corrupt.truncate(s.new, 5000), "epoch_2.pth bytes 5000-"),
    Case("truncate by one", lambda s: corrupt.truncate(s.new, s.new.stat().st_size - 1), "not "),
    Case("flip in tensor", lambda s: corrupt.flip_bit(s.new, 60_000, 3), "epoch_2.pth bytes 0-"),
    Case("flip in pickle", lambda s: corrupt.flip_bit(s.new, 80, 1), "epoch_2.pth bytes 0-"),
    Case("flip last bit", lambda s: corrupt.flip_bit(s.new, -1, 7), "epoch_2.pth bytes 0-"),
    Case("flip in manifest", lambda s: corrupt.flip_bit(manifest_of(s.new), 300), "manifest"),
    Case("zero page", lambda s: corrupt.zero_page(s.new, 10), "epoch_2.pth bytes 0-"),
    Case("empty", lambda s: corrupt.empty(s.new), "epoch_2.pth bytes 0-"),
    Case("empty manifest", lambda s: corrupt.empty(manifest_of(s.new)), "manifest is not readable"),
    Case("drop", lambda s: corrupt.drop(s.new), "file is missing", FileNotFoundError, moved=False),
    Case("drop manifest", lambda s: corrupt.drop(manifest_of(s.new)), "no manifest", CheckpointError, moved=False),
    Case("swap", lambda s: corrupt.swap(manifest_of(s.new), manifest_of(s.old)), "manifest is that of"),
    Case("manifest of another job", _of_another_job, "epoch_2.pth bytes 0-"),
    Case("unreadable", lambda s: corrupt.make_unreadable(s.new), "not a regular file", moved=False),
    Case("unreadable manifest", lambda s: corrupt.make_unreadable(manifest_of(s.new)), "cannot be read", moved=False),
]
every_damage = pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])


def stored_in(directory: Path) -> Checkpoints:
    stored = Checkpoints(directory / "epoch_1.pth", directory / "epoch_2.pth")
    save(state(0), directory / "epoch_0.pth")
    save(state(1), stored.old)
    save(state(2), stored.new)
    return stored


@every_damage
def test_nothing_damaged_is_loaded(tmp_path: Path, case: Case) -> None:
    stored = stored_in(tmp_path / "here")
    case.spoil(stored)
    for mmap in (None, True):
        with pytest.raises(case.error) as caught:
            load(stored.new, mmap=mmap)
        if case.error is DamagedCheckpoint:
            assert case.reason in str(caught.value)
            assert "newest_good" in str(caught.value)


@every_damage
def test_the_newest_good_one_is_found(tmp_path: Path, case: Case) -> None:
    stored = stored_in(tmp_path / "here")
    case.spoil(stored)
    left = "epoch_0.pth" if case.name == "swap" else "epoch_1.pth"
    found = newest_good(stored.new.parent)
    assert found == str(stored.new.with_name(left))
    assert same(load(found), int(left[6]))
    home = stored.new.with_name("epoch_2.pth.corrupt")
    assert home.exists() == case.moved
    if case.moved:
        assert case.reason in home.with_name(home.name + ".reason.json").read_text()
    assert newest_good(stored.new.parent) == found


@every_damage
def test_without_a_good_one_nothing_is_moved_and_nobody_starts_from_scratch(tmp_path: Path, case: Case) -> None:
    stored = stored_in(tmp_path / "here")
    case.spoil(stored)
    for path in (stored.old, stored.old.with_name("epoch_0.pth")):
        path.unlink()
        manifest_of(path).unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(NoGoodCheckpoint, match="lastgasp manifest") as caught:
        newest_good(tmp_path / "here")
    assert case.reason in caught.value.reasons[str(stored.new)]
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_directory_holds_none(tmp_path: Path) -> None:
    assert newest_good(tmp_path) is None
    assert newest_good(tmp_path / "absent") is None
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent.pt")


def test_newest_is_by_content_and_not_by_time_stamp(tmp_path: Path) -> None:
    for step in (5, 12, 7):
        save(state(step), tmp_path / f"rank{step}.pth", step=step)
    os.utime(tmp_path / "rank12.pth", (1, 1))
    assert newest_good(tmp_path) == str(tmp_path / "rank12.pth")
    assert newest_good(tmp_path, quarantine=False) == str(tmp_path / "rank12.pth")


def saved_by(path: Path, format: str, step: int, job: str = "job") -> Path:
    """What a session, or a framework, has written."""
    with Staged(path, plain.FILES) as staged:
        staged.open().write(b"x" * 100)
        staged.publish(Provenance(format=format, step=step, kind="periodic", job=job))
    return path


def test_the_best_one_beside_a_sessions_own_is_the_best_one(tmp_path: Path) -> None:
    """The session's last weights are no best ones, and what of it is damaged is its ranks' business."""
    last = saved_by(tmp_path / "step=00000500.pt", "pytorch-loop", 500)
    assert newest_good(tmp_path) == str(last), "there is no other"
    save(state(3), tmp_path / "model_best.pt", step=300)
    corrupt.flip_bit(last, 50)
    assert newest_good(tmp_path) == str(tmp_path / "model_best.pt")
    assert last.exists()
    last.unlink()
    adopted = saved_by(tmp_path / "epoch=9.ckpt", "lightning", 900, ADOPTED)
    assert newest_good(tmp_path) == str(adopted), "`lastgasp manifest` only knows its name"


def test_where_no_file_of_the_scripts_own_is_good_the_sessions_are_taken(tmp_path: Path) -> None:
    """Weights by torch.save, which nobody can verify, and a damaged file; what is newest decides nothing here."""
    saved_by(tmp_path / "step=00000008.pt", "pytorch-loop", 8)
    last = saved_by(tmp_path / "step=00000012.pt", "pytorch-loop", 12)
    torch.save(state(1), tmp_path / "final.pt")
    save(state(3), tmp_path / "init.pt", step=400)
    corrupt.flip_bit(tmp_path / "init.pt", 300)
    before = sorted(tmp_path.iterdir())
    assert newest_good(tmp_path) == str(last)
    corrupt.flip_bit(last, 50)
    assert newest_good(tmp_path) == str(tmp_path / "step=00000008.pt")
    assert sorted(tmp_path.iterdir()) == before, "nothing is moved"
    corrupt.flip_bit(tmp_path / "step=00000008.pt", 50)
    with pytest.raises(NoGoodCheckpoint) as caught:
        newest_good(tmp_path)
    assert len(caught.value.reasons) == 4


def test_among_equal_steps_the_one_saved_last_is_the_newest(tmp_path: Path) -> None:
    for name in ("b.pt", "c.pt", "a.pt"):
        save(state(1), tmp_path / name)
    os.utime(tmp_path / "b.pt")
    assert newest_good(tmp_path) == str(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step=12.ckpt", 12), ("iter_0000030.pt", 30), ("checkpoint-epoch7.pth.tar", 7), ("ckpt_0012.pth", 12),
        ("resnet50.pt", None), ("model_best.pth", None), ("best_rank_3.pt", None), ("epoch3_step40.pt", 40),
    ],
)  # fmt: skip
def test_steps_that_names_tell(name: str, step: int | None) -> None:
    assert plain.FILES.step(Path(name)) == step


def test_a_link_is_its_file(tmp_path: Path) -> None:
    save(state(1), tmp_path / "epoch_1.pt")
    (tmp_path / "latest.pt").symlink_to("epoch_1.pt")
    assert same(load(tmp_path / "latest.pt"), 1)
    save(state(2), tmp_path / "latest.pt")
    assert (tmp_path / "latest.pt").is_symlink()
    assert same(load(tmp_path / "epoch_1.pt"), 2)


def test_manifests_of_removed_files_go_with_the_next_save(tmp_path: Path) -> None:
    for step in range(3):
        save(state(step), tmp_path / f"epoch_{step}.pt")
    (tmp_path / "epoch_0.pt").unlink()
    save(state(3), tmp_path / "epoch_3.pt")
    assert sorted(path.name for path in tmp_path.glob("*.manifest.json")) == [
        f"epoch_{step}.pt.manifest.json" for step in (1, 2, 3)
    ]


def test_killed_at_any_call_of_the_disk_the_old_or_the_new_one_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = DyingDisk()
    monkeypatch.setattr(plain, "Staged", functools.partial(Staged, disk=counting))
    save(state(1), tmp_path / "count.pt")
    seen = set()
    for at in range(counting.calls):
        path = tmp_path / f"{at}" / "model.pt"
        monkeypatch.setattr(plain, "Staged", Staged)
        save(state(1), path)
        disk = DyingDisk(at)
        monkeypatch.setattr(plain, "Staged", functools.partial(Staged, disk=disk))
        with pytest.raises(Died):
            save(state(2), path)
        assert disk.calls > at  # it died there
        loaded = load(path)
        seen.add(loaded["epoch"])
        assert same(loaded, loaded["epoch"])
        assert newest_good(path.parent) == str(path)
        monkeypatch.setattr(plain, "Staged", Staged)
        save(state(3), path)
        assert same(load(path), 3)
        assert not next_path(manifest_of(path)).exists()
    assert seen == {1, 2}


def test_two_that_save_one_name_leave_one_that_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the disk is: who waits for the lock too long goes on without.
    monkeypatch.setattr(_fs.locked.__wrapped__, "__defaults__", (PATIENCE,))  # type: ignore[attr-defined]
    path = tmp_path / "model_best.pth"
    numbers = range(4)

    def run(number: int) -> None:
        for _ in range(5):
            save({"w": torch.full((50_000,), float(number))}, path)

    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = load(path)["w"].unique().tolist()
    assert len(values) == 1 and values[0] in numbers


def test_without_torch_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import lastgasp.pytorch\n"
        "from lastgasp.errors import MissingExtra\n"
        "try: lastgasp.pytorch.save\n"
        "except MissingExtra as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert "pip install -e '.[pytorch]'" in done.stdout


def test_public_names_are_listed_and_others_are_none() -> None:
    package = importlib.import_module("lastgasp.pytorch")
    assert set(package.__all__) == set(package._PUBLIC)
    assert not hasattr(package, "nothing")
