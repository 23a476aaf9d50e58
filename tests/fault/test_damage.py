"""Every damage to real checkpoints: not chosen, the next older one chosen, the reason says where.

By a single process and by two ranks that agree.
"""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lastgasp._fs import unique_temp
from lastgasp.checkpoint import (
    Agreement,
    Candidate,
    Staged,
    Verdict,
    agree,
    candidates,
    digest,
    newest_good,
    verify,
)
from lastgasp.checkpoint import chunks as chunks_module
from lastgasp.checkpoint.layout import next_path
from lastgasp.errors import NoGoodCheckpoint
from lastgasp.ports import Gather, Layout
from lastgasp.testing import corrupt
from support.checkpoint_kit import FILES, FOLDERS, SCATTERED, as_ranks, provenance, scattered_name

torch = pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[lightning]'")


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of steps 1 and 2; the test spoils the second."""

    layout: Layout
    old: Path
    new: Path

    @property
    def manifest(self) -> Path:
        return self.layout.manifest_path(self.new)


def _save(path: Path, layout: Layout, step: int, names: list[str], job: str = "job") -> Path:
    from lastgasp.pytorch.io import save_verified

    with Staged(path, layout) as staged:
        for number, name in enumerate(names):
            torch.manual_seed(100 * step + number)
            save_verified({"weight": torch.randn(40_000), "step": step, "name": f"{job} {number}"}, staged, name)
        staged.publish(provenance(step, job=job))
    return path


def _file(directory: Path, step: int, job: str = "job") -> Path:
    path = directory / f"step-{step:08d}.ckpt"
    return _save(path, FILES, step, [path.name], job)


def _folder(directory: Path, step: int, job: str = "job") -> Path:
    path = directory / f"iter_{step:07d}"
    names = [f"{path.name}/rank{rank}/shard.pt" for rank in range(2)]
    return _save(path, FOLDERS, step, names, job)


def _scattered(directory: Path, step: int, job: str = "job") -> Path:
    names = [scattered_name(rank, step) for rank in range(2)]
    return _save(directory / f"net-{step}", SCATTERED, step, names, job)


MAKERS = {"single-file": _file, "directory": _folder, "scattered": _scattered}


def _record(path: Path, name: str) -> tuple[int, int]:
    """Offset and size in bytes of the content of a record of torch's zip file."""
    with zipfile.ZipFile(path) as archive:
        info = next(item for item in archive.infolist() if item.filename.endswith(name))
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        lengths = file.read(4)
    header = 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return info.header_offset + header, info.file_size


def _flip_in(path: Path, record: str) -> None:
    offset, size = _record(path, record)
    corrupt.flip_bit(path, offset + size // 2, 3)


def _other_manifest(stored: Checkpoints, make: Callable[[Path, int, str], Path]) -> None:
    elsewhere = stored.new.parent.parent / "elsewhere"
    other = make(elsewhere, 2, "another job")
    corrupt.copy_over(stored.layout.manifest_path(other), stored.manifest)


@dataclass(frozen=True)
class Case:
    """A damage, and a piece of the reason that must be given."""

    name: str
    spoil: Callable[[Checkpoints], object]
    reason: str
    moved: bool = True
    """Whether the content is proven bad, so that it goes to quarantine."""


NEW_FILE = "step-00000002.ckpt"
SHARD = "iter_0000002/rank1/shard.pt"
FILE_CASES = [
    Case("truncate", lambda s: corrupt.truncate(s.new, 5000), f"{NEW_FILE} bytes 5000-"),
    Case("truncate by one", lambda s: corrupt.truncate(s.new, s.new.stat().st_size - 1), "not "),
    Case("flip in tensor", lambda s: _flip_in(s.new, "data/0"), f"{NEW_FILE} bytes 0-"),
    Case("flip in pickle", lambda s: _flip_in(s.new, "data.pkl"), f"{NEW_FILE} bytes 0-"),
    Case("flip in manifest", lambda s: corrupt.flip_bit(s.manifest, 300), "manifest is not readable"),
    Case("flip last bit", lambda s: corrupt.flip_bit(s.new, -1, 7), f"{NEW_FILE} bytes 0-"),
    Case("zero page", lambda s: corrupt.zero_page(s.new, 10), f"{NEW_FILE} bytes 0-"),
    Case("empty", lambda s: corrupt.empty(s.new), f"{NEW_FILE} bytes 0-"),
    Case("empty manifest", lambda s: corrupt.empty(s.manifest), "manifest is not readable"),
    Case("drop", lambda s: corrupt.drop(s.new), f"{NEW_FILE} bytes 0-", moved=False),
    Case("drop manifest", lambda s: corrupt.drop(s.manifest), "no manifest", moved=False),
    Case("manifest of another job", lambda s: _other_manifest(s, _file), f"{NEW_FILE} bytes 0-"),
    Case("manifest of the older one", lambda s: corrupt.copy_over(s.layout.manifest_path(s.old), s.manifest),
         "manifest is that of step-00000001.ckpt"),
    Case("unreadable", lambda s: corrupt.make_unreadable(s.new), "not a regular file", moved=False),
    Case("unreadable manifest", lambda s: corrupt.make_unreadable(s.manifest), "cannot be read", moved=False),
]  # fmt: skip
FOLDER_CASES = [
    Case("truncate shard", lambda s: corrupt.truncate(s.new / "rank1/shard.pt", 9), f"{SHARD} bytes 9-"),
    Case("flip in shard", lambda s: _flip_in(s.new / "rank1/shard.pt", "data/0"), f"{SHARD} bytes 0-"),
    Case("flip in manifest", lambda s: corrupt.flip_bit(s.manifest, 200), "manifest is not readable"),
    Case("zero page of shard", lambda s: corrupt.zero_page(s.new / "rank1/shard.pt", 3), f"{SHARD} bytes 0-"),
    Case("empty shard", lambda s: corrupt.empty(s.new / "rank1/shard.pt"), f"{SHARD} bytes 0-"),
    Case("drop shard", lambda s: corrupt.drop(s.new / "rank1/shard.pt"), f"{SHARD} bytes 0-", moved=False),
    Case("foreign", lambda s: corrupt.add_foreign(s.new), "iter_0000002/foreign.bin: is not in", moved=False),
    Case("swap shards", lambda s: corrupt.swap(s.new / "rank0/shard.pt", s.new / "rank1/shard.pt"),
         f"{SHARD} bytes 0-"),
    Case("manifest of another job", lambda s: _other_manifest(s, _folder), f"{SHARD} bytes 0-"),
    Case("unreadable shard", lambda s: corrupt.make_unreadable(s.new / "rank1/shard.pt"),
         f"{SHARD} bytes 0-", moved=False),
]  # fmt: skip
PIECE = scattered_name(1, 2)


def _piece(stored: Checkpoints, rank: int = 1) -> Path:
    return stored.new.parent / scattered_name(rank, 2)


SCATTERED_CASES = [
    Case("truncate", lambda s: corrupt.truncate(_piece(s), 9), f"{PIECE} bytes 9-"),
    Case("flip", lambda s: _flip_in(_piece(s), "data/0"), f"{PIECE} bytes 0-"),
    Case("flip in manifest", lambda s: corrupt.flip_bit(s.manifest, 200), "manifest is not readable"),
    Case("zero page", lambda s: corrupt.zero_page(_piece(s), 3), f"{PIECE} bytes 0-"),
    Case("empty", lambda s: corrupt.empty(_piece(s)), f"{PIECE} bytes 0-"),
    Case("drop one", lambda s: corrupt.drop(_piece(s)), f"{PIECE} bytes 0-", moved=False),
    Case("drop manifest", lambda s: corrupt.drop(s.manifest), "no manifest", moved=False),
    Case("swap", lambda s: corrupt.swap(_piece(s, 0), _piece(s)), f"{PIECE} bytes 0-"),
    Case("manifest of another job", lambda s: _other_manifest(s, _scattered), f"{PIECE} bytes 0-"),
    Case("manifest of the older one", lambda s: corrupt.copy_over(s.layout.manifest_path(s.old), s.manifest),
         f"manifest is that of {scattered_name(0, 1)}"),
    Case("unreadable", lambda s: corrupt.make_unreadable(_piece(s)), f"{PIECE} bytes 0-", moved=False),
]  # fmt: skip
CASES: list[tuple[Layout, Case]] = [(FILES, case) for case in FILE_CASES] + [(FOLDERS, case) for case in FOLDER_CASES]
CASES += [(SCATTERED, case) for case in SCATTERED_CASES]
every_damage = pytest.mark.parametrize(
    ("layout", "case"), CASES, ids=[f"{layout.name}-{case.name}".replace(" ", "-") for layout, case in CASES]
)


def _shelf(directory: Path, layout: Layout) -> Checkpoints:
    make = MAKERS[layout.name]
    stored = Checkpoints(layout, make(directory, 1), make(directory, 2))
    assert newest_good([directory], layout) == candidates([directory], layout)[0]
    return stored


def _ranks(directory: Path, layout: Layout) -> list[Agreement]:
    def body(rank: int, gather: Gather) -> Agreement:
        def verify_share(candidate: Candidate) -> Verdict:
            return verify(candidate.path, layout, manifest=candidate.manifest, share=(rank, 2))

        return agree(candidates([directory], layout), verify_share, gather, rank, 2)

    return as_ranks(2, body)


@every_damage
def test_one_process_takes_the_older_one(tmp_path: Path, layout: Layout, case: Case) -> None:
    stored = _shelf(tmp_path / "here", layout)
    case.spoil(stored)
    chosen = newest_good([tmp_path / "here"], layout)
    assert chosen is not None
    assert chosen.path == stored.old
    home = stored.new.with_name(stored.new.name + ".corrupt")
    assert home.exists() == case.moved
    assert bool(layout.parts(stored.new)) == (not case.moved and case.name != "drop")
    if case.moved:
        assert case.reason in home.with_name(home.name + ".reason.json").read_text()


@every_damage
def test_two_ranks_take_the_older_one_and_say_why(tmp_path: Path, layout: Layout, case: Case) -> None:
    stored = _shelf(tmp_path / "here", layout)
    case.spoil(stored)
    for answer in _ranks(tmp_path / "here", layout):
        assert answer.chosen is not None
        assert answer.chosen.path == stored.old
        assert case.reason in "\n".join(answer.rejected[str(stored.new)])
        assert [c.path for c in answer.damaged] == ([stored.new] if case.moved else [])


@every_damage
def test_with_no_other_it_is_an_error_that_moves_nothing(tmp_path: Path, layout: Layout, case: Case) -> None:
    stored = _shelf(tmp_path / "here", layout)
    case.spoil(stored)
    for path in [*layout.parts(stored.old), layout.manifest_path(stored.old)]:
        path.rename(tmp_path / path.name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(NoGoodCheckpoint) as caught:
        newest_good([tmp_path / "here"], layout)
    assert case.reason in caught.value.reasons[str(stored.new)]
    assert sorted(tmp_path.rglob("*")) == sorted({*before, *(tmp_path / "here").glob(".lastgasp.lock")})


@pytest.mark.parametrize("layout", [FILES, FOLDERS], ids=["files", "folders"])
def test_leftovers_of_a_crash_do_no_harm(tmp_path: Path, layout: Layout) -> None:
    stored = _shelf(tmp_path, layout)
    unique_temp(stored.new).write_bytes(b"half a checkpoint")
    next_path(stored.manifest).write_bytes(b"{")
    next_path(layout.manifest_path(tmp_path / "iter_9")).write_bytes(b"{")
    chosen = newest_good([tmp_path], layout)
    assert chosen is not None
    assert chosen.path == stored.new
    assert [answer.chosen and answer.chosen.path for answer in _ranks(tmp_path, layout)] == [stored.new] * 2


def test_swapped_checkpoints_are_both_refused(tmp_path: Path) -> None:
    stored = _shelf(tmp_path, FILES)
    oldest = _file(tmp_path, 0)
    corrupt.swap(stored.old, stored.new)
    chosen = newest_good([tmp_path], FILES)
    assert chosen is not None
    assert chosen.path == oldest


def test_a_disk_that_fails_on_one_rank_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, real, fired = _shelf(tmp_path, FOLDERS), digest.hash_range, list[int]()

    def fail_on_new(fd: int, offset: int, length: int, buffer: memoryview) -> tuple[str, int]:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(SHARD):
            fired.append(fd)
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, offset, length, buffer)

    monkeypatch.setattr(chunks_module, "hash_range", fail_on_new)
    for answer in _ranks(tmp_path, FOLDERS):
        assert answer.chosen is not None
        assert answer.chosen.path == stored.old
        (reason,) = answer.rejected[str(stored.new)]
        assert reason.startswith("rank 1: " + SHARD)
        assert "Input/output error" in reason
        assert answer.damaged == ()
    assert fired
    chosen = newest_good([tmp_path], FOLDERS)
    assert chosen is not None
    assert chosen.path == stored.old
    assert stored.new.exists()
