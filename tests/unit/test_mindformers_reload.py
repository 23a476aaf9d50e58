"""What MindFormers is configured to load: every row of the damage tables by one rank and two."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from lastgasp.adapter.mindspore import (
    ITERATIONS,
    LEGACY,
    PLAIN,
    LegacyName,
    decode_aux,
    encode_aux,
    layout_of,
    place_of_callback,
)
from lastgasp.checkpoint import Provenance, Staged, World, candidates
from lastgasp.checkpoint.adopt import read_entries, write_manifest
from lastgasp.checkpoint.retention import prune
from lastgasp.cli.manifest import adopt_all
from lastgasp.cli.verify import examine
from lastgasp.config import GaspConfig
from lastgasp.errors import CheckpointError, ConfigError, DamagedCheckpoint, NoGoodCheckpoint, NothingLoads
from lastgasp.exception_origin import cause_of
from lastgasp.options import Options
from lastgasp.ports import Gather, Layout
from lastgasp.testing import corrupt
from lastgasp.topology import Place, data_parallel
from lastgasp_mindformers import begun, unfit
from lastgasp_mindformers.base import begun_from
from lastgasp_mindformers.listing import by_samples
from lastgasp_mindformers.reload import MindFormersSelector, Selected
from lastgasp_mindformers.steering import resume_request_of
from lastgasp_mindformers.unfit import DoesNotLoad, refuse_missing
from support.checkpoint_kit import Died, DyingDisk, as_ranks
from support.mindspore_files import boundary, long, safetensors, state, write

STEPS = 4
"""Of an epoch."""


@dataclass
class Home:
    """A job's output directory with checkpoints of steps 2, 4, 6, 8."""

    path: Path
    ranks: int = 2
    ext: Any = "safetensors"
    crc: bool = False
    manifests: bool = True
    job: str = "first"
    batch: int | None = None
    names: dict[int, LegacyName] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    def fill(self, *steps: int) -> Home:
        for step in steps:
            self.put(step)
        return self

    def put(self, step: int, again: str = "", kind: Any = "periodic") -> LegacyName:
        """As CheckpointMonitor does, with a manifest from us."""
        epoch, within = (step - 1) // STEPS + 1, (step - 1) % STEPS + 1
        name = self.names[step] = LegacyName("tiny", epoch, within, self.ext, again)
        values = state(step, epoch) | ({"global_batch_size": long(self.batch)} if self.batch else {})
        for rank in range(self.ranks):
            write(self.checkpoints / name.file(rank), values, crc=self.crc)
        for relative, content in name.markers(range(self.ranks)).items():
            (self.checkpoints / relative).write_bytes(content)
        if self.manifests:
            self.adopt(self.checkpoints / name.name, LEGACY, step, kind)
        return name

    def adopt(self, path: Path, layout: Layout, step: int, kind: Any = "periodic") -> None:
        world = World(world_size=self.ranks, replica_groups=data_parallel(self.ranks))
        made_by = Provenance(format="mindformers", step=step, kind=kind, job=self.job, world=world)
        write_manifest(path, layout, made_by, read_entries(path, layout))

    def file(self, step: int, rank: int = 1) -> Path:
        return self.checkpoints / self.names[step].file(rank)

    def steer(self, config: dict[str, Any] | None = None, **given: Any) -> list[dict[str, Any]]:
        """What each rank's configuration is afterwards; `selector` and `arguments` are added to it."""
        job = given.pop("job", "second")
        attempt, arguments = given.pop("attempt", 0), given.pop("arguments", {})
        attempts = {name: given.pop(name) for name in ("attempts", "require_manifest") if name in given}

        def body(rank: int, gather: Gather) -> dict[str, Any]:
            options = Options(gasp=GaspConfig.resolve(self.path, **given), **attempts)
            everyone = data_parallel(self.ranks)
            place = Place(rank=rank, world_size=self.ranks, replicas=everyone, job=job, attempt=attempt)
            selector = MindFormersSelector(options, place, gather)
            own = {"output_dir": str(self.path), "use_parallel": self.ranks > 1} | (config or {})
            called = dict(arguments)
            selector.steer(own, called)
            selector.check(own)
            return own | {"selector": selector, "arguments": called}

        return as_ranks(self.ranks, body)

    def went_on_from(self, step: int | None, **given: Any) -> list[dict[str, Any]]:
        """All ranks load that step, by MindFormers' own options."""
        found = self.steer(**given)
        for rank, config in enumerate(found):
            assert config["selector"].resumed == step
            if step is not None:
                assert config["load_checkpoint"] == str(self.checkpoints)
                assert config["resume_training"] == self.names[step].base(rank)
                assert config["load_ckpt_format"] == self.ext
                assert config["arguments"]["resume_from_checkpoint"] == str(self.checkpoints)
                told = json.loads((self.checkpoints / f"rank_{rank}" / "meta.json").read_text())
                assert told["last_ckpt_file"] == self.names[step].base(rank)
        return found


def _cut_at_a_boundary(path: Path, keep: int = 8) -> None:
    values = state(8, 2)
    end = boundary(values, keep)
    assert 0 < end < path.stat().st_size
    corrupt.truncate(path, end)


def _zero_tail(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


ROWS: dict[str, Callable[[Path], object]] = {
    "truncated in a tensor": lambda path: corrupt.truncate(path, 1000),
    "truncated by one byte": lambda path: corrupt.truncate(path, path.stat().st_size - 1),
    "cut between parameters": _cut_at_a_boundary,
    "zero-filled tail": _zero_tail,
    "one bit flipped": lambda path: corrupt.flip_bit(path, path.stat().st_size // 2, 3),
    "empty": corrupt.empty,
    "missing": corrupt.drop,
}
FORMATS = [(ext, crc) for ext in ("ckpt", "safetensors") for crc in (False, True)]
each_format = pytest.mark.parametrize(("ext", "crc"), FORMATS, ids=[f"{e}{'+crc' * c}" for e, c in FORMATS])
each_row = pytest.mark.parametrize("row", ROWS)
QUIET = {("one bit flipped", ext, False) for ext in ("ckpt", "safetensors")}
QUIET |= {("zero-filled tail", "safetensors", False)}
"""What cannot be seen without a manifest or a checksum."""


# -- MindSpore's table ----------------------------------------------------------------------------


@each_row
@each_format
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_damage_falls_back(tmp_path: Path, row: str, ext: str, crc: bool, ranks: int) -> None:
    home = Home(tmp_path, ranks, ext, crc).fill(6, 8)
    ROWS[row](home.file(8, ranks - 1))
    if ranks > 1:
        home.went_on_from(6)
    else:
        (config,) = home.steer()
        assert config["selector"].resumed == 6
        if ext == "ckpt":
            assert config["load_checkpoint"] == str(home.checkpoints)
            assert config["resume_training"] == "tiny_rank_0-2_2.ckpt"
        else:
            (only,) = Path(config["load_checkpoint"]).iterdir()
            assert (only.name, only.resolve()) == ("hyper_param.safetensors", home.file(6, 0))
            assert config["resume_training"] is True
    home_of_bad = home.checkpoints / f"{home.names[8].name}.corrupt"
    assert home_of_bad.exists() == (row != "missing")
    assert len(list(home_of_bad.rglob(f"*.{ext}"))) == (ranks if row != "missing" else 0)


@each_row
@each_format
def test_without_a_manifest_what_the_format_tells_is_seen(tmp_path: Path, row: str, ext: str, crc: bool) -> None:
    home = Home(tmp_path, 2, ext, crc, manifests=False).fill(6, 8)
    ROWS[row](home.file(8))
    home.went_on_from(8 if (row, ext, crc) in QUIET else 6)
    assert list(home.checkpoints.glob("*.corrupt")) == []  # nothing is proven


@pytest.mark.parametrize("keep", range(1, 12))
def test_a_ckpt_cut_at_any_boundary_without_a_manifest(tmp_path: Path, keep: int) -> None:
    home = Home(tmp_path, 2, "ckpt", manifests=False).fill(6, 8)
    _cut_at_a_boundary(home.file(8), keep)
    home.went_on_from(6)


# -- MindFormers' table ---------------------------------------------------------------------------


def test_meta_json_is_repaired_and_not_believed(tmp_path: Path) -> None:
    home = Home(tmp_path).fill(6, 8)
    corrupt.truncate(home.checkpoints / "rank_1" / "meta.json", 7)
    (home.checkpoints / "rank_0" / "meta.json").write_bytes(home.names[6].meta(0))
    home.went_on_from(8)


@pytest.mark.parametrize("how", ["absent", "empty", "hidden"])
@pytest.mark.parametrize("resume", [True, False])
def test_a_first_start_begins_from_scratch(tmp_path: Path, how: str, resume: bool) -> None:
    home = Home(tmp_path)
    if how != "absent":
        home.checkpoints.mkdir()
    if how == "hidden":
        (home.checkpoints / ".lastgasp.lock").touch()
    given = str(home.checkpoints) if resume else ""
    for config in home.steer({"load_checkpoint": given, "resume_training": resume}):
        assert not config["load_checkpoint"]
        assert not config["resume_training"]
        assert config["selector"].resumed is None


def test_only_bad_ones_are_an_error_that_moves_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path).fill(6, 8)
    corrupt.flip_bit(home.file(8), 3000)
    corrupt.truncate(home.file(6), 3000)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(NoGoodCheckpoint) as caught:
        home.steer()
    assert set(caught.value.reasons) == {str(home.checkpoints / home.names[step].name) for step in (6, 8)}
    assert sorted(tmp_path.rglob("*")) == before


def test_files_that_meta_json_names_and_that_are_gone_are_an_error(tmp_path: Path) -> None:
    home = Home(tmp_path).fill(8)
    for path in (home.file(8, 0), home.file(8, 1), home.checkpoints / f"{home.names[8].name}.manifest.json"):
        path.unlink()
    with pytest.raises(NoGoodCheckpoint, match="names epoch 2, step 4"):
        home.steer()


def test_a_first_save_that_was_cut_short_is_no_loss(tmp_path: Path) -> None:
    home = Home(tmp_path, manifests=False)
    home.went_on_from(None)
    home.fill(4)
    home.file(4).unlink()
    (home.checkpoints / "rank_1" / "meta.json").unlink()
    home.went_on_from(None)
    for config in home.steer({"load_checkpoint": str(home.checkpoints), "resume_training": True}):
        assert (config["load_checkpoint"], config["resume_training"]) == ("", False)


def _gasp(directory: Path, name: LegacyName, disk: DyingDisk) -> None:
    with contextlib.suppress(Died), Staged(directory / name.name, LEGACY, disk=disk) as staged:
        for rank in (0, 1):
            staged.open(name.file(rank)).write(safetensors(state(3, 1)))
        staged.open(name.aux).write(encode_aux({0: b"0"}))
        staged.publish(Provenance(format="mindformers", step=3, kind="gasp", job="x"))


def test_a_first_gasp_that_was_cut_short_is_no_loss(tmp_path: Path) -> None:
    home, name, whole = Home(tmp_path), LegacyName("tiny", 1, 3, "safetensors"), DyingDisk()
    _gasp(tmp_path / "elsewhere", name, whole)
    renames = [number for number, call in enumerate(whole.log) if call == "rename"]
    _gasp(home.checkpoints, name, DyingDisk(renames[3]))  # of the manifest, of the ranks' files, of the auxiliary state
    assert sorted(LEGACY.files(home.checkpoints / name.name)) == [name.file(0), name.file(1)]
    with pytest.raises(NoGoodCheckpoint):
        home.steer()
    begun.begin(home.path, "a job that began from scratch")
    home.went_on_from(None)


def test_the_folder_of_a_rank_that_was_lost_is(tmp_path: Path) -> None:
    """Three complete checkpoints, as a job without lastgasp left them, and the disk of one rank is gone."""
    home = Home(tmp_path, manifests=False).fill(4, 6, 8)
    shutil.rmtree(home.checkpoints / "rank_1")
    for request in ({}, {"load_checkpoint": str(home.checkpoints), "resume_training": True}):
        with pytest.raises(NoGoodCheckpoint, match="no file of rank 1"):
            home.steer(request)
    home.went_on_from(None, resume="never")


def test_a_job_that_has_saved_may_not_begin_from_scratch_again(tmp_path: Path) -> None:
    home = Home(tmp_path, manifests=False)
    home.went_on_from(None)
    assert begun.exists(tmp_path)
    home.fill(4)
    home.went_on_from(4)
    assert not begun.exists(tmp_path)
    shutil.rmtree(home.checkpoints / "rank_1")
    with pytest.raises(NoGoodCheckpoint, match="no file of rank 1"):
        home.steer()


@pytest.mark.parametrize("name", ["best.ckpt", "rank_0/net_train.ckpt", "iteration_00000004/model.safetensors"])
def test_files_of_training_that_nobody_understands_are_not_an_empty_directory(tmp_path: Path, name: str) -> None:
    home = Home(tmp_path)
    file = write(home.checkpoints / name, state(4, 1))
    with pytest.raises(NoGoodCheckpoint, match=re.escape(name.partition("/model")[0])):
        home.steer()
    home.went_on_from(None, resume="never")
    home.went_on_from(None)  # the word of who began from scratch
    begun.finished(tmp_path)
    file.rename(file.with_name("ckpt_strategy_rank_0.ckpt"))
    if "iteration" not in name:
        home.went_on_from(None)


def test_a_file_that_was_lost_is(tmp_path: Path) -> None:
    home = Home(tmp_path, manifests=False).fill(4)
    home.file(4).unlink()  # and meta.json of rank 1 names it
    with pytest.raises(NoGoodCheckpoint, match="no file of rank 1"):
        home.steer()


def test_five_are_tried_and_no_more(tmp_path: Path) -> None:
    home = Home(tmp_path).fill(*range(1, 8))
    for step in range(3, 8):
        corrupt.flip_bit(home.file(step), 3000)
    with pytest.raises(NoGoodCheckpoint, match="5 newer ones were"):
        home.steer()
    home.went_on_from(2, attempts=6)


# -- what is meant --------------------------------------------------------------------------------


def test_the_newest_is_taken_whatever_its_name_and_time(tmp_path: Path) -> None:
    home = Home(tmp_path).fill(4, 8)
    name = LegacyName("tiny", 2, 1, "safetensors", "_1")  # after a restart MindFormers counts from 0 again
    for rank in (0, 1):
        write(home.checkpoints / name.file(rank), state(9, 2))
    home.adopt(home.checkpoints / name.name, LEGACY, 9)
    home.names[9] = name
    home.went_on_from(9)


@pytest.mark.parametrize("ext", ["ckpt", "safetensors"])
@pytest.mark.parametrize("manifests", [True, False])
def test_steps_of_a_larger_batch_are_worth_more(tmp_path: Path, ext: str, manifests: bool) -> None:
    """From step 8 of batch 4 MindFormers goes on as step 4 of batch 8."""
    home = Home(tmp_path, ext=ext, batch=4, manifests=manifests).fill(6, 8)
    home.batch = 8
    for step in (5, 6):
        home.put(step, "_1")
    for attempt in (0, 1) if manifests else (0,):
        home.went_on_from(6, job="first", attempt=attempt)
        assert home.names[6].again == "_1"
    corrupt.truncate(home.file(6), 1000)
    assert home.went_on_from(5)
    home.batch = 2
    home.put(21)
    home.went_on_from(21)


def test_the_order_by_samples_lists_no_folder_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank does it at each start, over the folders of all of them."""
    home = Home(tmp_path, ranks=3, batch=4).fill(6, 8)
    home.batch = 8
    home.put(5, "_1")
    found = candidates([home.checkpoints], LEGACY)

    def refuses(where: Any) -> list[str]:
        raise AssertionError(where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuses)
        assert [c.step for c in by_samples(found)] == [5, 8, 6]
    home.file(5, 0).unlink()
    assert [c.step for c in by_samples(found)] == [5, 8, 6], "the next rank tells"


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_mindformers_converts_from_other_ranks_is_left_to_it(tmp_path: Path, ranks: int) -> None:
    """Its guide's way to another number of ranks; each rank holds a shard of its own."""
    home = Home(tmp_path).fill(6, 8)
    home.ranks = ranks
    asks = {"load_checkpoint": str(home.checkpoints), "resume_training": True, "use_parallel": True}
    given = asks | {"auto_trans_ckpt": True}
    if ranks == 4:
        with pytest.raises(NoGoodCheckpoint, match="was saved by 2 ranks"):
            home.steer(asks)
        for attempt in (0, 1):  # a restart before the first save of its own
            for config in home.steer(given, attempt=attempt):
                assert {name: config[name] for name in given} == given and config["selector"].resumed is None
        home.manifests = False
        home.put(9)  # its first save is cut short
        home.file(9, 3).unlink()
        (home.checkpoints / "rank_3/meta.json").unlink()
        for config in home.steer(given, attempt=1):
            assert {name: config[name] for name in given} == given and config["selector"].resumed is None
        home.manifests = True
    home.put(9)
    for config in home.steer(given, attempt=1, job="first"):
        assert (config["selector"].resumed, config["auto_trans_ckpt"]) == (9, False)
    corrupt.truncate(home.file(9, 0), 1000)
    if ranks == 4:
        with pytest.raises(NoGoodCheckpoint):
            home.steer(given, attempt=1, job="first")


def test_what_was_saved_after_a_conversion_is_not_converted(tmp_path: Path) -> None:
    """The same YAML at each start, which names the old weights and how those are sharded."""
    old = Home(tmp_path / "old").fill(6)
    home = Home(tmp_path / "out", ranks=4).fill(9)
    (tmp_path / "link").symlink_to(home.checkpoints)
    given = {"resume_training": True, "use_parallel": True, "auto_trans_ckpt": True}
    for folder, converts in ((old.checkpoints, False), (home.checkpoints, True), (tmp_path / "link", True)):
        for attempt in (0, 1):  # of another job than that which has saved
            for config in home.steer(given | {"load_checkpoint": str(folder)}, attempt=attempt):
                assert (config["selector"].resumed, config["auto_trans_ckpt"]) == (9, converts)
                assert config["load_checkpoint"] == str(home.checkpoints)


def test_gasps_of_a_larger_batch_are_kept(tmp_path: Path) -> None:
    home, kept = Home(tmp_path, batch=4), []
    place = Place(rank=0, world_size=2, replicas=data_parallel(2), job="first")
    for batch, steps in ((4, (6, 7, 8)), (8, (5, 6, 7))):
        home.batch = batch
        for step in steps:
            name = home.put(step, "_1" if batch == 8 else "", "gasp")
            prune(GaspConfig.resolve(tmp_path), LEGACY, home.checkpoints / name.name, place, in_order=by_samples)
            kept = sorted(path.name for path in home.checkpoints.glob("*.manifest.json"))
    assert kept == [f"tiny_rank_1-2_{within}.safetensors.manifest.json" for within in (1, 2, 3)]


def test_gasp_with_the_random_state_of_each_rank(tmp_path: Path) -> None:
    home = Home(tmp_path).fill(4)
    name = home.names[7] = LegacyName("tiny", 2, 3, "safetensors")
    with Staged(home.checkpoints / name.name, LEGACY) as staged:
        data = write(tmp_path / "made.safetensors", state(7, 2)).read_bytes()
        staged.open(name.file(0)).write(data)
        staged.link(name.file(1), name.file(0))
        staged.open(name.aux).write(encode_aux({0: b"zero", 1: b"one"}))
        about = Provenance(format="mindformers", step=7, kind="gasp", job="x",
                           world=World(world_size=2, replica_groups=((0, 1),)))  # fmt: skip
        staged.publish(about, markers=name.markers(range(2)))
    found = home.went_on_from(7)
    assert [config["selector"].aux for config in found] == [b"zero", b"one"]
    corrupt.flip_bit(home.checkpoints / name.aux, -1)
    assert [config["selector"].aux for config in home.went_on_from(4)] == [b"", b""]


def test_a_wish_of_the_user_counts_at_the_first_start(tmp_path: Path) -> None:
    home = Home(tmp_path).fill(4, 8)
    request = {"load_checkpoint": str(home.checkpoints), "resume_training": home.names[4].base(0)}
    home.went_on_from(4, config=request)
    home.went_on_from(4, resume=str(home.file(4, 0)))
    home.went_on_from(4, resume=str(home.checkpoints / home.names[4].name))
    home.job = "second"
    home.fill(6)
    home.went_on_from(6, config=request, attempt=1)
    corrupt.flip_bit(home.file(4), 3000)
    with pytest.raises(DamagedCheckpoint, match="rank_1/tiny_rank_1-1_4"):
        home.steer(request)
    with pytest.raises(ConfigError, match="resume"):
        home.steer({"load_checkpoint": str(home.checkpoints), "resume_training": "tiny_rank_0-9_9"})


def test_never_is_for_what_was_there_before_this_job(tmp_path: Path) -> None:
    home = Home(tmp_path).fill(8)
    home.went_on_from(None, resume="never")
    home.job = "second"
    home.fill(6)
    home.went_on_from(6, resume="never")


def test_weights_to_begin_with_stay_the_users(tmp_path: Path) -> None:
    home = Home(tmp_path / "out")
    weights = write(tmp_path / "pretrained" / "model.safetensors", state(100, 9)).parent
    request = {"load_checkpoint": str(weights), "resume_training": False, "auto_trans_ckpt": True}
    for config in home.steer(request):
        assert (config["load_checkpoint"], config["auto_trans_ckpt"]) == (str(weights), True)
        assert config["arguments"] == {}
    home.job = "second"
    home.fill(4)
    for config in home.went_on_from(4, config=request, arguments={"finetune_checkpoint": str(weights)}, job="third"):
        assert config["auto_trans_ckpt"] is False
        assert config["arguments"]["finetune_checkpoint"] is False


@pytest.mark.parametrize("manifests", [True, False])
@pytest.mark.parametrize("load", ["checkpoint", "checkpoint/rank_0/tiny_rank_0-2_4.safetensors", "../elsewhere"])
def test_a_fine_tuning_resumes_from_what_it_has_saved_itself(tmp_path: Path, load: str, manifests: bool) -> None:
    """Not from its base, or an older training, in the same output_dir: those steps are higher and not its own."""
    home = Home(tmp_path / "out", manifests=manifests).fill(2, 8)
    (home.checkpoints / "rank_0" / "more.safetensors").write_bytes(b"of the base")
    write(tmp_path / "elsewhere" / "model.safetensors", state(100, 9))
    request = {"load_checkpoint": str(home.path / load), "resume_training": False, "auto_trans_ckpt": False}
    meta = home.checkpoints / "rank_0" / "meta.json"
    before = meta.read_bytes()
    for attempt in (0, 1):
        for config in home.steer(request, attempt=attempt):
            assert (config["selector"].resumed, config["arguments"]) == (None, {})
            assert config["load_checkpoint"] == request["load_checkpoint"]
            assert len(config["selector"].present) == 2 * manifests  # a gasp of such a name takes their place
    assert meta.read_bytes() == before
    home.job, home.manifests = "second", True
    home.put(3, "_1")
    [selector, _] = [config["selector"] for config in home.went_on_from(3, config=request, attempt=1)]
    assert [c.step for c in selector.in_order(candidates([home.checkpoints], LEGACY))] == [3]
    home.went_on_from(3, config=request, job="third")  # by hand, with the same YAML
    home.job = "third"
    home.put(5, "_1")
    home.went_on_from(5, config=request, job="third", attempt=1)
    home.job = "a pretraining that goes on meanwhile"
    home.put(7)
    home.went_on_from(5, config=request, job="fourth")
    asked = home.steer(request, job="fifth", resume=str(home.file(8, 0)))
    assert [config["selector"].resumed for config in asked] == [8, 8]
    other = request | {"load_checkpoint": str(tmp_path / "another")}
    assert [config["selector"].resumed for config in home.steer(other, job="sixth")] == [None, None]


def test_what_the_first_rank_cannot_list_is_said_by_all(tmp_path: Path) -> None:
    """None waits for it until the deadline, to say something else."""
    place, told, said = Place(rank=0, world_size=2, replicas=((0, 1),), job="first"), list[bytes](), list[str]()

    def gather(tag: str, payload: bytes) -> list[bytes]:
        told.append(payload)
        return [told[0], b""]

    def there() -> set[str]:
        raise ConfigError("output_dir", "/closed", "a directory that can be listed", "Give one.")

    for rank in (0, 1):
        with pytest.raises(ConfigError, match="/closed") as raised:
            begun_from(tmp_path / "base", tmp_path, replace(place, rank=rank), gather, there)
        said.append(str(raised.value))
    assert len(told) == 2 and said[0] == said[1]


def test_a_fine_tuning_whose_files_are_lost_does_not_begin_again(tmp_path: Path) -> None:
    home = Home(tmp_path / "out").fill(8)
    request = {"load_checkpoint": str(home.checkpoints), "resume_training": False}
    home.steer(request)
    home.job = "second"
    home.put(3, "_1")
    for rank in (0, 1):
        home.file(3, rank).unlink()
    with pytest.raises(NoGoodCheckpoint):
        home.steer(request, job="third")


def test_what_a_restart_loads_instead_is_said_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    home = Home(tmp_path / "out").fill(8)
    request = {"load_checkpoint": str(tmp_path / "base"), "resume_training": False}
    home.steer(request)
    assert f"{home.checkpoints} there is progress of other trainings (1 checkpoints)" in caplog.text
    home.job = "second"
    home.put(3, "_1")
    for job, who in (("second", "this job has saved since"), ("third", "an earlier start of this training has")):
        caplog.clear()
        home.steer(request, job=job, attempt=int(job == "second"))
        assert who in caplog.text
    caplog.clear()
    home.steer(request | {"resume_training": True}, job="fourth")
    assert "saved since" not in caplog.text and "it is the newest" in caplog.text


@pytest.mark.parametrize(
    "given",
    [
        {"monitor_config": {"health_checkpoint": {"embedding_local_norm_threshold": 1.0}}},
        {"use_checkpoint_health_monitor": True},
    ],
)
def test_where_mindformers_chooses_by_its_health_check(
    tmp_path: Path, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(tmp_path).fill(4)
    with pytest.raises(ConfigError, match="embedding_local_norm_threshold"):
        home.steer(given | {"use_legacy_format": False})
    home.went_on_from(4, config=given)  # there the option does not choose, or by a list of its own
    assert ("whatever MindFormers' health check" in caplog.text) == ("use_checkpoint_health_monitor" in given)


@pytest.mark.parametrize(
    ("given", "skipped"), [({"ignore_data_skip": True}, 0), ({"data_skip_steps": 5}, 9), ({"data_skip_steps": 0}, 0)]
)
def test_where_the_data_began_is_for_the_start_only(tmp_path: Path, given: dict[str, Any], skipped: int) -> None:
    """A resumed job would train on the first data once more, and nobody was told; 0: MindFormers skips its steps."""
    home = Home(tmp_path)
    for config in home.steer(dict(given)):
        assert {name: config[name] for name in given} == given
    home.fill(4)
    for config in home.went_on_from(4, config=given):
        assert (config.get("ignore_data_skip") or False, config.get("data_skip_steps") or 0) == (False, skipped)
    for config in home.went_on_from(4, config={}, arguments=dict(given)):
        assert (config["arguments"].get("data_skip_steps") or 0) == skipped
        assert not config["arguments"].get("ignore_data_skip")


def test_weights_that_training_shall_resume_from_are_left_to_mindformers(tmp_path: Path) -> None:
    home = Home(tmp_path / "out")
    unified = write(tmp_path / "unified" / "hyper_param.safetensors", state(100, 9)).parent
    request = {"load_checkpoint": str(unified), "resume_training": True}
    for config in home.steer(request):
        assert (config["load_checkpoint"], config["resume_training"]) == (str(unified), True)


def test_manifests_may_be_required(tmp_path: Path) -> None:
    home = Home(tmp_path).fill(4)
    home.manifests = False
    home.fill(8)
    home.went_on_from(4, require_manifest=True)
    home.went_on_from(8)


def test_a_checkpoint_of_another_number_of_ranks(tmp_path: Path) -> None:
    home = Home(tmp_path, ranks=4).fill(4, 8)
    home.ranks = 2
    home.went_on_from(8)  # equal on all ranks, and there is one for each
    home.ranks = 5
    with pytest.raises(NoGoodCheckpoint, match="was saved by 4 ranks, and this job has 5"):
        home.steer()


def test_what_was_decided_must_stand(tmp_path: Path) -> None:
    home = Home(tmp_path).fill(4)
    (config, _) = home.steer()
    config["load_checkpoint"] = "elsewhere"
    with pytest.raises(ConfigError, match="load_checkpoint"):
        config["selector"].check(config)
    with pytest.raises(ConfigError, match="elsewhere"):
        config["selector"].check(config | {"checkpoint": {"load_path": "elsewhere"}})


# -- the newer format -----------------------------------------------------------------------------


def _iteration(home: Home, step: int) -> Path:
    path = home.checkpoints / f"iteration_{step:08d}"
    for kind in ("model", "opt"):
        write(path / f"tiny-{kind}-0000000-0000001.safetensors", state(step, 1))
    (path / "common.json").write_text(json.dumps({"step_num": step}))
    (home.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))
    if home.manifests:
        home.adopt(path, ITERATIONS, step)
    return path


@pytest.mark.parametrize("row", ["truncated in a tensor", "one bit flipped", "empty", "missing"])
@pytest.mark.parametrize("manifests", [True, False])
@pytest.mark.parametrize("section", [True, False])
def test_the_newer_format(tmp_path: Path, row: str, manifests: bool, section: bool) -> None:
    home = Home(tmp_path, 1, manifests=manifests)
    old, new = _iteration(home, 4), _iteration(home, 8)
    ROWS[row](new / "tiny-model-0000000-0000001.safetensors")
    unseen = not manifests and row in ("one bit flipped", "missing")
    request: dict[str, Any] = {"checkpoint": {"prefix": "tiny"}} if section else {"use_legacy_format": False}
    (config,) = home.steer(request)
    expected = new if unseen else old
    assert config["load_checkpoint"] == str(expected)
    assert config["resume_training"] is True
    if section:
        assert config["checkpoint"]["load_path"] == str(expected)
        assert config["checkpoint"]["no_load_optim"] is False
    tracker = (home.checkpoints / "latest_checkpointed_iteration.txt").read_text()
    assert tracker == expected.name[-8:].lstrip("0")


def test_a_first_iteration_that_was_not_finished_is_no_loss(tmp_path: Path) -> None:
    home = Home(tmp_path, 1, manifests=False)
    home.steer({"use_legacy_format": False})
    _iteration(home, 4)
    (home.checkpoints / "latest_checkpointed_iteration.txt").unlink()
    request = {"use_legacy_format": False, "resume_training": True, "load_checkpoint": str(home.checkpoints)}
    (config,) = home.steer(request)
    assert config["selector"].resumed is None
    assert not config["load_checkpoint"]


def test_an_iteration_that_was_not_finished(tmp_path: Path) -> None:
    home = Home(tmp_path, 1, manifests=False)
    old, _ = _iteration(home, 4), _iteration(home, 8)
    (home.checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    (config,) = home.steer({"use_legacy_format": False})
    assert config["load_checkpoint"] == str(old)


# -- plain MindSpore ------------------------------------------------------------------------------


def _plain(directory: Path, ranks: int = 1, *where: tuple[str, str], **given: Any) -> list[Selected | None]:
    """By ModelCheckpoints of these directories and prefixes, of each rank, beside LastGasp(directory)."""
    place = place_of_callback([Path(each) for each, _ in where], [prefix for _, prefix in where]) if where else None
    own: list[tuple[Path, Layout]] = [(directory, LEGACY)]
    replicas, into = given.pop("replicas", None), given.pop("into", lambda path, values: None)
    places = [*own, (directory, PLAIN) if place is None else (place.directory, place.layout)]

    def body(rank: int, gather: Gather) -> Selected | None:
        options = Options(gasp=GaspConfig.resolve(directory, **given))
        place = Place(rank=rank, world_size=ranks, replicas=replicas or data_parallel(ranks), job="x")
        return MindFormersSelector(options, place, gather).choose_plain(places, into)

    return as_ranks(ranks, body)


def test_plain_the_newest_by_content_and_not_by_time(tmp_path: Path) -> None:
    assert _plain(tmp_path) == [None]
    write(tmp_path / "net-3_2.ckpt", state(10, 3))
    write(tmp_path / "net-1_4.ckpt", state(4, 1))  # the newest by its time
    (choice,) = _plain(tmp_path)
    assert choice == Selected(tmp_path / "net-3_2.ckpt", 3, 2, 10, b"")
    corrupt.truncate(tmp_path / "net-3_2.ckpt", 2000)
    (choice,) = _plain(tmp_path)
    assert choice is not None
    assert (choice.path.name, choice.step) == ("net-1_4.ckpt", 4)


def test_plain_breakpoints_count_for_what_they_hold(tmp_path: Path) -> None:
    """MindSpore names them by the step under way, which is not in them."""
    write(tmp_path / "net-1_4.ckpt", state(4, 1))
    write(tmp_path / "net-2_3_breakpoint.ckpt", state(6, 2))
    (choice,) = _plain(tmp_path)
    assert choice == Selected(tmp_path / "net-2_3_breakpoint.ckpt", 2, 3, 6, b"")
    first, second = _plain(tmp_path, 2)
    assert first == second == choice
    for rank in (0, 1):
        write(tmp_path / f"rank_{rank}" / "net-2_4.ckpt", state(8, 2))
    write(tmp_path / "rank_0" / "net-3_1_breakpoint.ckpt", state(9, 3))  # one rank raised
    chosen = _plain(tmp_path, 2)
    assert [c and c.path for c in chosen] == [tmp_path / f"rank_{rank}/net-2_4.ckpt" for rank in (0, 1)]


def test_plain_a_damaged_file_and_its_small_state_move_together(tmp_path: Path) -> None:
    home = Home(tmp_path, 1)
    for step in (4, 8):
        write(tmp_path / f"net-1_{step}.ckpt", state(step, 1))
        (tmp_path / f"net-1_{step}.ckpt.small").write_bytes(encode_aux({0: b"small"}))
        home.adopt(tmp_path / f"net-1_{step}.ckpt", PLAIN, step)
    corrupt.flip_bit(tmp_path / "net-1_8.ckpt", 3000)
    assert _plain(tmp_path) == [Selected(tmp_path / "net-1_4.ckpt", 1, 4, 4, b"small")]
    moved = sorted(path.name for path in (tmp_path / "net-1_8.ckpt.corrupt").iterdir())
    assert moved == ["net-1_8.ckpt", "net-1_8.ckpt.small"]


def test_plain_what_lastgasp_saved_and_what_modelcheckpoint_saved(tmp_path: Path) -> None:
    home = Home(tmp_path, 2, "ckpt")
    name = LegacyName("lastgasp", 2, 1, "ckpt")
    for rank in (0, 1):
        write(tmp_path / name.file(rank), state(5, 2))
        write(tmp_path / f"rank_{rank}" / "net-1_4.ckpt", state(4, 1))
    home.adopt(tmp_path / name.name, LEGACY, 5)
    home.adopt(tmp_path / "net-1_4.ckpt", PLAIN, 4)
    assert [c and (c.path, c.step) for c in _plain(tmp_path, 2)] == [(tmp_path / name.file(rank), 5) for rank in (0, 1)]
    corrupt.flip_bit(tmp_path / name.file(0), 3000)
    chosen = _plain(tmp_path, 2)
    assert [c and (c.path, c.step) for c in chosen] == [(tmp_path / f"rank_{rank}/net-1_4.ckpt", 4) for rank in (0, 1)]
    corrupt.flip_bit(tmp_path / "rank_1/net-1_4.ckpt", 3000)
    with pytest.raises(NoGoodCheckpoint, match=r"rank_1/net-1_4\.ckpt"):
        _plain(tmp_path, 2)


def test_plain_one_file_is_not_for_ranks_that_hold_something_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "net-1_4.ckpt", state(4, 1))
    assert _plain(tmp_path, 2)[1] is not None
    with pytest.raises(NoGoodCheckpoint, match="holds something of its own"):
        _plain(tmp_path, 2, replicas=((0,), (1,)))


def test_plain_what_verifies_and_does_not_load_is_set_aside(tmp_path: Path) -> None:
    """By all ranks: the network has changed since. Nothing is moved before another one has been loaded."""
    home = Home(tmp_path, 2, "ckpt")
    for step in (4, 6, 8):
        for rank in (0, 1):
            write(tmp_path / f"rank_{rank}" / f"net-1_{step}.ckpt", state(step, 1))
        home.adopt(tmp_path / f"net-1_{step}.ckpt", PLAIN, step)

    def only_4(path: Path, values: Any) -> None:
        if "1_4" not in path.name:
            raise RuntimeError("For 'load_param_into_net', fc.weight in the argument 'net' has another shape")

    def none(path: Path, values: Any) -> None:
        raise ValueError("no such network")

    with pytest.raises(NothingLoads, match="no such network"):
        _plain(tmp_path, 2, into=none)
    assert list(tmp_path.glob("*.unfit*")) == []
    chosen = _plain(tmp_path, 2, into=only_4)
    assert [c and c.step for c in chosen] == [4, 4]
    assert sorted(path.name for path in tmp_path.glob("*.unfit")) == ["net-1_6.ckpt.unfit", "net-1_8.ckpt.unfit"]
    assert "another shape" in (tmp_path / "net-1_8.ckpt.unfit.reason.json").read_text()

    def memory(path: Path, values: Any) -> None:
        raise RuntimeError("Device memory is not enough")

    with pytest.raises(RuntimeError, match="memory"):
        _plain(tmp_path, 2, into=memory)


# -- the guides' own layouts ----------------------------------------------------------------------

GUIDES = {
    "pangu": ("rank_{rank}", "pangu{rank}"),
    "resnet": ("out/ckpt_{rank}", "resnet50"),
    "rank 50": ("out/ckpt_{rank}", "resnet{rank}_50"),
    "one directory": ("all", "net{rank}"),
    "numbers alone": ("{rank}", "net"),
    "both": ("out/ckpt_{rank}", "net_rank_{rank}"),
    "by name": ("rank_{rank}", "net"),
}
each_guide = pytest.mark.parametrize("guide", GUIDES)


def _guide(root: Path, guide: str, *steps: int, manifests: bool = False, again: str = "") -> list[tuple[str, str]]:
    """Files of two ranks as the script of that guide writes them; directory and prefix of each rank."""
    where = [(str(root / folder), prefix) for folder, prefix in
             ([part.format(rank=rank) for part in GUIDES[guide]] for rank in (0, 1))]  # fmt: skip
    for step in steps:
        for folder, prefix in where:
            write(Path(folder, f"{prefix}{again}-1_{step}.ckpt"), state(step, 1))
        place = place_of_callback([Path(folder) for folder, _ in where], [prefix for _, prefix in where])
        assert place is not None
        if manifests:
            title = place.directory / place.layout.title(f"{place.prefix}{again}-1_{step}.ckpt")
            Home(root).adopt(title, place.layout, step)
    return where


@each_guide
@pytest.mark.parametrize("manifests", [False, True])
@pytest.mark.parametrize("again", ["", "_1"])
def test_the_files_of_all_ranks_are_one_checkpoint(tmp_path: Path, guide: str, manifests: bool, again: str) -> None:
    where = _guide(tmp_path, guide, 4, 8, manifests=manifests, again=again)
    newest = [Path(folder, f"{prefix}{again}-1_8.ckpt") for folder, prefix in where]
    assert [c and (c.path, c.step) for c in _plain(tmp_path / "gasps", 2, *where)] == [(path, 8) for path in newest]
    corrupt.truncate(newest[1], 1000)
    older = [path.with_name(path.name.replace("_8.", "_4.")) for path in newest]
    assert [c and (c.path, c.step) for c in _plain(tmp_path / "gasps", 2, *where)] == [(path, 4) for path in older]
    assert newest[0].exists() != manifests, "proven damage is moved away, the files of all ranks"


@each_guide
@pytest.mark.parametrize("manifests", [False, True])
def test_a_rank_without_its_files_is_never_a_start_from_scratch(tmp_path: Path, guide: str, manifests: bool) -> None:
    where = _guide(tmp_path, guide, 4, 8, manifests=manifests)
    for step in (4, 8):
        Path(where[1][0], f"{where[1][1]}-1_{step}.ckpt").unlink()
    with pytest.raises(NoGoodCheckpoint):
        _plain(tmp_path / "gasps", 2, *where)
    assert _plain(tmp_path / "gasps", 2, *where, resume="never") == [None, None]


@each_guide
def test_the_commands_find_them(tmp_path: Path, guide: str) -> None:
    where = _guide(tmp_path, guide, 4, 8)
    place = place_of_callback([Path(folder) for folder, _ in where], [prefix for _, prefix in where])
    assert place is not None
    if guide != "one directory":  # from the names alone these are two files for all ranks
        rows = adopt_all(place.directory)
        assert [(row.step, row.state) for row in rows] == [(8, "written"), (4, "written")]
    else:
        _guide(tmp_path, guide, 4, 8, manifests=True)
    report = examine(place.directory)
    assert [(row.step, row.state) for row in report.checkpoints][:2] == [(8, "good"), (4, "good")]
    corrupt.flip_bit(Path(where[1][0], f"{where[1][1]}-1_8.ckpt"), 1000)
    assert [row.state for row in examine(place.directory).checkpoints][:2] == ["damaged", "good"]


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["", "_1", "_12"])
def test_names_there_and_back(again: str) -> None:
    name = LegacyName.of_monitor(f"my_rank_net_rank_7{again}", 3, 2, "ckpt")
    assert name == LegacyName("my_rank_net", 3, 2, "ckpt", again)
    assert name.file(5) == f"rank_5/my_rank_net_rank_5{again}-3_2.ckpt"
    assert LegacyName.parse(name.name) == name
    assert LEGACY.title_of(name.file(5)) == LEGACY.title_of(name.aux) == name.name
    assert layout_of(Path(name.name)) is LEGACY
    assert LegacyName.parse("net-3_2.ckpt") is None
    with pytest.raises(CheckpointError, match="names no rank"):
        LegacyName.of_monitor("net", 1, 1, "ckpt")


def test_small_states_there_and_back() -> None:
    assert decode_aux(encode_aux({1: b"b", 0: b"a"})) == {0: b"a", 1: b"b"}
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode_aux(b"\xc1")


@dataclass
class Loading:
    """What MindFormers' load says of a step: the same on every rank, or on some alone."""

    home: Home
    unfit: tuple[int, ...] = (8,)
    of: tuple[int, ...] = (0, 1)
    error: Exception = field(default_factory=lambda: RuntimeError("another shape"))
    notes: list[str] = field(default_factory=list)
    wanted: tuple[str, ...] = ()

    def start(self, attempt: int = 0, job: str = "job", counters: bool = False) -> list[int]:
        """The step that each rank has loaded.

        Args:
            counters: whether reading step and epoch fails already, long before the load.
        """
        options = Options(gasp=GaspConfig.resolve(self.home.path))

        def body(rank: int, gather: Gather) -> int:
            place = Place(rank=rank, world_size=2, replicas=data_parallel(2), job=job, attempt=attempt)
            selector = MindFormersSelector(options, place, gather, self.notes.append)
            selector.steer({"output_dir": str(self.home.path), "use_parallel": True}, {})
            resumed = selector.resumed or 0

            def call() -> int:
                if resumed in self.unfit and rank in self.of:
                    raise self.error
                return resumed

            if counters:
                selector.read(call)
            return int(selector.load(call, lambda held: refuse_missing(self.wanted, held)))

        return as_ranks(2, body)

    def moved(self) -> list[str]:
        return sorted(path.name for path in self.home.checkpoints.glob("*.unfit"))


@pytest.mark.parametrize("counters", [False, True])
def test_what_mindformers_cannot_load_is_passed_over_by_the_restart(tmp_path: Path, counters: bool) -> None:
    job = Loading(Home(tmp_path).fill(2, 4, 6, 8), unfit=(8, 6))
    for attempt, name in enumerate(("tiny_rank-2_4", "tiny_rank-2_2")):
        with pytest.raises(DoesNotLoad, match=rf"{name}\.safetensors verifies, .*ranks 0-1: .*another shape") as caught:
            job.start(attempt, counters=counters)
        assert caught.value.restart_helps and job.moved() == []
    assert job.start(2, counters=counters) == [4, 4]
    assert job.moved() == ["tiny_rank-2_2.safetensors.unfit", "tiny_rank-2_4.safetensors.unfit"]
    assert "another shape" in (job.home.checkpoints / "tiny_rank-2_4.safetensors.unfit.reason.json").read_text()
    assert any("tiny_rank-2_4" in note and "step 4 was resumed from, and 4 steps are trained again" in note
               for note in job.notes)  # fmt: skip
    assert len(job.notes) == 2 and not (tmp_path / unfit.NAME).exists()


def test_where_mindformers_can_load_none_nothing_is_moved_and_the_next_job_tries_them_all(tmp_path: Path) -> None:
    job = Loading(Home(tmp_path).fill(6, 8), unfit=(6, 8))
    for attempt in (0, 1):
        with pytest.raises(DoesNotLoad):
            job.start(attempt)
    with pytest.raises(NothingLoads, match="2 of them verify; nothing was moved") as caught:
        job.start(2)
    assert not caught.value.restart_helps and "another shape" in cause_of(caught.value) and job.moved() == []
    job.unfit = ()
    assert job.start() == [8, 8] and job.notes == []


@pytest.mark.parametrize("attempt", [0, 1])
def test_what_another_job_could_not_load_is_tried_again(tmp_path: Path, attempt: int) -> None:
    job = Loading(Home(tmp_path).fill(6, 8))
    with pytest.raises(DoesNotLoad):
        job.start()
    job.unfit = ()
    assert job.start(attempt, job="mended") == [8, 8] and job.moved() == []


@pytest.mark.parametrize(
    ("error", "of"), [(RuntimeError("Device memory is not enough"), (0, 1)), (RuntimeError("another shape"), (1,))]
)
def test_what_says_nothing_against_a_checkpoint_is_raised_as_it_is(
    tmp_path: Path, error: Exception, of: tuple[int, ...]
) -> None:
    """By all ranks, but not about the content; about the content, but by one rank."""
    job = Loading(Home(tmp_path).fill(6, 8), error=error, of=of)
    with pytest.raises((RuntimeError, CheckpointError), match=r"memory|another shape") as caught:
        job.start()
    assert not isinstance(caught.value, DoesNotLoad)
    assert not (tmp_path / unfit.NAME).exists() and job.moved() == []


def test_what_lacks_a_parameter_of_this_network_is_not_loaded(tmp_path: Path) -> None:
    """MindFormers would leave it as it was drawn."""
    held = next(iter(state(8, 2)))
    job = Loading(Home(tmp_path).fill(8), unfit=(), wanted=(held,))
    assert job.start() == [8, 8]
    job.wanted = (held, "layers.7.weight")
    with pytest.raises(DoesNotLoad, match=r"another network: 1 parameters are not in it \(layers.7.weight"):
        job.start()


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"job": "job", "refused": 3}'])
def test_a_word_that_cannot_be_read_refuses_nothing(tmp_path: Path, content: bytes) -> None:
    job = Loading(Home(tmp_path).fill(8), unfit=())
    (tmp_path / unfit.NAME).write_bytes(content)
    assert job.start(1) == [8, 8]


def test_output_dir_is_read_as_mindformers_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resume_request_of({"output_dir": "~/out"}, {}).saves == tmp_path / "out/checkpoint"
