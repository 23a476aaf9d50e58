"""Which iteration Megatron is made to load: every damage of docs/facts/megatron.md §2, on two ranks that agree."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastgasp import sharing
from lastgasp.adapter import ManifestWriter, NativeManifests, NativeSave
from lastgasp.checkpoint import candidates, verify
from lastgasp.checkpoint.adopt import read_entries, write_manifest
from lastgasp.checkpoint.manifest import Provenance
from lastgasp.errors import CheckpointError, ConfigError, DamagedCheckpoint, NoGoodCheckpoint
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.ports import Gather
from lastgasp.testing import corrupt
from lastgasp.topology import Place, data_parallel
from lastgasp_megatron.args import options_of
from lastgasp_megatron.exits import NotLoaded, around_load, verdict_of
from lastgasp_megatron.reload import MegatronSelector
from lastgasp_megatron.save import REMOVES, Manifests, Saver
from lastgasp_megatron.tracker import FORMAT, LAYOUT, NAME, Tracker, checkpoint_path, read_tracker
from lastgasp_megatron.trainings import writer_of
from support.checkpoint_kit import as_ranks

torch = pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

Damage = Callable[[Path], object]


def place(rank: int, attempt: int = 0, job: str = "job", since_ns: int = 0) -> Place:
    return Place(rank=rank, world_size=2, replicas=data_parallel(2), attempt=attempt, job=job, since_ns=since_ns)


def manifests(rank: int, gather: Gather, status: RankStatus, job: str = "job", number: int = 0) -> Manifests:
    return Manifests(writer_of(place(rank, job=job), number), gather, status)


def saved(directory: Path, step: int) -> NativeSave:
    return NativeSave(checkpoint_path(directory, step), LAYOUT, step)


def write_torch(directory: Path, step: int) -> Path:
    """An iteration as Megatron's format torch has it, without a manifest."""
    folder = checkpoint_path(directory, step) / "mp_rank_00"
    folder.mkdir(parents=True)
    for number, name in enumerate(("model_optim_rng.pt", "distrib_optim.pt")):
        torch.save({"iteration": step, "weight": torch.arange(5000.0) + step + number}, folder / name)
    return folder.parent


def write_torch_dist(directory: Path, step: int) -> Path:
    """As format torch_dist."""
    import torch.distributed.checkpoint as dcp

    path = checkpoint_path(directory, step)
    path.mkdir(parents=True, exist_ok=True)
    dcp.save({"weight": torch.arange(5000.0) + step}, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return path


def track(directory: Path, step: object) -> None:
    (directory / NAME).write_text(str(step))


def commit(directory: Path, step: int, job: str = "job", number: int = 0) -> None:
    """What both ranks do after a save."""
    statuses = [RankStatus(), RankStatus()]

    def body(rank: int, gather: Gather) -> bool:
        return manifests(rank, gather, statuses[rank], job, number).commit(saved(directory, step))

    assert as_ranks(2, body) == [True, True]
    assert [status.durable for status in statuses] == [step, step]


def stored(directory: Path, write: Callable[[Path, int], Path] = write_torch, manifests: bool = True) -> Path:
    """Iterations 10 and 20; the tracker says 20."""
    for step in (10, 20):
        write(directory, step)
        track(directory, step)
        if manifests:
            commit(directory, step)
    return directory


@dataclass
class Chosen:
    """What Megatron was configured with, the same on both ranks."""

    load: str | None
    ckpt_step: int | None
    resumed: int
    finetune: bool = False
    left_out: tuple[str, ...] = ()
    goes_on: bool = False
    tracker: Tracker = field(default_factory=lambda: Tracker("missing"))


OF_THE_START = (
    "no_load_optim", "no_load_rng", "finetune", "override_ckpt_iteration", "ckpt_convert_update_legacy_dist_opt_format",
)  # fmt: skip


def choose(
    directory: Path, attempt: int = 0, job: str = "job", since_ns: int = 0, number: int = 0, **given: Any
) -> Chosen:
    """Let two ranks agree; returns what they set."""

    def body(rank: int, gather: Gather) -> Chosen:
        args = SimpleNamespace(**{"load": str(directory), "save": str(directory), "ckpt_step": None} | given)
        here = place(rank, attempt, job, since_ns)
        selector = MegatronSelector(args, options_of(args), here, gather, number=number)
        selector.steer()
        left_out = tuple(name for name in OF_THE_START if getattr(args, name, None) not in (None, False))
        finetune = bool(getattr(args, "finetune", False))
        said = Chosen(args.load, args.ckpt_step, selector.resumed, finetune, left_out, selector.goes_on)
        selector.load(lambda: None)
        selector.done()
        assert args.ckpt_step == given.get("ckpt_step")
        assert not [name for name in OF_THE_START if (given.get(name) or None) != (getattr(args, name, None) or None)]
        return said

    first, second = as_ranks(2, body)
    assert first == second
    first.tracker = read_tracker(Path(first.load or directory))
    return first


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LASTGASP_")]:
        monkeypatch.delenv(name)


def model(directory: Path) -> Path:
    return checkpoint_path(directory, 20) / "mp_rank_00/model_optim_rng.pt"


def optimizer(directory: Path) -> Path:
    return checkpoint_path(directory, 20) / "mp_rank_00/distrib_optim.pt"


TORCH: dict[str, tuple[Damage, int]] = {
    "model truncated": (lambda d: corrupt.truncate(model(d), 3000), 10),
    "model empty": (lambda d: corrupt.empty(model(d)), 10),
    "optimizer truncated": (lambda d: corrupt.truncate(optimizer(d), 3000), 10),
    "bit of the model": (lambda d: corrupt.flip_bit(model(d), 9000, 3), 10),
    "bit of the optimizer": (lambda d: corrupt.flip_bit(optimizer(d), 9000, 3), 10),
    "tracker empty": (lambda d: corrupt.empty(d / NAME), 20),
    "tracker missing": (lambda d: corrupt.drop(d / NAME), 20),
    "iteration missing": (lambda d: shutil.rmtree(checkpoint_path(d, 20)), 10),
    "manifest damaged": (lambda d: corrupt.truncate(d / "iter_0000020.manifest.json", 50), 10),
}
DIST: dict[str, tuple[Damage, int]] = {
    "data truncated": (lambda d: corrupt.truncate(next(checkpoint_path(d, 20).glob("*.distcp")), 3000), 10),
    "bit of the data": (lambda d: corrupt.flip_bit(next(checkpoint_path(d, 20).glob("*.distcp")), 9000, 3), 10),
    "data missing": (lambda d: corrupt.drop(next(checkpoint_path(d, 20).glob("*.distcp"))), 10),
    "metadata truncated": (lambda d: corrupt.truncate(checkpoint_path(d, 20) / ".metadata", 50), 10),
    "metadata missing": (lambda d: corrupt.drop(checkpoint_path(d, 20) / ".metadata"), 10),
    "metadata.json missing": (lambda d: corrupt.drop(checkpoint_path(d, 20) / "metadata.json"), 10),
}
ROWS = [(write_torch, name, *row) for name, row in TORCH.items()]
ROWS += [(write_torch_dist, name, *row) for name, row in DIST.items()]
NOT_SEEN_WITHOUT = {"bit of the data", "manifest damaged"}
"""Not detectable without a manifest."""


CASES = [
    pytest.param(*row, manifests, id=f"{row[0].__name__[6:]}: {row[1]}, {'with' if manifests else 'without'} manifest")
    for row in ROWS
    for manifests in (True, False)
    if manifests or row[1] not in NOT_SEEN_WITHOUT
]


@pytest.mark.parametrize(("write", "name", "damage", "step", "manifests"), CASES)
def test_every_damage_leads_to_the_newest_good_iteration(
    write: Callable[[Path, int], Path], name: str, damage: Damage, step: int, manifests: bool, tmp_path: Path
) -> None:
    stored(tmp_path, write, manifests)
    damage(tmp_path)
    chosen = choose(tmp_path)
    assert (chosen.load, chosen.ckpt_step, chosen.resumed) == (str(tmp_path), step, step)
    assert chosen.tracker == Tracker("iteration", step)


def test_undamaged_the_newest_is_loaded_and_the_tracker_left_alone(tmp_path: Path) -> None:
    stored(tmp_path)
    before = (tmp_path / NAME).stat().st_mtime_ns
    assert choose(tmp_path).ckpt_step == 20
    assert (tmp_path / NAME).stat().st_mtime_ns == before


def test_proven_damage_is_moved_away_with_its_reason(tmp_path: Path) -> None:
    stored(tmp_path)
    corrupt.flip_bit(model(tmp_path), 9000, 3)
    choose(tmp_path)
    assert (tmp_path / "iter_0000020.corrupt").is_dir()
    assert "content differs from its digest" in (tmp_path / "iter_0000020.corrupt.reason.json").read_text()


def test_nothing_good_is_an_error_that_lists_each(tmp_path: Path) -> None:
    stored(tmp_path)
    for path in tmp_path.glob("iter_*/mp_rank_00/model_optim_rng.pt"):
        corrupt.truncate(path, 100)
    with pytest.raises(NoGoodCheckpoint) as caught:
        choose(tmp_path)
    assert "iter_0000010" in str(caught.value) and "iter_0000020" in str(caught.value)
    assert (tmp_path / "iter_0000010").is_dir()


@pytest.mark.parametrize("text", ["", "20", "x"])
def test_a_tracker_without_iterations_is_an_error_and_no_start_from_scratch(text: str, tmp_path: Path) -> None:
    track(tmp_path, text)
    with pytest.raises(NoGoodCheckpoint, match="tracker"):
        choose(tmp_path)


def test_an_empty_directory_is_a_fresh_start(tmp_path: Path) -> None:
    assert choose(tmp_path / "new") == Chosen(str(tmp_path / "new"), None, 0)


def test_without_load_the_newest_in_save_is_loaded(tmp_path: Path) -> None:
    stored(tmp_path)
    chosen = choose(tmp_path, load=None)
    assert (chosen.load, chosen.ckpt_step) == (str(tmp_path), 20)


def test_a_save_that_was_not_finished_is_not_loaded(tmp_path: Path) -> None:
    stored(tmp_path)
    write_torch(tmp_path, 30)
    assert choose(tmp_path).ckpt_step == 20


def test_a_checkpoint_without_manifest_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, manifests=False)
    assert choose(tmp_path).ckpt_step == 20
    assert "has no manifest" in caplog.text and "lastgasp manifest" in caplog.text


def test_require_manifest_refuses_it(tmp_path: Path) -> None:
    stored(tmp_path, manifests=False)
    with pytest.raises(NoGoodCheckpoint):
        choose(tmp_path, lastgasp_require_manifest=True)
    commit(tmp_path, 10)
    assert choose(tmp_path, lastgasp_require_manifest=True).ckpt_step == 10


# -- what the user asked for -----------------------------------------------------------------------


def test_ckpt_step_is_verified_and_leaves_the_tracker_alone(tmp_path: Path) -> None:
    stored(tmp_path)
    chosen = choose(tmp_path, ckpt_step=10)
    assert (chosen.ckpt_step, chosen.tracker.iteration) == (10, 20)
    corrupt.flip_bit(model(tmp_path), 9000, 3)
    with pytest.raises(DamagedCheckpoint, match="content differs"):
        choose(tmp_path, ckpt_step=20)
    with pytest.raises(ConfigError, match="iter_0000015"):
        choose(tmp_path, ckpt_step=15)


def test_a_tracker_that_was_set_back_is_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Megatron's way back behind a spike of the loss; a killed job leaves a tracker that is older than the manifest."""
    stored(tmp_path)
    track(tmp_path, 10)
    assert choose(tmp_path, job="next").ckpt_step == 10
    assert "was rolled back: the tracker was set to 10 after this one had been saved" in caplog.text
    assert checkpoint_path(tmp_path, 20).exists()
    before = LAYOUT.manifest_path(checkpoint_path(tmp_path, 20)).stat().st_mtime_ns - 1
    os.utime(tmp_path / NAME, ns=(before, before))
    assert choose(tmp_path, job="next").ckpt_step == 20


def test_what_was_saved_behind_a_roll_back_is_resumed_from(tmp_path: Path) -> None:
    """By --ckpt-step, given once: the abandoned iteration is the greater one."""
    stored(tmp_path)
    assert choose(tmp_path, job="two", ckpt_step=10).ckpt_step == 10
    write_torch(tmp_path, 15)
    track(tmp_path, 15)
    commit(tmp_path, 15, "two")
    assert choose(tmp_path, job="three").ckpt_step == 15
    track(tmp_path, 30)
    assert choose(tmp_path, job="three").ckpt_step == 20, "what it names is not there: the newest"


def test_resume_names_a_path(tmp_path: Path) -> None:
    stored(tmp_path / "a")
    chosen = choose(tmp_path / "b", lastgasp_resume=str(tmp_path / "a/iter_0000010"))
    assert (chosen.load, chosen.ckpt_step) == (str(tmp_path / "a"), 10)


def test_a_restart_resumes_from_what_the_job_has_saved(tmp_path: Path) -> None:
    stored(tmp_path / "old")
    write_torch(tmp_path / "new", 5)
    commit(tmp_path / "new", 5)
    given: dict[str, Any] = {"load": str(tmp_path / "old"), "save": str(tmp_path / "new"), "finetune": True}
    first = choose(tmp_path, **given)
    assert (first.load, first.ckpt_step, first.finetune) == (str(tmp_path / "old"), 20, True)
    again = choose(tmp_path, attempt=1, **given)
    assert (again.load, again.ckpt_step, again.finetune) == (str(tmp_path / "new"), 5, False)
    other = choose(tmp_path, attempt=1, job="another", **given)
    assert (other.load, other.ckpt_step) == (str(tmp_path / "old"), 20)


def test_what_else_is_loaded_meanwhile_is_not_that_iteration(tmp_path: Path) -> None:
    """A teacher of the same number of iterations would be loaded without a word."""
    stored(tmp_path / "student")
    stored(tmp_path / "teacher")

    def body(rank: int, gather: Gather) -> list[tuple[str, object, bool]]:
        own, teacher = str(tmp_path / "student"), str(tmp_path / "teacher")
        args = SimpleNamespace(load=own, save=own, ckpt_step=None, finetune=True)
        selector = MegatronSelector(args, options_of(args), place(rank, 1), gather)
        selector.steer()
        seen = list[tuple[str, object, bool]]()

        def load() -> None:
            seen.append((Path(args.load).name, args.ckpt_step, args.finetune))

        selector.load_other(load)
        args.load = teacher
        selector.load(load)
        args.ckpt_step, args.finetune = 4, True
        selector.load(load)
        assert (args.ckpt_step, args.finetune) == (4, True)
        args.load, args.ckpt_step, args.finetune = own, 20, False
        selector.load(load)
        selector.load_other(load)
        return seen

    other, by_hand, pinned, student, behind = as_ranks(2, body)[0]
    assert (other, behind) == (("student", None, True),) * 2
    assert (by_hand, pinned) == (("teacher", None, True), ("teacher", 4, True))
    assert student == ("student", 20, False)


@pytest.mark.parametrize("load", ["old", "new", None])
def test_options_of_the_start_have_no_part_in_a_restart(tmp_path: Path, load: str | None) -> None:
    """Without the optimizer and the random state each fault would train on with other numbers, and nobody was told."""
    stored(tmp_path / "old")
    write_torch(tmp_path / "new", 25)
    commit(tmp_path / "new", 25)
    named = str(tmp_path / load) if load is not None else None
    for options in (
        {"no_load_optim": True, "no_load_rng": True}, {"finetune": True}, {"override_ckpt_iteration": 7},
        {"ckpt_convert_update_legacy_dist_opt_format": True},
    ):  # fmt: skip
        given: dict[str, Any] = {"load": named, "save": str(tmp_path / "new")} | options
        again = choose(tmp_path, attempt=1, **given)
        assert (again.load, again.ckpt_step, again.left_out) == (str(tmp_path / "new"), 25, ()), options
        started = choose(tmp_path, **given)
        assert started.left_out == tuple(options), "the user's own start"


@pytest.mark.parametrize("given", [{"no_load_rng": True}, {}], ids=["said", "not-said"])
def test_a_restart_does_not_look_for_random_states_that_are_not_saved(tmp_path: Path, given: dict[str, Any]) -> None:
    """Megatron would exit over that."""
    stored(tmp_path)
    assert choose(tmp_path, attempt=1, no_save_rng=True, no_load_optim=True, **given).left_out == ("no_load_rng",)
    assert choose(tmp_path, no_save_rng=True, **given).left_out == tuple(given), "the user's own start"


def test_a_restart_that_begins_where_the_job_began_leaves_out_the_same(tmp_path: Path) -> None:
    stored(tmp_path / "old")
    given: dict[str, Any] = {"load": str(tmp_path / "old"), "save": str(tmp_path / "new"), "no_load_optim": True}
    again = choose(tmp_path, attempt=1, job="another", **given)
    assert (again.ckpt_step, again.left_out) == (20, ("no_load_optim",))


def test_what_a_job_of_the_same_name_has_saved_before_this_start_is_loaded_as_the_user_says(tmp_path: Path) -> None:
    stored(tmp_path)
    again = choose(tmp_path, attempt=1, since_ns=time.time_ns() + 10**9, no_load_optim=True)
    assert (again.ckpt_step, again.left_out, again.goes_on) == (20, ("no_load_optim",), False)
    assert choose(tmp_path, attempt=1).goes_on and not choose(tmp_path).goes_on


def test_a_start_that_leaves_out_the_optimizer_of_its_own_training_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path)
    choose(tmp_path, no_load_optim=True)
    assert caplog.text.count("--no-load-optim: what ") == 1 and "Leave it out" in caplog.text
    caplog.clear()
    choose(tmp_path, save=str(tmp_path / "new"), no_load_optim=True)
    assert "--no-load-optim" not in caplog.text, "other weights to begin with"


def test_resume_never_takes_only_what_this_job_has_saved(tmp_path: Path) -> None:
    stored(tmp_path)
    assert choose(tmp_path, lastgasp_resume="never", job="another").ckpt_step is None
    assert choose(tmp_path, lastgasp_resume="never").ckpt_step == 20


def test_a_release_checkpoint_is_megatrons_own_business(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    track(tmp_path, "release")
    assert choose(tmp_path) == Chosen(str(tmp_path), None, 0, tracker=Tracker("release"))


# -- saves -----------------------------------------------------------------------------------------


def _save(
    directory: Path, step: int, broken: bool = False, **given: Any
) -> tuple[list[Saver], list[RankStatus]]:
    """A save by both ranks, of which rank 0 writes files and tracker as Megatron does.

    Args:
        broken: it cannot be read back.
    """
    statuses, savers = [RankStatus(), RankStatus()], dict[int, Saver]()

    def body(rank: int, gather: Gather) -> None:
        args = SimpleNamespace(**{"save": str(directory)} | given)
        saver = savers[rank] = Saver(args, manifests(rank, gather, statuses[rank]))

        def save_checkpoint(iteration: int, model: Any, release: bool = False) -> None:
            name = saver.tracker(str(directory / NAME))
            if rank == 0:
                write_torch(directory, iteration)
                assert Path(name).name != NAME
                if "save_retain_interval" in given and Path(name).exists():
                    shutil.rmtree(checkpoint_path(directory, int(Path(name).read_text())))
                if broken:
                    (checkpoint_path(directory, iteration) / "dangling.pt").symlink_to("nowhere")
                Path(name).write_text(str(iteration))
            else:
                assert Path(name).name == NAME
            gather(f"barrier/{iteration}", b"")

        saver.save(save_checkpoint, (step, None), {})

    as_ranks(2, body)
    return [savers[0], savers[1]], statuses


def test_a_save_is_followed_by_manifest_and_tracker_and_leaves_no_temporary(tmp_path: Path) -> None:
    _, statuses = _save(tmp_path, 10)
    assert [status.durable for status in statuses] == [10, 10]
    assert read_tracker(tmp_path) == Tracker("iteration", 10)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lastgasp.lock") == [
        "iter_0000010",
        "iter_0000010.manifest.json",
        NAME,
    ]


def _gasp(directory: Path, step: int) -> Path:
    path = write_torch(directory, step)
    about = Provenance(format=FORMAT, step=step, kind="gasp", job="job")
    write_manifest(path, LAYOUT, about, read_entries(path, LAYOUT))
    track(directory, step)
    return path


def test_a_save_in_torch_dist_over_a_gasp_leaves_one_checkpoint_of_one_format(tmp_path: Path) -> None:
    """At the end of a training whose last iteration had a fault. Megatron finds the gasp's file first, else."""
    path, manifest = _gasp(tmp_path, 10), LAYOUT.manifest_path(checkpoint_path(tmp_path, 10))

    def body(rank: int, gather: Gather) -> None:
        def save_checkpoint(iteration: int, model: Any) -> None:
            if rank == 0:
                write_torch_dist(tmp_path, iteration)
            gather("barrier", b"")

        args = SimpleNamespace(save=str(tmp_path), ckpt_format="torch_dist")
        Saver(args, manifests(rank, gather, RankStatus())).save(save_checkpoint, (10, None), {})

    as_ranks(2, body)
    assert not list(path.glob("mp_rank_*")) and (path / "metadata.json").exists()
    assert verify(path, LAYOUT).ok and "mp_rank_" not in manifest.read_text() and ".distcp" in manifest.read_text()


def test_a_job_that_is_killed_while_it_saves_over_a_gasp_resumes_from_the_gasp(tmp_path: Path) -> None:
    path = _gasp(tmp_path, 10)
    write_torch_dist(tmp_path, 10)
    assert choose(tmp_path).ckpt_step == 10
    assert [one.name for one in path.iterdir()] == ["mp_rank_00"], "the other got no manifest"


def test_where_the_gasp_is_gone_already_what_was_saved_over_it_stays(tmp_path: Path) -> None:
    path = _gasp(tmp_path, 10)
    write_torch_dist(tmp_path, 10)
    (path / "mp_rank_00").rename(tmp_path / "away")
    with contextlib.suppress(NoGoodCheckpoint):
        choose(tmp_path)
    assert [*tmp_path.rglob("*.distcp")]


def test_where_the_manifest_of_what_was_saved_over_a_gasp_cannot_be_written_the_gasp_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _gasp(tmp_path, 10)
    write_torch_dist(tmp_path, 10)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(NativeManifests, "_write", full)

    def body(rank: int, gather: Gather) -> None:
        made = manifests(rank, gather, RankStatus())
        made.format = "torch_dist"
        with pytest.raises(OSError, match="No space"):
            made._write(saved(tmp_path, 10), [])

    as_ranks(1, body)
    monkeypatch.undo()
    assert choose(tmp_path).ckpt_step == 10
    assert [one.name for one in path.iterdir()] == ["mp_rank_00"] and verify(path, LAYOUT).ok


def _saved_again(directory: Path, **given: Any) -> bool:
    """Whether Megatron is let save step 10 a second time, once it has begun iteration `curr_iteration`."""
    called: list[int] = []

    def body(rank: int, gather: Gather) -> None:
        args = SimpleNamespace(save=str(directory), curr_iteration=9)
        saver = Saver(args, manifests(rank, gather, RankStatus()))
        saver.training = True

        def save_checkpoint(iteration: int, model: Any) -> None:
            called.append(rank)
            if rank == 0 and not checkpoint_path(directory, iteration).exists():
                write_torch(directory, iteration)

        saver.save(save_checkpoint, (10, None), {})
        vars(args).update(given)
        saver.training, saver.loaded = given.get("training", True), given.get("loaded")
        saver.save(save_checkpoint, (10, None), {})

    as_ranks(2, body)
    assert sorted(called) in ([0, 1], [0, 0, 1, 1])
    return len(called) > 2


def test_what_is_on_disk_is_not_torn_by_a_second_save_of_the_same_step(tmp_path: Path) -> None:
    """As Megatron saves where the batch grows: survivors would find nothing to save meanwhile."""
    assert not _saved_again(tmp_path / "batch grows")
    assert _saved_again(tmp_path / "rerun machine", curr_iteration=10), "it holds more"
    assert _saved_again(tmp_path / "after training", training=False), "the script may have changed the model"


def test_a_training_that_had_ended_does_not_tear_its_last_checkpoint_when_it_is_started_again(tmp_path: Path) -> None:
    """Megatron saves at the end what it has just loaded, where no periodic save was due."""
    ended: dict[str, Any] = {"training": False, "curr_iteration": 0}
    assert not _saved_again(tmp_path / "a", **ended, loaded=checkpoint_path(tmp_path / "a", 10))
    assert _saved_again(tmp_path / "b", **ended, loaded=checkpoint_path(tmp_path / "a", 10)), "of another training"
    here = checkpoint_path(tmp_path / "c", 10)
    assert _saved_again(tmp_path / "c", **ended, loaded=here, ckpt_format="torch_dist"), "a gasp, or converted"


def test_async_saves_get_their_manifests_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each begins before the one before has ended, the queue is never empty."""
    queued: list[int] = []
    queue = SimpleNamespace(get_num_unfinalized_calls=lambda: len(queued))
    module = SimpleNamespace(_async_calls_queue=queue, is_empty_async_queue=lambda: not queued)
    monkeypatch.setitem(sys.modules, "megatron.training.async_utils", module)
    saver = Saver(SimpleNamespace(save=str(tmp_path), async_save=True), _alone())

    def save_checkpoint(iteration: int, model: Any) -> None:
        write_torch(tmp_path, iteration)
        Path(saver.tracker(str(tmp_path / NAME))).write_text(str(iteration))
        queued.append(iteration)

    for iteration in (10, 20):
        saver.save(save_checkpoint, (iteration, None), {})
        saver.finalized()
    assert read_tracker(tmp_path).state == "missing"
    queued.pop(0)
    saver.finalized()
    assert read_tracker(tmp_path) == Tracker("iteration", 10)
    assert [c.step for c in candidates([tmp_path], LAYOUT) if c.manifest] == [10]
    queued.clear()
    saver.finalized()
    assert read_tracker(tmp_path) == Tracker("iteration", 20)
    assert not list(tmp_path.glob(f"*{NAME}?*"))


def _alone() -> Manifests:
    here = Place(rank=0, world_size=1, replicas=data_parallel(1), job="job")
    return Manifests(ManifestWriter(FORMAT, here), lambda name, mine: [mine], RankStatus())


def test_manifests_of_removed_checkpoints_go_with_the_next_save(tmp_path: Path) -> None:
    _save(tmp_path, 10)
    shutil.rmtree(tmp_path / "iter_0000010")
    _save(tmp_path, 20)
    assert [path.name for path in tmp_path.glob("*.manifest.json")] == ["iter_0000020.manifest.json"]


@pytest.mark.parametrize(("broken", "left"), [(False, [10, 30, 40]), (True, [10, 20, 25, 30, 40])])
def test_an_older_save_is_removed_only_when_the_new_one_can_be_trusted(
    broken: bool, left: list[int], tmp_path: Path
) -> None:
    """As --save-retain-interval says, with what a gasp has put another name into the tracker before."""
    for step in (10, 20):
        _save(tmp_path, step)
    gasp = write_torch(tmp_path, 25)
    provenance = Provenance(format=FORMAT, step=25, kind="gasp", job="job", parent="iter_0000020")
    write_manifest(gasp, LAYOUT, provenance, read_entries(gasp, LAYOUT))
    track(tmp_path, 25)
    _save(tmp_path, 30, broken, save_retain_interval=30)
    assert read_tracker(tmp_path) == Tracker("iteration", 25 if broken else 30)
    _save(tmp_path, 40, broken, save_retain_interval=30)
    for thread in threading.enumerate():
        if thread.name == REMOVES:
            thread.join(30)
    assert [c.step for c in candidates([tmp_path], LAYOUT)][::-1] == left
    assert not broken or all(verify(checkpoint_path(tmp_path, step), LAYOUT).ok for step in (10, 20, 25))


def test_a_save_that_raises_leaves_the_tracker_and_no_temporary(tmp_path: Path) -> None:
    track(tmp_path, 10)
    saver = Saver(SimpleNamespace(save=str(tmp_path)), manifests(0, lambda *_: [], RankStatus()))

    def save_checkpoint(iteration: int, model: Any) -> None:
        Path(saver.tracker(str(tmp_path / NAME))).write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        saver.save(save_checkpoint, (20, None), {})
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert read_tracker(tmp_path) == Tracker("iteration", 10)


def test_a_file_that_cannot_be_read_back_leaves_no_manifest_on_any_rank(tmp_path: Path) -> None:
    path, status = write_torch(tmp_path, 10), [RankStatus(), RankStatus()]
    (path / "dangling.pt").symlink_to("nowhere")

    def body(rank: int, gather: Gather) -> bool:
        return manifests(rank, gather, status[rank]).commit(saved(tmp_path, 10))

    assert as_ranks(2, body) == [False, False]
    assert [s.durable for s in status] == [0, 0]
    assert not list(tmp_path.glob("*.manifest.json"))


# -- exits with code 0 -----------------------------------------------------------------------------


@pytest.mark.parametrize("code", [None, 0])
def test_a_silent_exit_while_loading_is_a_failure_with_the_reason(code: int | None) -> None:
    def load() -> None:
        try:
            raise RuntimeError("PytorchStreamReader failed reading zip archive")
        except RuntimeError:
            raise SystemExit(code)  # noqa: B904

    with pytest.raises(NotLoaded, match="RuntimeError: PytorchStreamReader failed") as caught:
        around_load(load, (), {})
    assert isinstance(caught.value, CheckpointError)


def test_another_exit_stays_what_it_is() -> None:
    def load() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        around_load(load, (), {})
    assert caught.value.code == 3


@pytest.mark.parametrize(("code", "word"), [(16, "asks for a start on other devices"), (17, "rejects a result")])
def test_the_rerun_machines_exits_are_a_verdict(code: int, word: str) -> None:
    found = verdict_of(SystemExit(code))
    assert found is not None and found.code == code and word in found.why


@pytest.mark.parametrize("error", [SystemExit(None), SystemExit(0), SystemExit(1), SystemExit("16"), RuntimeError(16)])
def test_other_ends_are_none(error: BaseException) -> None:
    assert verdict_of(error) is None


def test_hosts_with_directories_of_their_own_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one host saves would be nowhere to be seen on the other one."""
    here = threading.local()
    monkeypatch.setattr(sharing, "host_identity", lambda: here.name)
    monkeypatch.setattr(sharing, "SEEN_WITHIN", 0.2)

    def body(rank: int, gather: Gather) -> str:
        here.name = f"host{rank}"
        own = tmp_path / here.name
        own.mkdir()
        args = SimpleNamespace(load=str(own), save=str(own), ckpt_step=None)
        with pytest.raises(ConfigError) as error:
            MegatronSelector(args, options_of(args), place(rank), gather).steer()
        return str(error.value)

    for said in as_ranks(2, body):
        assert "a directory that all hosts share: rank 1 did not see" in said


# -- several trainings of a script ----------------------------------------------------------------

OTHER_START = [
    ({"finetune": True}, 20), ({"no_load_optim": True, "no_load_rng": True}, 20), ({"ckpt_step": 10}, 10),
]  # fmt: skip


@pytest.mark.parametrize("shared", [False, True], ids=["own directory", "one directory"])
@pytest.mark.parametrize(("given", "step"), OTHER_START)
def test_a_second_training_begins_with_the_first_ones_checkpoint_as_its_options_say_also_after_a_restart(
    tmp_path: Path, given: dict[str, Any], step: int, shared: bool
) -> None:
    first, second = stored(tmp_path / "a"), tmp_path / ("a" if shared else "b")
    given, number = {"load": str(first), "save": str(second), **given}, int(shared)
    begun, again = (choose(tmp_path, attempt=attempt, number=number, **given) for attempt in (0, 1))
    assert begun == again
    assert (Path(again.load or "").name, again.resumed, again.goes_on) == ("a", step, False)
    assert [*again.left_out] == [name for name in OF_THE_START if name in given]


@pytest.mark.parametrize("shared", [False, True], ids=["own directory", "one directory"])
@pytest.mark.parametrize(("given", "step"), OTHER_START)
def test_a_second_training_goes_on_with_its_own_after_a_restart(
    tmp_path: Path, given: dict[str, Any], step: int, shared: bool
) -> None:
    first, second, number = stored(tmp_path / "a"), tmp_path / ("a" if shared else "b"), int(shared)
    write_torch(second, 25)
    track(second, 25)
    commit(second, 25, number=number)
    again = choose(tmp_path, attempt=1, number=number, **{"load": str(first), "save": str(second), **given})
    assert (Path(again.load or "").name, again.resumed, again.goes_on) == (second.name, 25, True)
    assert again.left_out == ()


def test_the_first_training_of_a_directory_has_ended_where_a_later_one_has_saved(tmp_path: Path) -> None:
    stored(tmp_path)
    write_torch(tmp_path, 25)
    track(tmp_path, 25)
    commit(tmp_path, 25, number=1)
    again = choose(tmp_path, attempt=1, finetune=True)
    assert (again.resumed, again.goes_on, again.left_out) == (25, True, ())
