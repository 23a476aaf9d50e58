"""`lastgasp.tensorflow` without TensorFlow: every damage of a checkpoint and of the state file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgasp.checkpoint import Candidate, verify
from lastgasp.cli import main
from lastgasp.cli import verify as verify_module
from lastgasp.cli._layouts import find
from lastgasp.errors import CheckpointError, ConfigError, NoGoodCheckpoint
from lastgasp.ports import Layout
from lastgasp.tensorflow import TensorFlowLayout, bundle, newest_good, prefixes, seal
from lastgasp.tensorflow.layout import LAYOUT, OfNames
from lastgasp.tensorflow.statefile import NAME, State, encode, parse, repaired
from lastgasp.testing import corrupt
from support.tf_files import GOLDEN, put, state_of, write


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints 10, 20 and 30, the last of two shards, as a manager leaves them; the test spoils the last."""

    folder: Path

    @property
    def old(self) -> Path:
        return self.folder / "ckpt-20"

    @property
    def new(self) -> Path:
        return self.folder / "ckpt-30"

    @property
    def index(self) -> Path:
        return self.folder / "ckpt-30.index"

    @property
    def manifest(self) -> Path:
        return LAYOUT.manifest_path(self.new)

    def shard(self, number: int) -> Path:
        return self.folder / f"ckpt-30.data-{number:05}-of-00002"

    @property
    def state(self) -> State:
        found = parse((self.folder / NAME).read_bytes())
        assert found is not None
        return found


def stored_in(folder: Path) -> Checkpoints:
    for step in (10, 20, 30):
        put(folder, step, shards=2)
    state_of(folder, 10, 20, 30)
    return Checkpoints(folder)


@dataclass(frozen=True)
class Case:
    """A damage, and a piece of the reason that must be given."""

    name: str
    spoil: Callable[[Checkpoints], object]
    reason: str
    moved: bool = True
    """Whether the content is proven bad, so that it goes to quarantine."""


def _of_another_job(stored: Checkpoints) -> None:
    elsewhere = stored.folder.parent / "elsewhere"
    write(elsewhere / "ckpt-30", {"w0": [1.0] * 2002, "w1": [2.0] * 2002}, 2)
    seal(elsewhere / "ckpt-30")
    corrupt.copy_over(elsewhere / "ckpt-30.manifest.json", stored.manifest)


def _drop_all(stored: Checkpoints) -> None:
    for path in LAYOUT.parts(stored.new):
        corrupt.drop(path)


CASES = [
    Case("truncate index", lambda s: corrupt.truncate(s.index, 100), "ckpt-30.index bytes 100-"),
    Case("truncate shard", lambda s: corrupt.truncate(s.shard(1), 8007), "data-00001-of-00002 bytes 8007-8008"),
    Case("flip in index", lambda s: corrupt.flip_bit(s.index, 20, 3), "ckpt-30.index bytes 0-"),
    Case("flip last bit", lambda s: corrupt.flip_bit(s.shard(0), -1, 7), "data-00000-of-00002 bytes 0-"),
    Case("flip in second shard", lambda s: corrupt.flip_bit(s.shard(1), 5000), "data-00001-of-00002 bytes 0-"),
    Case("flip in manifest", lambda s: corrupt.flip_bit(s.manifest, 200), "manifest"),
    Case("zero page", lambda s: corrupt.zero_page(s.shard(0), 1), "data-00000-of-00002 bytes 0-"),
    Case("empty index", lambda s: corrupt.empty(s.index), "ckpt-30.index bytes 0-"),
    Case("empty shard", lambda s: corrupt.empty(s.shard(0)), "data-00000-of-00002 bytes 0-"),
    Case("empty manifest", lambda s: corrupt.empty(s.manifest), "manifest is not readable"),
    Case("drop index", lambda s: corrupt.drop(s.index), "ckpt-30.index bytes 0-", moved=False),
    Case("drop shard", lambda s: corrupt.drop(s.shard(1)), "file is missing", moved=False),
    Case("drop all but the manifest", _drop_all, "file is missing", moved=False),
    Case("drop manifest", lambda s: corrupt.drop(s.manifest), "no manifest", moved=False),
    Case("foreign shard", lambda s: (s.folder / "ckpt-30.data-00002-of-00003").write_bytes(b"x"),
         "is not in the manifest", moved=False),
    Case("swap shards", lambda s: corrupt.swap(s.shard(0), s.shard(1)), "data-00000-of-00002 bytes 0-"),
    Case("index of the older one", lambda s: corrupt.copy_over(s.folder / "ckpt-20.index", s.index), "ckpt-30.index"),
    Case("manifest of another job", _of_another_job, "data-00000-of-00002 bytes 0-"),
    Case("manifest of the older one", lambda s: corrupt.copy_over(s.folder / "ckpt-20.manifest.json", s.manifest),
         "manifest is that of"),
    Case("unreadable shard", lambda s: corrupt.make_unreadable(s.shard(0)), "not a regular file", moved=False),
    Case("unreadable manifest", lambda s: corrupt.make_unreadable(s.manifest), "cannot be read", moved=False),
]  # fmt: skip
every_damage = pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])


@every_damage
def test_the_older_one_is_returned_and_the_state_file_names_it(
    tmp_path: Path, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    stored = stored_in(tmp_path / "here")
    case.spoil(stored)
    assert newest_good(stored.folder) == str(stored.old)
    assert stored.state == State("ckpt-20", ("ckpt-10", "ckpt-20"), (1e9 + 10, 1e9 + 20), 1e9)
    home = stored.folder / "ckpt-30.corrupt"
    assert home.is_dir() == case.moved
    assert f"{stored.new} is not used" in caplog.text and case.reason in caplog.text
    if case.moved:
        assert case.reason in (stored.folder / "ckpt-30.corrupt.reason.json").read_text()
        assert not LAYOUT.parts(stored.new)
    assert newest_good(stored.folder) == str(stored.old)
    assert stored.state.latest == "ckpt-20"


@every_damage
def test_without_a_good_one_nothing_changes(
    tmp_path: Path, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    stored = stored_in(tmp_path / "here")
    case.spoil(stored)
    for step in (10, 20):
        for path in (*LAYOUT.parts(stored.folder / f"ckpt-{step}"), stored.folder / f"ckpt-{step}.manifest.json"):
            path.unlink()
    before = {path: path.read_bytes() if path.is_file() else b"" for path in sorted(tmp_path.rglob("*"))}
    if case.name == "drop manifest":  # killed between save and seal; TensorFlow's own checksums match
        assert newest_good(stored.folder) == str(stored.new)
        assert verify(stored.new, LAYOUT).ok and "it gets one now" in caplog.text
        return
    with pytest.raises(NoGoodCheckpoint, match="move them and the file `checkpoint` away") as caught:
        newest_good(stored.folder)
    assert case.reason in caught.value.reasons[str(stored.new)]
    assert {path: path.read_bytes() if path.is_file() else b"" for path in sorted(tmp_path.rglob("*"))} == before


def test_without_quarantine_nothing_is_moved(tmp_path: Path) -> None:
    stored = stored_in(tmp_path)
    corrupt.flip_bit(stored.index, 20)
    assert newest_good(stored.folder, quarantine=False) == str(stored.old)
    assert stored.index.exists() and stored.state.latest == "ckpt-20"


def _absolute(folder: Path) -> None:
    names = [str(folder / f"ckpt-{step}") for step in (10, 20, 30)]
    (folder / NAME).write_bytes(encode(State(names[-1], tuple(names))))


STATES: dict[str, Callable[[Path], object]] = {
    "dropped": lambda f: corrupt.drop(f / NAME),
    "empty": lambda f: corrupt.empty(f / NAME),
    "cut": lambda f: corrupt.truncate(f / NAME, 40),
    "zeroed": lambda f: corrupt.zero_page(f / NAME),
    "no text": lambda f: (f / NAME).write_bytes(b"\xff\xfe" * 20),
    "a directory": lambda f: corrupt.make_unreadable(f / NAME),
    "names a missing one": lambda f: state_of(f, 10, 20, 40),
    "keeps a missing one": lambda f: state_of(f, 10, 15, 20, 30),
    "names an older one": lambda f: state_of(f, 10, 20),
    "from another folder": lambda f: _absolute(f.parent / "elsewhere"),
}


@pytest.mark.parametrize("kind", STATES)
def test_the_state_file_is_repaired(tmp_path: Path, kind: str) -> None:
    stored = stored_in(tmp_path / "here")
    (tmp_path / "elsewhere").mkdir()
    if kind == "from another folder":
        _absolute(tmp_path / "elsewhere")
        corrupt.copy_over(tmp_path / "elsewhere" / NAME, stored.folder / NAME)
    else:
        STATES[kind](stored.folder)
    assert newest_good(stored.folder) == str(stored.new)
    if kind == "a directory":  # cannot be replaced: said, and the prefix is right all the same
        return
    state = stored.state
    assert state.latest == "ckpt-30"
    assert state.kept[-1] == "ckpt-30"
    assert set(state.kept) <= {"ckpt-10", "ckpt-20", "ckpt-30"}
    if kind in ("dropped", "empty", "cut", "zeroed", "no text"):
        assert state.kept == ("ckpt-10", "ckpt-20", "ckpt-30")
        assert len(state.times) == 3 and min(state.times) > 1e9 and state.preserved is None
    before = (stored.folder / NAME).read_bytes()
    assert newest_good(stored.folder) == str(stored.new)
    assert (stored.folder / NAME).read_bytes() == before


@pytest.mark.parametrize("kind", ["as it is", "absolute"])
def test_a_right_state_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    stored = stored_in(tmp_path)
    if kind == "absolute":
        _absolute(tmp_path)
    before = (stored.folder / NAME).stat()
    assert newest_good(stored.folder) == str(stored.new)
    after = (stored.folder / NAME).stat()  # without st_atime: it has been read
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)


def test_what_a_manager_keeps_for_ever_is_not_given_back_to_it(tmp_path: Path) -> None:
    stored = stored_in(tmp_path)
    state_of(tmp_path, 20, 40)  # 10 is not listed: kept for ever
    assert newest_good(stored.folder) == str(stored.new)
    assert stored.state.kept == ("ckpt-20", "ckpt-30")


def test_what_no_manager_has_saved_is_neither_chosen_nor_given_to_it(tmp_path: Path) -> None:
    """The best model, by `Checkpoint.write`: the manager would remove it, and it may lack the optimizer."""
    stored = stored_in(tmp_path)
    write(tmp_path / "best", {"w": [1.0]})
    seal(tmp_path / "best", step=30)
    put(tmp_path, 40, name="best")
    before = (tmp_path / NAME).read_bytes()
    assert newest_good(tmp_path) == str(stored.new)
    assert (tmp_path / NAME).read_bytes() == before
    corrupt.flip_bit(stored.index, 20)
    assert newest_good(tmp_path) == str(stored.old)
    assert stored.state.kept == ("ckpt-10", "ckpt-20")


@pytest.mark.parametrize("spoil", ["flip", "unsealed"])
@pytest.mark.parametrize("name", ["cp-{:04}.ckpt", "epoch{0}-{0}"])
def test_names_that_have_their_number_elsewhere_are_one_row(tmp_path: Path, name: str, spoil: str) -> None:
    """Of Keras' ModelCheckpoint the state file names the newest alone."""
    prefixes_ = [tmp_path / name.format(step) for step in (6, 7)]
    for step, prefix in zip((6, 7), prefixes_, strict=True):
        write(prefix, {"w": [float(step)]})
        if step == 6 or spoil == "flip":
            seal(prefix, step=step)
    (tmp_path / NAME).write_bytes(encode(State(prefixes_[1].name, (prefixes_[1].name,))))
    if spoil == "flip":
        corrupt.flip_bit(Path(f"{prefixes_[1]}.index"), 20)
    assert newest_good(tmp_path) == str(prefixes_[0])


@pytest.mark.parametrize("metric", ["0.05", "-0.12", "1.5", "12", "1e-05", "-2.5e+07", "nan", "inf", "-inf"])
@pytest.mark.parametrize("shape", ["weights.{}-{}", "epoch{}_loss={}.ckpt", "weights.{}.{}"])
def test_names_with_a_metric_are_one_row(tmp_path: Path, metric: str, shape: str) -> None:
    names = [shape.format("04", "0.31"), shape.format("05", metric)]
    for name in (*names, "best-06-0.31"):
        write(tmp_path / name, {"w": [1.0]})
    assert {path.name for path in OfNames(names[:1]).discover(tmp_path)} == set(names)


def test_without_a_manager_the_newest_is_chosen_whatever_its_name(tmp_path: Path) -> None:
    """Two prefixes by turns, two phases: what lastgasp makes of the state file says nothing about names."""
    for step, name in ((10, "a"), (20, "a"), (30, "b"), (40, "main-40")):
        write(tmp_path / name, {"w": [float(step)]})
        seal(tmp_path / name, step=step)
        assert newest_good(tmp_path) == str(tmp_path / name)
    assert newest_good(tmp_path) == str(tmp_path / "main-40")
    found = parse((tmp_path / NAME).read_bytes())
    assert found is not None and found.latest == "main-40"


def test_one_that_was_never_sealed_does_not_come_before_newer_ones_of_another_name(tmp_path: Path) -> None:
    """`Checkpoint.save` once, at the start, and `write` from there on."""
    write(tmp_path / "init-1", {"w": [0.0]})
    (tmp_path / NAME).write_bytes(encode(State("init-1", ("init-1",))))
    os.utime(tmp_path / "init-1.index", (1, 1))
    put(tmp_path, 30, name="step")
    assert newest_good(tmp_path) == str(tmp_path / "step-30")
    assert not LAYOUT.manifest_path(tmp_path / "init-1").exists()
    put(tmp_path, 40, name="other")
    assert newest_good(tmp_path) == str(tmp_path / "other-40")


def test_a_best_model_sealed_behind_the_managers_save_is_not_taken_for_one_of_its(tmp_path: Path) -> None:
    """`manager.save()`, the evaluation, `seal(best.write(...))`, and the job is killed before it seals the first."""
    stored = stored_in(tmp_path)
    put(tmp_path, 40, sealed=False)
    state_of(tmp_path, 10, 20, 30, 40)
    os.utime(tmp_path / "ckpt-40.index", (1, 1))
    write(tmp_path / "best-39", {"w": [1.0]})
    seal(tmp_path / "best-39", step=39)
    assert newest_good(tmp_path) == str(stored.new)
    assert "best-39" not in (tmp_path / NAME).read_text()


def test_a_newer_one_of_another_name_is_said_to_be_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = stored_in(tmp_path)
    put(tmp_path, 500, name="model")
    assert newest_good(tmp_path) == str(stored.new)
    assert "model-500, of step 500, was not chosen" in caplog.text
    for step in (10, 20, 30):
        corrupt.flip_bit(tmp_path / f"ckpt-{step}.index", 20)
    with pytest.raises(NoGoodCheckpoint) as caught:
        newest_good(tmp_path)
    assert "has another name" in caught.value.reasons[str(tmp_path / "model-500")]


def test_where_the_state_file_is_lost_nobody_may_remove_what_several_have_saved(tmp_path: Path) -> None:
    stored = stored_in(tmp_path)
    put(tmp_path, 25, name="best")
    corrupt.empty(tmp_path / NAME)
    assert newest_good(tmp_path) == str(stored.new)
    assert stored.state == State("ckpt-30")
    before = (tmp_path / NAME).read_bytes()
    assert newest_good(tmp_path) == str(stored.new)
    assert (tmp_path / NAME).read_bytes() == before


def test_one_without_a_manifest_and_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    """TensorFlow in this process, if it is here, tells them the same way: `test_tensorflow_real.py`."""
    prefix = put(tmp_path, 10, sealed=False)
    state_of(tmp_path, 10)
    corrupt.flip_bit(tmp_path / "ckpt-10.data-00000-of-00001", 4000)
    with pytest.raises(NoGoodCheckpoint, match="no manifest"):
        newest_good(tmp_path)
    assert not LAYOUT.manifest_path(prefix).exists()


@pytest.mark.parametrize("kind", ["moved", "linked"])
def test_absolute_names_of_a_directory_that_has_moved_are_those_that_are_here(tmp_path: Path, kind: str) -> None:
    stored = stored_in(tmp_path / "there")
    _absolute(stored.folder)
    here = tmp_path / "here"
    if kind == "moved":
        stored.folder.rename(here)
    else:
        here.symlink_to(stored.folder)
    corrupt.flip_bit(here / "ckpt-30.index", 20)
    assert newest_good(here) == str(here / "ckpt-20")
    assert Checkpoints(here).state.kept == ("ckpt-10", "ckpt-20")


def test_a_state_file_that_cannot_be_written_does_not_stop_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored, asked = stored_in(tmp_path), list[Path]()
    corrupt.drop(stored.folder / NAME)

    def refuse(path: Path, data: bytes) -> None:
        asked.append(path)
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(prefixes, "write_atomically", refuse)
    assert newest_good(stored.folder) == str(stored.new)
    assert asked == [stored.folder / NAME]
    assert "could not be repaired" in caplog.text


def test_an_empty_directory_holds_none_and_a_lost_one_is_no_new_start(tmp_path: Path) -> None:
    assert newest_good(tmp_path) is None
    assert newest_good(tmp_path / "absent") is None
    state_of(tmp_path, 10, 20)
    with pytest.raises(NoGoodCheckpoint, match="it is gone"):
        newest_good(tmp_path)


KERAS = ("model.keras", "epoch-3.weights.h5", "export/saved_model.pb", "training_metadata.json", "chief/checkpoint")


@pytest.mark.parametrize("name", KERAS)
def test_models_of_keras_are_not_an_empty_directory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"a model")
    with pytest.raises(NoGoodCheckpoint, match="format that lastgasp cannot verify"):
        newest_good(tmp_path)
    put(tmp_path, 4)
    found = newest_good(tmp_path)
    assert found is not None and found.endswith("-4"), "what is known is used"


def test_another_managers_directory_is_no_reason_not_to_begin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "best", 3)
    state_of(tmp_path / "best", 3)
    assert newest_good(tmp_path) is None
    assert "training begins anew" in caplog.text and "best" in caplog.text


def test_seal_says_that_it_does_not_know_keras(tmp_path: Path) -> None:
    (tmp_path / "model.keras").write_bytes(b"a model")
    with pytest.raises(ConfigError, match="format that lastgasp cannot verify") as caught:
        seal(tmp_path / "model.keras")
    assert "sync" not in str(caught.value)


def test_seal_returns_what_it_was_given_and_takes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seal(None) is None
    monkeypatch.chdir(tmp_path)
    for name, step in (("plain", 7), ("other", 5)):
        write(Path(name), {"w": [1.0]})
        assert seal(name, step=step) == name
    assert newest_good(".") == str(tmp_path / "plain")
    assert seal(Path("other")) == "other"  # sealed anew: without a number in its name it counts from 0
    for wrong in (-1, True):
        with pytest.raises(ConfigError, match="step"):
            seal("other", step=wrong)
    for function in (seal, newest_good):
        with pytest.raises(ConfigError, match="on this machine"):
            function("gs://bucket/ckpt-1")


@pytest.mark.parametrize("kind", ["index", "shard", "short", "foreign total", "nothing"])
def test_seal_refuses_what_is_incomplete(tmp_path: Path, kind: str) -> None:
    prefix = put(tmp_path, 30, shards=2, sealed=False)
    stored = Checkpoints(tmp_path)
    if kind == "index":
        corrupt.drop(stored.index)
    elif kind == "shard":
        corrupt.drop(stored.shard(0))
    elif kind == "short":
        corrupt.truncate(stored.shard(1), 8000)
    elif kind == "foreign total":
        (tmp_path / "ckpt-30.data-00000-of-00003").write_bytes(b"")
    else:
        prefix = tmp_path / "ckpt-31"
    with pytest.raises(CheckpointError, match=r"is incomplete.*checkpoint\.sync\(\)"):
        seal(prefix)
    assert not LAYOUT.manifest_path(prefix).exists()


def test_manifests_of_removed_checkpoints_go_with_the_next_seal(tmp_path: Path) -> None:
    for step in (1, 2):
        put(tmp_path, step)
    for path in LAYOUT.parts(tmp_path / "ckpt-1"):
        path.unlink()
    put(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["ckpt-2.manifest.json", "ckpt-3.manifest.json"]


def test_one_that_is_written_again_is_sealed_again(tmp_path: Path) -> None:
    put(tmp_path, 1, shards=3)
    write(tmp_path / "ckpt-1", {"w": [7.0]}, 3)
    assert not verify(tmp_path / "ckpt-1", LAYOUT).ok
    seal(tmp_path / "ckpt-1")
    assert verify(tmp_path / "ckpt-1", LAYOUT).ok


def test_the_layout_is_one_and_finds_its_own_alone(tmp_path: Path) -> None:
    assert isinstance(TensorFlowLayout(), Layout)
    put(tmp_path, 3)
    put(tmp_path, 4, name="model.ckpt")
    (tmp_path / "faiss.index").write_bytes(b"somebody else's")
    (tmp_path / "step=7.ckpt.manifest.json").write_bytes(b"{")
    (tmp_path / "iter_0000007.manifest.json").write_bytes(b"{")
    assert sorted(path.name for path in LAYOUT.discover(tmp_path)) == ["ckpt-3", "model.ckpt-4"]
    assert LAYOUT.step(tmp_path / "model.ckpt-4") == 4
    assert LAYOUT.step(tmp_path / "weights") is None


def test_it_loads_no_tensorflow() -> None:
    code = "import sys, lastgasp.tensorflow; print([m for m in ('tensorflow', 'numpy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "[]"


# The real TensorFlow's files.


def test_the_real_one_s_files_are_understood() -> None:
    for step in (20, 30):
        shards, entries = bundle.read_index(GOLDEN / f"ckpt-{step}")
        assert shards == 1
        sizes = {entry.key.split("/")[0]: (entry.elements, entry.size) for entry in entries}
        assert sizes["kernel"] == (60, 240) and sizes["half"] == (7, 14) and sizes["empty"] == (0, 0)
        assert bundle.content_problem(GOLDEN / f"ckpt-{step}") == ""
    data = (GOLDEN / NAME).read_bytes()
    state = parse(data)
    assert state is not None
    assert (state.latest, state.kept) == ("ckpt-30", ("ckpt-20", "ckpt-30"))
    assert encode(state) == data


def test_each_flipped_bit_of_the_real_one_is_found_by_its_own_checksums(tmp_path: Path) -> None:
    dice = random.Random(7)
    for path in LAYOUT.parts(GOLDEN / "ckpt-30"):
        whole, copy = path.read_bytes(), tmp_path / path.name
        for other in LAYOUT.parts(GOLDEN / "ckpt-30"):
            (tmp_path / other.name).write_bytes(other.read_bytes())
        for _ in range(60):
            at, bit = dice.randrange(len(whole)), dice.randrange(8)
            if path.suffix == ".index" and _is_slack(at, len(whole)):
                continue
            copy.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            assert bundle.content_problem(tmp_path / "ckpt-30"), (path.name, at, bit)


def _is_slack(at: int, size: int) -> bool:
    """The footer's handles and their padding, and the block that nobody reads: no checksum covers them."""
    return at >= size - 48 - 60 and at < size - 8


@given(st.binary(max_size=300), st.integers(0, 600))
@settings(max_examples=80, deadline=None)
def test_no_index_makes_it_raise(tmp_path_factory: pytest.TempPathFactory, junk: bytes, at: int) -> None:
    folder = tmp_path_factory.getbasetemp() / "junk"
    folder.mkdir(exist_ok=True)
    good = (GOLDEN / "ckpt-30.index").read_bytes()
    (folder / "ckpt-1.data-00000-of-00001").write_bytes(bytes(1000))
    (folder / "ckpt-1.index").write_bytes(good[:at] + junk + good[at + len(junk) :])
    assert isinstance(bundle.content_problem(folder / "ckpt-1"), str)


# The state file's text.


@pytest.mark.parametrize(
    ("text", "latest"),
    [
        ('model_checkpoint_path: "ckpt-3"', "ckpt-3"),
        ("model_checkpoint_path: 'ckpt-3' # the newest\n", "ckpt-3"),
        ('model_checkpoint_path:"a" "b-3";', "ab-3"),
        ('model_checkpoint_path: "m\\303\\266del-1"', "mödel-1"),
        ('model_checkpoint_path: "m\\xc3\\xb6del-1"', "mödel-1"),
        ('model_checkpoint_path: "mödel-1"\nunknown_field: 3\n', "mödel-1"),
        ('model_checkpoint_path: "a\\"b\\\\c\\n-1"', 'a"b\\c\n-1'),
    ],
)
def test_text_protos_are_read(text: str, latest: str) -> None:
    state = parse(text.encode())
    assert state is not None
    assert state.latest == latest
    assert parse(encode(state)) == state


@pytest.mark.parametrize(
    "text",
    ["", "model_checkpoint_path: ", 'model_checkpoint_path: "a', 'model_checkpoint_path: ""', "{}",
     'model_checkpoint_path: "a"\nmodel_checkpoint_path: "b"',
     'model_checkpoint_path: "a"\nall_model_checkpoint_paths: "a"\nall_model_checkpoint_timestamps: x',
     'model_checkpoint_path: "a"\nall_model_checkpoint_paths: "a"\nall_model_checkpoint_timestamps: 1\n'
     "all_model_checkpoint_timestamps: 2", '"a"', "model_checkpoint_path { x: 1 }", 'model_checkpoint_path: "\\377"'],
)  # fmt: skip
def test_what_is_no_state_is_none(text: str) -> None:
    assert parse(text.encode()) is None


@given(st.text(min_size=1), st.lists(st.text()), st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(latest: str, kept: list[str], time: float) -> None:
    try:
        state = State(latest, tuple(kept), (time,) * len(kept), time)
        data = encode(state)
    except UnicodeEncodeError:
        return
    assert parse(data) == state


def test_nothing_to_repair() -> None:
    folder = Path("/d")
    state = State("ckpt-2", ("ckpt-1", "ckpt-2"))
    standing = {folder / "ckpt-1": 1.0, folder / "ckpt-2": 2.0}
    assert repaired(state, folder, folder / "ckpt-2", standing) is None
    lost = repaired(None, folder, folder / "ckpt-2", standing)
    assert lost == State("ckpt-2", ("ckpt-1", "ckpt-2"), (1.0, 2.0))


# The commands.


def run(command: str, directory: Path) -> tuple[int, dict[str, tuple[str, str]]]:
    done = CliRunner().invoke(main, [command, str(directory), "--json"])
    rows = json.loads(done.output)["checkpoints"]
    return done.exit_code, {Path(row["path"]).name: (row["state"], row.get("reason", "")) for row in rows}


def test_names_that_others_use_as_well_are_tensorflows_where_its_files_are(tmp_path: Path) -> None:
    """cp-0007.ckpt is the name in TensorFlow's tutorials, and Lightning's ending; checkpoint-8 is Trainer's."""
    prefix = put(tmp_path, 7)
    for path in (*LAYOUT.parts(prefix), LAYOUT.manifest_path(prefix)):
        path.unlink()
    write(tmp_path / "cp-0007.ckpt", {"w": [1.0]})
    seal(tmp_path / "cp-0007.ckpt", step=7)
    put(tmp_path, 8, name="checkpoint")
    put(tmp_path, 9, name="checkpoint", sealed=False)
    assert {name: state for name, (state, _) in run("manifest", tmp_path)[1].items()} == {
        "checkpoint-9": "written", "checkpoint-8": "present", "cp-0007.ckpt": "present"
    }  # fmt: skip
    assert run("verify", tmp_path) == (0, dict.fromkeys(["checkpoint-9", "checkpoint-8", "cp-0007.ckpt"], ("good", "")))


def test_what_the_job_removes_meanwhile_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_in(tmp_path)

    def listed(directory: Path) -> list[tuple[str, Layout, Candidate]]:
        found = find(directory)
        for path in (*LAYOUT.parts(stored.folder / "ckpt-10"), stored.folder / "ckpt-10.manifest.json"):
            path.unlink()
        return found

    monkeypatch.setattr(verify_module, "find", listed)
    report = verify_module.examine(tmp_path)
    assert report.exit_code == 0 and [row.step for row in report.checkpoints] == [30, 20]


def test_the_commands_know_them(tmp_path: Path) -> None:
    stored = stored_in(tmp_path)
    put(tmp_path, 40, sealed=False)
    os.unlink(stored.manifest)
    assert run("verify", tmp_path)[1]["ckpt-40"] == ("no manifest", "")
    states = {name: state for name, (state, _) in run("manifest", tmp_path)[1].items()}
    assert states == {"ckpt-40": "written", "ckpt-30": "written", "ckpt-20": "present", "ckpt-10": "present"}
    assert run("verify", tmp_path)[0] == 0
    corrupt.flip_bit(stored.shard(1), 99)
    assert run("verify", tmp_path)[1]["ckpt-30"] == ("damaged", "")


@pytest.mark.parametrize("case", CASES[:5] + CASES[7:9] + CASES[10:12], ids=lambda case: case.name.replace(" ", "-"))
def test_the_command_refuses_those_that_are_incomplete(tmp_path: Path, case: Case) -> None:
    stored = stored_in(tmp_path)
    os.unlink(stored.manifest)
    case.spoil(stored)
    code, rows = run("manifest", tmp_path)
    assert (code, rows["ckpt-30"][0]) == (1, "refused")
    assert rows["ckpt-30"][1]
    assert not stored.manifest.exists()
