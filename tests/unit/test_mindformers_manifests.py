"""Manifests for what MindFormers and MindSpore save by themselves, by ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastgasp.adapter import ManifestWriter
from lastgasp.adapter.mindspore import FORMAT, ITERATIONS, LEGACY, PLAIN, decode_aux
from lastgasp.checkpoint import candidates, verify
from lastgasp.errors import ControlError
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.ports import Gather, Layout
from lastgasp.topology import Place, data_parallel
from lastgasp_mindformers.listing import catalog_of
from lastgasp_mindformers.manifests import AUX_SUFFIX, Manifests
from lastgasp_mindformers.monitors import searched
from support.checkpoint_kit import as_ranks
from support.mindspore_files import state, write


class ModelCheckpoint:
    """The parts of MindSpore's that are read here. Saves what `save` is given."""

    __module__ = "mindspore.train.callback._checkpoint"

    def __init__(self, prefix: str, directory: Path, again: int = 0, steps: int = 2) -> None:
        self._exception_prefix = prefix
        self._prefix = f"{prefix}_{again}" if again else prefix
        self._directory = str(directory)
        self._last_triggered_step = 0
        self._latest_ckpt_file_name = ""
        self._config = SimpleNamespace(save_checkpoint_steps=steps)

    def save(self, step: int, name: str, ext: str = "ckpt", *, later: bool = False) -> Path:
        path = Path(self._directory) / f"{self._prefix}-{name}.{ext}"
        self._last_triggered_step, self._latest_ckpt_file_name = step, str(path)
        return path if later else write(path, state(step, 1))


class CheckpointMonitor(ModelCheckpoint):
    """MindFormers'."""

    __module__ = "mindformers.core.callback.callback"

    def __init__(self, rank: int, home: Path, again: int = 0, legacy: bool = True) -> None:
        super().__init__(f"tiny_rank_{rank}", home / "checkpoint" / f"rank_{rank}", again)
        self.use_legacy_format, self.directory = legacy, str(home / "checkpoint")
        self.common_info = SimpleNamespace(step_num=0)

    def save_iteration(self, step: int) -> Path:
        self._last_triggered_step = self.common_info.step_num = step
        path = Path(self.directory) / f"iteration_{step:08d}"
        for kind in ("model", "opt"):
            write(path / f"tiny-{kind}-0000000-0000001.safetensors", state(step, 1))
        (path / "common.json").write_text("{}")
        return path


class Ranks:
    """Runs a body on each rank, with its manifests."""

    def __init__(self, number: int = 2, aux: bool = True) -> None:
        self.number, self.aux = number, aux
        self.statuses = [RankStatus() for _ in range(number)]

    def run(self, body: Callable[[int, Manifests], Any]) -> list[Any]:
        def each(rank: int, gather: Gather) -> Any:
            place = Place(rank=rank, world_size=self.number, replicas=data_parallel(self.number), job="job")
            aux = (lambda step: f"{rank} at {step}".encode()) if self.aux else None
            return body(rank, Manifests(ManifestWriter(FORMAT, place), gather, self.statuses[rank], aux=aux))

        return as_ranks(self.number, each)


def _only(directory: Path, layout: Layout) -> Path:
    (candidate,) = candidates([directory], layout)
    assert candidate.problem is None
    assert verify(candidate.path, layout).ok
    return candidate.path


def test_the_files_of_all_ranks_and_their_random_state(tmp_path: Path) -> None:
    ranks = Ranks()

    def body(rank: int, manifests: Manifests) -> None:
        monitor = CheckpointMonitor(rank, tmp_path)
        manifests.bind([object(), monitor])
        manifests.step_end(1)
        monitor.save(2, "1_2", "safetensors")
        manifests.step_end(2)
        manifests.step_end(3)

    ranks.run(body)
    path = _only(tmp_path / "checkpoint", LEGACY)
    assert path.name == "tiny_rank-1_2.safetensors"
    assert sorted(LEGACY.files(path)) == [
        "rank_0/tiny_rank_0-1_2.safetensors", "rank_1/tiny_rank_1-1_2.safetensors", f"{path.name}.small",
    ]  # fmt: skip
    assert decode_aux((tmp_path / "checkpoint" / f"{path.name}.small").read_bytes()) == {0: b"0 at 2", 1: b"1 at 2"}
    (candidate,) = candidates([tmp_path / "checkpoint"], LEGACY)
    assert candidate.manifest is not None
    assert (candidate.manifest.kind, candidate.manifest.step, candidate.manifest.world.world_size) == ("periodic", 2, 2)
    assert [status.durable for status in ranks.statuses] == [2, 2]


def test_the_number_in_the_names_becomes_the_same_on_all_ranks(tmp_path: Path) -> None:
    monitors = [CheckpointMonitor(0, tmp_path, again=2), CheckpointMonitor(1, tmp_path)]

    def body(rank: int, manifests: Manifests) -> None:
        manifests.bind([monitors[rank]])
        monitors[rank].save(2, "1_2", "safetensors")
        manifests.step_end(2)

    Ranks().run(body)
    assert [monitor._prefix for monitor in monitors] == ["tiny_rank_0_2", "tiny_rank_1_2"]
    assert _only(tmp_path / "checkpoint", LEGACY).name == "tiny_rank_2-1_2.safetensors"


def test_saves_in_the_background_wait_until_all_ranks_have_theirs(tmp_path: Path) -> None:
    def body(rank: int, manifests: Manifests) -> list[int]:
        monitor, seen = CheckpointMonitor(rank, tmp_path), []
        manifests.bind([monitor])
        path = monitor.save(2, "1_2", "safetensors", later=True)
        for step in (2, 3, 4):
            if step == 3 + rank:
                write(path, state(2, 1))
            manifests.step_end(step)
            seen.append(len(list((tmp_path / "checkpoint").glob("*.manifest.json"))))
        return seen

    assert Ranks().run(body) == [[0, 0, 1]] * 2
    assert _only(tmp_path / "checkpoint", LEGACY)


def test_what_is_still_under_way_at_the_end_is_there_then(tmp_path: Path) -> None:
    def body(rank: int, manifests: Manifests) -> None:
        monitor = CheckpointMonitor(rank, tmp_path)
        manifests.bind([monitor])
        path = monitor.save(2, "1_2", "safetensors", later=True)
        manifests.step_end(2)
        write(path, state(2, 1))
        manifests.step_end(2, last=True)

    Ranks().run(body)
    assert _only(tmp_path / "checkpoint", LEGACY)


def test_what_keep_checkpoint_max_removed_leaves_nothing(tmp_path: Path) -> None:
    def body(rank: int, manifests: Manifests) -> None:
        monitor = CheckpointMonitor(rank, tmp_path)
        manifests.bind([monitor])
        for step in (1, 2):
            path = monitor.save(step, f"1_{step}", "safetensors")
            manifests.step_end(step)
        path.with_name(path.name.replace("1_2", "1_1")).unlink()
        monitor.save(3, "1_3", "safetensors")
        manifests.step_end(3)

    Ranks().run(body)
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir() if not path.name.startswith("."))
    kept = [f"tiny_rank-1_{step}.safetensors" for step in (2, 3)]
    assert names == sorted(["rank_0", "rank_1", *(n + end for n in kept for end in (".manifest.json", ".small"))])


def test_ranks_that_save_under_different_names_get_no_manifest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks()

    def body(rank: int, manifests: Manifests) -> None:
        monitor = CheckpointMonitor(rank, tmp_path)
        manifests.bind([monitor])
        monitor.save(2, f"1_{rank + 1}", "safetensors")
        manifests.step_end(2)

    ranks.run(body)
    assert "save under different names" in caplog.text
    assert list((tmp_path / "checkpoint").glob("*.manifest.json")) == []
    assert [status.durable for status in ranks.statuses] == [0, 0]


def test_a_rank_that_is_gone_costs_the_manifest_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone, asked = False, list[str]()

    def gather(tag: str, payload: bytes) -> list[bytes]:
        asked.append(tag)
        if gone:
            raise ControlError("rank 1 is gone")
        return [payload, payload]

    place = Place(rank=0, world_size=2, replicas=data_parallel(2), job="job")
    manifests, monitor = Manifests(ManifestWriter(FORMAT, place), gather, RankStatus()), CheckpointMonitor(0, tmp_path)
    manifests.bind([monitor])
    gone = True
    monitor.save(2, "1_2", "safetensors")
    manifests.step_end(2)
    assert "tiny_rank-1_2.safetensors got no manifest and will not be trusted: rank 1 is gone" in caplog.text
    times = len(asked)
    manifests.step_end(3)
    assert len(asked) == times  # the others' wait is over for good


def test_the_newer_format(tmp_path: Path) -> None:
    def body(rank: int, manifests: Manifests) -> None:
        monitor = CheckpointMonitor(rank, tmp_path, legacy=False)
        manifests.bind([monitor])
        monitor.save_iteration(4)
        manifests.step_end(4)  # the tracker is written when the save is over
        assert not list((tmp_path / "checkpoint").glob("*.manifest.json"))
        (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("4")
        manifests.step_end(5)

    Ranks(1).run(body)
    path = _only(tmp_path / "checkpoint", ITERATIONS)
    assert decode_aux((path / AUX_SUFFIX).read_bytes()) == {0: b"0 at 4"}


def test_plain_modelcheckpoints(tmp_path: Path) -> None:
    def body(rank: int, manifests: Manifests) -> None:
        monitor = ModelCheckpoint("net", tmp_path / f"rank_{rank}")
        manifests.bind([monitor])
        monitor.save(2, "1_2")
        manifests.step_end(2)

    Ranks().run(body)
    path = _only(tmp_path, PLAIN)
    assert sorted(PLAIN.files(path)) == ["net-1_2.ckpt.small", "rank_0/net-1_2.ckpt", "rank_1/net-1_2.ckpt"]


GUIDES = {
    "pangu": ("rank_{rank}", "pangu{rank}", "pangu{rank}-1_2.ckpt"),
    "resnet": ("ckpt_{rank}", "resnet50", "ckpt_{rank}+resnet50-1_2.ckpt"),
    "one directory": ("", "net{rank}", "+net{rank}-1_2.ckpt"),
    "named as MindFormers does": ("ckpt_{rank}", "net_rank_{rank}", "ckpt_{rank}+net_rank_{rank}-1_2.ckpt"),
}


@pytest.mark.parametrize("again", [0, 1])
@pytest.mark.parametrize("guide", GUIDES)
def test_the_guides_layouts(tmp_path: Path, guide: str, again: int) -> None:
    folder, prefix, title = GUIDES[guide]
    ranks, finished = Ranks(), list[int]()

    def body(rank: int, manifests: Manifests) -> Any:
        manifests._finished = lambda: finished.append(rank)
        monitor = ModelCheckpoint(prefix.format(rank=rank), tmp_path / folder.format(rank=rank), again)
        looked_at, _ = searched([monitor], rank, manifests._gather)
        manifests.bind([monitor])
        monitor.save(2, "1_2")
        manifests.step_end(2)
        return looked_at

    first, second = ranks.run(body)
    ((directory, layout), *_) = first
    assert (first, directory) == (second, tmp_path)
    path = _only(directory, layout)
    assert path.name == title.replace("-", "_1-" if again else "-")
    assert len(layout.files(path)) == 3, "two ranks and their random state"
    assert [status.durable for status in ranks.statuses] == [2, 2]
    assert sorted(finished) == [0, 1]


def test_files_that_nobody_can_put_together_get_no_manifest_and_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Directories with a time stamp that each rank takes by itself."""

    def body(rank: int, manifests: Manifests) -> Any:
        both = [ModelCheckpoint("net", tmp_path / ("one", "other")[rank]), ModelCheckpoint("b", tmp_path / "b")]
        found = searched(both, rank, manifests._gather)
        manifests.bind(both)
        for monitor in both:
            monitor.save(2, "1_2")
        manifests.step_end(2)
        return found

    first, second = Ranks().run(body)
    assert first == second
    places, apart = first
    assert {directory for directory, _ in places} == {tmp_path / "b"}
    assert apart == {(str(tmp_path / name), "net") for name in ("one", "other")}
    assert [path.parent.name for path in tmp_path.glob("*/*.manifest.json")] == ["b"]
    assert caplog.text.count("under other names on each rank") == 1 and "one/net" in caplog.text


def test_all_ranks_look_where_only_one_saves(tmp_path: Path) -> None:
    def body(rank: int, manifests: Manifests) -> Any:
        monitors = [ModelCheckpoint("net", tmp_path / "ckpts")] if rank == 1 else []
        return searched(monitors, rank, manifests._gather)[0]

    first, second = Ranks().run(body)
    assert first == second == [(tmp_path / "ckpts", PLAIN), (tmp_path / "ckpts", LEGACY)]


def test_a_directory_that_a_function_decides_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, manifests: Manifests) -> Any:
        monitor = ModelCheckpoint("net", tmp_path)
        del monitor._directory
        return searched([monitor], rank, manifests._gather)[0]

    assert Ranks().run(body) == [[], []]
    assert "is a function" in caplog.text


@pytest.mark.parametrize("partial", [{"saved_network": object()}, {"remove_redundancy": True}])
def test_what_is_no_checkpoint_is_left_alone(
    tmp_path: Path, partial: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def body(rank: int, manifests: Manifests) -> Any:
        monitor = ModelCheckpoint("net", tmp_path / f"rank_{rank}")
        vars(monitor._config).update(partial)
        looked_at = searched([monitor], rank, manifests._gather)
        manifests.bind([monitor])
        monitor.save(2, "1_2")
        manifests.step_end(2)
        return looked_at

    (where, apart), other = Ranks().run(body)
    assert other == (where, apart) and where == []
    assert caplog.text.count("saves no checkpoint") == 1
    assert not list(tmp_path.glob("*.manifest.json"))
    job, places = Place(rank=0, world_size=2, replicas=data_parallel(2)), [(tmp_path, PLAIN)]
    assert [c.path.name for c in catalog_of(places, job, True).all()] == ["net-1_2.ckpt"]
    found = catalog_of(places, job, True, apart)
    assert (found.all(), found.unknown()) == ([], {})


def test_only_rank_0_saves(tmp_path: Path) -> None:
    ranks = Ranks()

    def body(rank: int, manifests: Manifests) -> None:
        monitor = ModelCheckpoint("net", tmp_path)
        manifests.bind([monitor] if rank == 0 else [])
        if rank == 0:
            monitor.save(2, "1_2")
        manifests.step_end(2)

    ranks.run(body)
    assert sorted(PLAIN.files(_only(tmp_path, PLAIN))) == ["net-1_2.ckpt"]
    assert [status.durable for status in ranks.statuses] == [2, 0]


def test_saves_by_the_clock_are_not_the_same_on_all_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, manifests: Manifests) -> None:
        monitor = ModelCheckpoint("net", tmp_path / f"rank_{rank}", steps=0)
        manifests.bind([monitor])
        if rank == 0:
            monitor.save(2, "1_2")
        manifests.step_end(2)

    Ranks().run(body)
    assert "save_checkpoint_seconds" in caplog.text


def test_a_name_that_says_nothing_gets_no_manifest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, manifests: Manifests) -> None:
        monitor = ModelCheckpoint("net", tmp_path)
        manifests.bind([monitor])
        monitor._last_triggered_step, monitor._latest_ckpt_file_name = 2, str(write(tmp_path / "x.ckpt", state(2, 1)))
        manifests.step_end(2)

    Ranks(1).run(body)
    assert "does not contain epoch and step" in caplog.text
