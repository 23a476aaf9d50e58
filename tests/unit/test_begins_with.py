"""What a job begins with where the user has not left that to lastgasp (`resume`), or its own steps cannot be read."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lastgasp import _fs
from lastgasp.adapter import CheckpointSelector, NativeManifests, NativeSave, RankStatus, SelectionPolicy
from lastgasp.checkpoint import candidates
from lastgasp.checkpoint.manifest import Fit, Provenance
from lastgasp.checkpoint.retention import prune
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig
from lastgasp.errors import NoGoodCheckpoint
from lastgasp.topology import Place, data_parallel
from support.checkpoint_kit import FILES, publish, put_file


def selected(
    folder: Path, resume: str | Path | None, attempt: int = 0, fit: int = 0, since_ns: int = 0
) -> Path | None:
    """What the job `job`, of one rank, begins with."""
    place = Place(
        rank=0, world_size=1, replicas=data_parallel(1), job="job", attempt=attempt, since_ns=since_ns
    )
    config = GaspConfig.resolve(folder, resume=resume)
    policy = SelectionPolicy(config, place, [folder], FILES, fit=Fit(number=fit))
    found = CheckpointSelector(policy, lambda tag, payload: [payload]).select()
    return None if found is None else found.path


@pytest.mark.parametrize("resume", ["never", "named"])
def test_a_restart_does_not_begin_over_because_its_own_steps_cannot_be_read(resume: str, tmp_path: Path) -> None:
    first = put_file(tmp_path, 10, job="older")
    asked = first if resume == "named" else resume
    assert selected(tmp_path, asked) == (first if resume == "named" else None)
    assert selected(tmp_path, asked, attempt=1) == (first if resume == "named" else None), "it had saved nothing"
    own = put_file(tmp_path, 20)
    assert selected(tmp_path, asked, attempt=1) == own
    own.rename(tmp_path / "away")
    with pytest.raises(NoGoodCheckpoint, match="This job has saved them, and refuses to begin over"):
        selected(tmp_path, asked, attempt=1)


def test_a_job_that_was_rolled_back_does_not_go_on_with_the_run_it_has_left(tmp_path: Path) -> None:
    """Both have one name, as with an id that a script of the user's always gives."""
    named, _ = put_file(tmp_path, 10), put_file(tmp_path, 20)
    since = time.time_ns()
    assert selected(tmp_path, named, since_ns=since) == named
    assert selected(tmp_path, named, attempt=1, since_ns=since) == named
    own = put_file(tmp_path, 15)
    assert selected(tmp_path, named, attempt=1, since_ns=since) == own


def test_never_takes_nothing_of_an_earlier_run_that_had_the_same_name(tmp_path: Path) -> None:
    """As with `--rdzv-id exp1` yesterday and today, also after a fault of today's run."""
    earlier = put_file(tmp_path, 10)
    since = time.time_ns()
    assert selected(tmp_path, "never", since_ns=since) is None
    assert selected(tmp_path, "never", attempt=1, since_ns=since) is None
    own = put_file(tmp_path, 5)
    assert selected(tmp_path, "never", attempt=1, since_ns=since) == own
    assert selected(tmp_path, "never") == earlier, "no launcher says when it began"


def test_what_a_host_saves_whose_clock_is_behind_is_the_jobs_own(tmp_path: Path) -> None:
    """The launchers have agreed on the clock that is ahead."""
    put_file(tmp_path, 10)
    since = time.time_ns() + 3 * 3600 * 10**9
    place = Place(rank=0, world_size=1, replicas=data_parallel(1), job="job", since_ns=since)
    writer = ManifestWriter(format="test", place=place)
    own = [tmp_path / f"step-{step}.ckpt" for step in (5, 6)]
    for path, step in zip(own, (5, 6), strict=True):
        publish(path, b"x" * 100, writer.provenance(step, "gasp"))
    assert selected(tmp_path, "never", attempt=1, since_ns=since) == own[1]
    prune(GaspConfig.resolve(tmp_path, resume="never", keep=1), FILES, own[1], place)
    assert not own[0].exists()


def test_never_knows_what_an_earlier_run_of_the_same_name_has_left(tmp_path: Path) -> None:
    """A save of the same step would otherwise be taken for one of this run, and be dropped for it."""
    put_file(tmp_path, 10)
    place = Place(rank=0, world_size=1, replicas=data_parallel(1), job="job", since_ns=time.time_ns())
    policy = SelectionPolicy(GaspConfig.resolve(tmp_path, resume="never"), place, [tmp_path], FILES)
    selector = CheckpointSelector(policy, lambda tag, payload: [payload])
    assert selector.select() is None
    [left] = candidates([tmp_path], FILES)
    assert left.manifest is not None and selector.present == {left.manifest.self_digest}


def test_what_the_environment_names_is_for_the_fit_that_saved_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All the folds of a script see it."""
    older, newer = tmp_path / "step-5.ckpt", tmp_path / "step-9.ckpt"
    for number, path in enumerate((older, newer)):
        about = Provenance(format="test", step=5, kind="periodic", job="older", fit=Fit(number=number))
        publish(path, b"x" * 100, about)
    monkeypatch.setenv("LASTGASP_RESUME", str(older))
    assert selected(tmp_path, None) == older
    assert "is of fit" not in caplog.text
    assert selected(tmp_path, None, fit=1) == newer
    assert "is of fit 0 of its script, and this is fit 1" in caplog.text
    monkeypatch.delenv("LASTGASP_RESUME")
    assert selected(tmp_path, older, fit=1) == older, "the script itself names it"


@pytest.mark.parametrize(("kept", "older"), [(1, "older"), (3, "older"), (3, "job")])
def test_what_was_named_and_what_others_have_saved_does_not_count(kept: int, older: str, tmp_path: Path) -> None:
    """A job that was rolled back keeps its own checkpoints, and the one that it began with. Jobs may share a name."""
    named, *abandoned = [put_file(tmp_path, step, job=older) for step in (500, 900, 1000)]
    place = Place(rank=0, world_size=1, replicas=data_parallel(1), job="job", since_ns=time.time_ns())
    config = GaspConfig.resolve(tmp_path, resume=named, keep=kept)
    own = []
    for step in (550, 600, 650, 700):
        own.append(put_file(tmp_path, step))
        prune(config, FILES, own[-1], place)
    left = {one.path for one in candidates([tmp_path], FILES)}
    assert left == {named, *abandoned, *own[-kept:]}


def left_by_the_dead(folder: Path) -> Path:
    """What a rank had written of a checkpoint when it was killed."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    left = folder / f".step-4.ckpt.tmp-{child.pid}-{_fs.host_tag()}012345"
    left.write_bytes(b"x")
    return left


@pytest.mark.parametrize("native", [False, True])
def test_what_a_rank_has_left_that_was_replaced_in_its_save_goes_with_the_next_checkpoint(
    native: bool, tmp_path: Path
) -> None:
    """No start comes that would find it."""
    left, mine = left_by_the_dead(tmp_path), _fs.unique_temp(tmp_path / "step-6.ckpt")
    mine.write_bytes(b"y")
    place = Place(rank=0, world_size=1, replicas=data_parallel(1), job="job")
    if native:
        path = tmp_path / "step-5.ckpt"
        path.write_bytes(b"x")
        saves = NativeManifests(ManifestWriter("test", place), lambda tag, data: [data], RankStatus())
        assert saves.commit(NativeSave(path, FILES, 5), alone=True)
    else:
        prune(GaspConfig.resolve(tmp_path), FILES, put_file(tmp_path, 5), place, kind="periodic")
    assert not left.exists()
    assert mine.exists()
