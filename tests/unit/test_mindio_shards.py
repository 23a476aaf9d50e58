"""The drop-in's decisions: which shards there are, what an exception means, what is refused, what is loaded."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import distributed_c10d

from lastgasp.adapter import (
    ConfigError,
    GaspConfig,
    ManifestWriter,
    NoGoodCheckpoint,
    NotSaveable,
    Place,
    RankStatus,
    data_parallel,
)
from lastgasp.adapter.checkpoint import DirectoryLayout, has_manifest
from lastgasp.testing.corrupt import flip_bit
from lastgasp_mindio import checks, exchange, manifests, reload, settings
from lastgasp_mindio.again import info_of, pairs_of
from lastgasp_mindio.callgroups import CallGroups
from lastgasp_mindio.classify import Classifier
from lastgasp_mindio.enums import RepairType, ReportState
from lastgasp_mindio.handlers import Handlers
from lastgasp_mindio.shards import groups_of, replicas_of, together_of
from lastgasp_mindio.source import Saver

LAYOUT = DirectoryLayout("iter_*")


def entry(ranks: list[int], count: int) -> dict[str, Any]:
    """One type's, as a rank reports it."""
    return {"rank_list": ranks, "replica_cnt": count, "replica_shift": 0}


def test_halves_of_a_data_parallel_group() -> None:
    """Position p and p + G/R hold the same shard (mindio_tft.md §8)."""
    groups = groups_of([[entry([3, 1, 0, 2], 2)]] * 4)
    assert replicas_of(groups) == ((0, 2), (1, 3))
    assert together_of(groups, 3) == {0: (0, 1)}


def test_groups_of_two_types() -> None:
    """Tensor parallel 2 for dense layers, experts over all: each rank is in one group of each type."""
    dense = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    infos = [[entry(dense[rank], 2), entry([0, 1, 2, 3], 2)] for rank in range(4)]
    groups = groups_of(infos)
    assert [(group.kind, group.shards) for group in groups] == [
        (0, ((0, 2),)), (0, ((1, 3),)), (1, ((0, 2), (1, 3))),
    ]  # fmt: skip
    assert together_of(groups, 3) == {1: (1,), 2: (2, 3)}


@pytest.mark.parametrize(
    ("infos", "why"),
    [
        ([[entry([0, 1], 2)], None], "was not called on rank 1"),
        ([[entry([0, 1], 2)], [entry([0, 1], 1)]], "different numbers of replicas"),
        ([[entry([0], 1)], [entry([0, 1], 2)]], "do not hold each rank once"),
        ([[entry([0, 1], 2)], [entry([0, 1], 2)] * 2], "different numbers of optimizer types"),
    ],
)
def test_reports_that_contradict_one_another(infos: list[Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        groups_of(infos)


def raising(text: str) -> str:
    """A handler with a mistake."""
    raise KeyError(text)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("FORCE STOP. again", "RS_NORMAL"),
        ("UCE ERROR before FORCE STOP", "RS_UCE"),
        ("HBM MULTI BIT ECC, time us=5", "RS_UCE_CORRUPTED"),
        ("SUSPECT REMOTE ERROR", "RS_HCCL_FAILED"),
        ("PRECISION ERROR in step 4", "RS_RETRY"),
        ("PRECISION ERROR that is none", "RS_UNKNOWN"),
        ("A LINK", "RS_HCCL_FAILED"),
        ("NAMES A STATE", "RS_UNKNOWN"),
        ("NO SUCH STATE", "RS_UNKNOWN"),
        ("MISTAKE", "RS_UNKNOWN"),
        ("anything else", "RS_UNKNOWN"),
    ],
)
def test_what_an_exception_means(text: str, state: str) -> None:
    """A handler returns a pattern, whose state counts, or "OTHER"."""
    classifier = Classifier()
    for pattern, named, handle in (
        ("PRECISION", "RS_RETRY", lambda text: "OTHER" if "none" in text else "PRECISION"),
        ("A LINK", "RS_RETRY", lambda _: "UB LINK ERROR"),
        ("NAMES A STATE", "RS_RETRY", lambda _: "RS_RETRY"),
        ("NO SUCH STATE", "?", lambda _: "NO SUCH STATE"),
        ("MISTAKE", "RS_RETRY", raising),
    ):
        classifier.register(pattern, named, handle)
    assert classifier.state_of(RuntimeError(text)).name == state
    assert classifier.state_of(ValueError(text)) is ReportState.RS_UNKNOWN


def test_the_last_registration_of_a_pattern_counts_at_its_old_place() -> None:
    classifier = Classifier()
    for pattern, named in (("UCE ERROR", "RS_RETRY"), ("MINE", "RS_RETRY"), ("MINE", "RS_HCCL_FAILED")):
        classifier.register(pattern, named, partial(str.format, pattern))
    for text, state in (("MINE", "RS_HCCL_FAILED"), ("MINE, FORCE STOP, UCE ERROR", "RS_RETRY")):
        assert classifier.state_of(RuntimeError(text)).name == state


@pytest.mark.parametrize(
    "info",
    [
        [], {}, [{}], [entry([], 1)], [entry([1], 1)], [entry([0, 1], 3)], [entry([0, 1, 2], 2)], [entry([0, 0], 1)],
    ],
)  # fmt: skip
def test_replica_information_that_is_refused(info: Any) -> None:
    with pytest.raises(ConfigError):
        checks.replica_info(0, info)


def test_types_are_those_of_the_binding() -> None:
    checks.strict(number=(True, int))
    for value, kind in ((1, bool), (1.0, int), (ReportState.RS_UCE, int), (b"", str)):
        with pytest.raises(TypeError, match="is a"):
            checks.strict(value=(value, kind))


# -- what is loaded ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with dumps of steps 3 and 5, and a periodic save of step 4 without a manifest."""
    monkeypatch.setenv("LASTGASP_DIR", str(tmp_path))
    writer = ManifestWriter("mindio", Place(rank=0, world_size=1, replicas=data_parallel(1)))
    for step in (3, 4, 5):
        dump(tmp_path, step)
        if step != 4:
            assert manifests.seal(tmp_path, LAYOUT, step, writer) == (tmp_path / f"iter_000000{step}", "")
    (tmp_path / reload.TRACKER).write_text("5")
    return tmp_path


def dump(folder: Path, step: int, ending: str = "") -> Path:
    """What a save handler leaves."""
    path = folder / f"iter_{step:07d}{ending}"
    path.mkdir()
    (path / "model.pt").write_bytes(bytes(range(256)) * step)
    return path


def test_what_is_good_stays(folder: Path) -> None:
    reload.verify_newest()
    assert (folder / reload.TRACKER).read_text() == "5"
    assert (folder / "iter_0000005").is_dir()


def test_what_is_damaged_is_moved_away_and_the_tracker_names_another(folder: Path) -> None:
    flip_bit(folder / "iter_0000005/model.pt", 100)
    reload.verify_newest()
    assert (folder / "iter_0000005.corrupt").is_dir()
    assert (folder / reload.TRACKER).read_text() == "4"


def test_where_only_a_periodic_save_is_left_the_tracker_names_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 5):
        flip_bit(folder / f"iter_000000{step}/model.pt", 100)
    reload.verify_newest()
    assert (folder / reload.TRACKER).read_text() == "4"
    assert "cannot be verified" in caplog.text
    reload.verify_newest()
    assert (folder / reload.TRACKER).read_text() == "4"


@pytest.mark.parametrize("ending", ["_tmp", ".tmp"])
def test_an_unfinished_dump_is_none_that_is_left(ending: str, folder: Path) -> None:
    """MindSpeed-LLM's temporary name, which the save handler of a rank that was killed has left."""
    dump(folder, 12, ending)
    flip_bit(folder / "iter_0000005/model.pt", 100)
    reload.verify_newest()
    assert (folder / reload.TRACKER).read_text() == "4"
    shutil.rmtree(folder / "iter_0000004")
    flip_bit(folder / "iter_0000003/model.pt", 100)
    with pytest.raises(NoGoodCheckpoint):
        reload.verify_newest()


def test_names_of_a_users_own_layout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in ("iter_*_all", ".pt"):
        monkeypatch.setenv(settings.LAYOUT, layout)
        end = layout.rpartition("*")[2]
        names = (f"iter_7{end}", f"iter_7_tmp{end}", f"iter_latest{end}")
        assert [reload._finished(folder / name, settings.layout()) for name in names] == [True, False, True], layout
        (folder / names[1]).mkdir()
        assert manifests.expected(folder, settings.layout(), 7) == folder / names[0], "behind the rename"
    assert manifests.expected(folder, LAYOUT, 4) == folder / "iter_0000004"
    assert manifests.expected(folder, LAYOUT, 8) == folder


def test_where_all_are_damaged_the_job_does_not_start(folder: Path) -> None:
    shutil.rmtree(folder / "iter_0000004")
    for step in (3, 5):
        flip_bit(folder / f"iter_000000{step}/model.pt", 100)
    with pytest.raises(NoGoodCheckpoint, match="iter_0000003"):
        reload.verify_newest()


def test_what_cannot_be_read_in_time_is_not_verified_and_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks wait for rank 0 to make the process group, and not for ever."""
    writer = ManifestWriter("mindio", Place(rank=0, world_size=1, replicas=data_parallel(1)))
    path = dump(folder, 7)
    (path / "optim.pt").write_bytes(bytes(100))
    manifests.seal(folder, LAYOUT, 7, writer)
    flip_bit(path / "optim.pt", 50)
    monkeypatch.setattr(reload, "LIMIT", -1.0)
    reload.verify_newest()
    assert path.is_dir() and f"{path} is not verified: 1792 of 1892 bytes" in caplog.text
    monkeypatch.undo()
    monkeypatch.setenv("LASTGASP_DIR", str(folder))
    reload.verify_newest()
    assert not path.exists()


def test_with_resume_never_nothing_is_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP_RESUME", "never")
    flip_bit(folder / "iter_0000005/model.pt", 100)
    reload.verify_newest()
    assert (folder / "iter_0000005").is_dir()


@pytest.mark.parametrize(
    ("attempt", "step", "since", "job", "said"),
    [
        (1, 2, 0, "local", True), (1, 5, 0, "local", False), (1, 2, 1 << 62, "local", False), (1, 2, 0, "x", False),
        (0, 2, 1 << 62, "x", True), (0, 5, 0, "local", False), (0, 6, 0, "local", False),
    ],
)  # fmt: skip
def test_a_job_that_begins_with_less_than_was_saved(
    attempt: int, step: int, since: int, job: str, said: bool, folder: Path
) -> None:
    """A restart is asked about dumps of its own job alone: the directory may hold newer ones of an abandoned run."""
    place = Place(rank=0, world_size=1, replicas=data_parallel(1), attempt=attempt, job=job, since_ns=since)
    text = reload.passed_over(step, place)
    assert bool(text) == said
    if said:
        assert f"began with step 2 although step 5 was saved to {folder / 'iter_0000005'}: 3 steps" in text


def test_with_resume_never_a_start_is_meant_so_and_a_restart_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTGASP_RESUME", "never")
    assert not reload.passed_over(0, Place(rank=0, world_size=1, replicas=data_parallel(1)))
    assert reload.passed_over(0, Place(rank=0, world_size=1, replicas=data_parallel(1), attempt=1))


def test_a_dump_that_fits_no_layout_is_said(tmp_path: Path) -> None:
    writer = ManifestWriter("mindio", Place(rank=0, world_size=1, replicas=data_parallel(1)))
    path, why = manifests.seal(tmp_path, LAYOUT, 7, writer)
    assert path is None
    assert "nothing in" in why and "iter_*" in why


def test_a_name_with_an_ending_is_not_the_checkpoint(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    dump(folder, 5, ".tmp")
    assert manifests.found(folder, LAYOUT, 5) == folder / "iter_0000005"
    with caplog.at_level(logging.INFO, "lastgasp"):
        reload.verify_newest()
    assert "iter_0000005 is verified" in caplog.text
    assert not has_manifest(folder / "iter_0000005.tmp", LAYOUT)


# -- a dump that is made again ------------------------------------------------------------------------


def test_a_checkpoint_of_the_same_step_makes_room(folder: Path) -> None:
    """Only for a dump that lies beside it; and it comes back where the rename handler fails."""
    with manifests.room_for(folder, LAYOUT, 4):
        assert (folder / "iter_0000004").is_dir()
    dump(folder, 4, ".tmp")
    with pytest.raises(OSError), manifests.room_for(folder, LAYOUT, 4):  # noqa: PT012
        assert not (folder / "iter_0000004").exists()
        raise OSError("the handler")
    assert (folder / "iter_0000004").is_dir()
    with manifests.room_for(folder, LAYOUT, 4):
        (folder / "iter_0000004.tmp").rename(folder / "iter_0000004")
    assert sorted(path.name for path in folder.glob("*iter_0000004*")) == [".iter_0000004.aside-1", "iter_0000004"]


def test_each_call_for_the_same_ranks_has_a_name_of_its_own() -> None:
    """The first one has torch's own; other ranks count by themselves. In a store of an earlier incarnation none has."""
    groups, found = CallGroups(), []
    for savers in (((0, 1),), ((2, 1),), ((0, 1),)):
        with groups.calling(groups.ordered(savers)):
            found.append(distributed_c10d._process_group_name([0, 1], use_hashed_name=True))
    assert found[0] == found[1] and found[2].endswith("-call0-1")
    later = CallGroups(2)
    with later.calling(later.ordered(((0, 1),))):
        found.append(distributed_c10d._process_group_name([0, 1], use_hashed_name=True))
        other = distributed_c10d._process_group_name([1, 2], use_hashed_name=True)
    assert found[3] == found[2].replace("call0-1", "call2-0") and other != found[3] and other.endswith("-call2-0")


def saver_of(folder: Path, handlers: Handlers) -> Saver:
    """Of a job's only rank."""
    config = GaspConfig.resolve(folder, finish_timeout=0.5, save_timeout=60)
    writer = ManifestWriter("mindio", Place(rank=0, world_size=1, replicas=data_parallel(1)))
    return Saver(0, groups_of([[entry([0], 1)]]), (0,), handlers, config, LAYOUT, writer, RankStatus())


@pytest.mark.parametrize(("broken", "cleaned"), [("clean", 1), ("clean", None), ("stop", 0)])
def test_a_rank_that_is_not_clean_saves_at_no_later_order(
    broken: str, cleaned: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine orders a save that failed once more; another holder is asked then."""
    called: list[str] = []
    handlers = Handlers()

    def note(name: str, result: int | None) -> int | None:
        called.append(name)
        if broken == name == "stop":
            raise ZeroDivisionError
        return result

    for name, result in (("save_ckpt", None), ("stop", None), ("clean", cleaned)):
        handlers.register(name, lambda *_, name=name, result=result: note(name, result), None)
    monkeypatch.setenv(settings.STOP_CLEAN, "1")
    saver = saver_of(tmp_path, handlers)
    saver.parked.set()
    for _ in range(2):
        with pytest.raises((NotSaveable, ZeroDivisionError)):
            saver.save_together(4, ((0,),), "")
    assert called == (["stop"] if broken == "stop" else ["stop", "clean"])


def test_a_call_that_waits_for_a_rank_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    """Its thread is inside of torch's rendezvous, which no stop ends: another holder is to save, and soon."""
    store, inside = HashStore(), threading.Event()

    def save(*_: Any) -> None:
        inside.set()
        with contextlib.suppress(Exception):
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=4))

    handlers, stops = Handlers(), []
    handlers.register("save_ckpt", save, None)
    handlers.register("stop", lambda *_: stops.append(1), None)
    saver = saver_of(tmp_path, handlers)
    saver.stopped = True
    first = threading.Thread(target=saver.save_together, args=(1, ((0,),), ""))
    first.start()
    assert inside.wait(30)
    with pytest.raises(NotSaveable, match="waits for a rank that is gone"):
        saver.save_together(1, ((0,),), "")
    first.join()
    assert stops == [1]


@pytest.mark.parametrize(
    ("absent", "why"), [(None, ""), (1, "rank 1 did not come to its first update"), (0, "rank 0 did not come")]
)
def test_all_ranks_know_of_all_or_who_did_not_come(
    absent: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that comes later, too."""
    monkeypatch.setattr(exchange, "WAIT", 60.0 if absent is None else 0.3)  # nobody is late who comes
    monkeypatch.setattr(exchange, "MARGIN", 0.3 if absent == 0 else 60.0)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def ask(rank: int) -> Any:
        store = TCPStore("127.0.0.1", server.port, is_master=False)
        return json.loads(exchange._agreed(store, [entry([0, 1, 2], 3)], rank, 3))

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(ask, [rank for rank in range(3) if rank != absent]))
    if absent is not None:
        found.append(ask(absent))
    assert all(one == found[0] for one in found)
    assert found[0] == [[entry([0, 1, 2], 3)]] * 3 if not why else why in found[0]


# -- in place ------------------------------------------------------------------------------------------


def test_who_sends_a_shard_to_whom() -> None:
    """The next holder that has it, round the group; and each rank is told of its own pairs alone."""
    groups = groups_of([[entry([0, 1, 2, 3, 4, 5], 3), entry([n - n % 2, n - n % 2 + 1], 2)] for n in range(6)])
    pairs = pairs_of(groups, (2, 5))
    assert pairs == [(0, 4, 2), (0, 1, 5), (1, 3, 2), (1, 4, 5)]
    assert info_of(4, pairs, RepairType.RT_SEND) == {
        "type": [0, 1], "repair_type": 0, "src": [4, 4], "dst": [2, 5], "rank_list": [1, 2, 3, 4, 5]
    }  # fmt: skip
    with pytest.raises(ValueError, match="no rank holds the shard of rank 0"):
        pairs_of(groups, (0, 2, 4))


@pytest.mark.parametrize(
    ("retry", "recover", "asked", "found"),
    [
        (True, True, "", "auto"), (True, False, "", "retry"), (False, True, "", "replace"), (False, False, "", ""),
        (False, False, "auto", ""), (True, True, "restart", "restart"), (True, True, "retry", "retry"),
        (False, True, "retry", ""), (False, False, "save", "save"),
    ],
)  # fmt: skip
def test_what_may_be_answered_in_place(
    retry: bool, recover: bool, asked: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTGASP_RECOVERY", asked)
    assert settings.recovery(retry, recover, first=True) == found
    assert settings.recovery(retry, recover, first=False) == {"auto": "later", "replace": ""}.get(found, found)
