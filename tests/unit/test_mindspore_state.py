"""What the control thread says about a rank whose step is one compiled graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy
import pytest
import xxhash

from lastgasp import _clock
from lastgasp.adapter import ManifestWriter
from lastgasp.adapter.mindspore import FORMAT, LEGACY, LegacyName
from lastgasp.checkpoint import verify
from lastgasp.config import GaspConfig
from lastgasp.errors import Moved, NotSaveable
from lastgasp.gasp.messages import Release
from lastgasp.gasp.rank_status import RankStatus, Released
from lastgasp.topology import Place, data_parallel
from lastgasp_mindformers.aux_state import AuxRecorder, AuxState, Numbers, Statistic, loss_scale
from lastgasp_mindformers.frozen import Frozen
from lastgasp_mindformers.source import MindSporeSource
from lastgasp_mindformers.state import PATIENCE, SETTLE, MindSporeState
from lastgasp_mindformers.targets import Target, iteration_target, legacy_target

FINISH = 10.0
SAVED = Release(recovery=1, ending="saved", step=4, path="p", reason="")


def numbers(step: int) -> Numbers:
    """Of a step, eight to an epoch."""
    return Numbers(step=step, epoch=(step - 1) // 8 + 1, within=(step - 1) % 8 + 1)


class Gate:
    """Counters that a test sets."""

    def __init__(self) -> None:
        self.seen = True
        self.counters = (4, 4)

    def read(self) -> tuple[int, int]:
        """As the test says."""
        return self.counters

    def undo(self) -> None:
        """Nothing."""


class Small:
    """Which steps were captured."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.frozen, self.accumulated, self.still = dict[str, Any](), dict[str, Any](), dict[str, Any]()

    def capture(self, numbers: Numbers) -> None:
        """Noted."""
        self.steps.append(numbers.step)

    def read(self, step: int) -> bytes:
        """None is kept."""
        return b""


class Rank:
    """A rank at step 4, in the graph of step 5."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, readable: bool = True) -> None:
        self.now, self.status, self.gate, self.aux = 100.0, RankStatus(), Gate(), Small()
        monkeypatch.setattr(_clock, "monotonic", lambda: self.now)
        self.state = MindSporeState(
            self.gate,
            cast(AuxRecorder, self.aux),
            self.status,
            before_update=self.status.before_update,
            step_completed=self.status.step_completed,
            finish=FINISH,
            readable=readable,
        )
        self.state.begin(numbers(4))
        self.status.step = 4
        self.state.step_begin(numbers(5))

    def look(self, after: float = 0.0) -> tuple[int, bool]:
        """What the control thread finds in a recovery, some time later."""
        if not self.status.held:
            self.status.hold(1.0)
        self.now += after
        self.status.look()
        return self.status.step, not self.status.consistent


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    """In the graph."""
    return Rank(monkeypatch)


def test_a_rank_in_python_is_where_it_says(rank: Rank) -> None:
    rank.gate.counters = (5, 5)
    rank.state.step_end(numbers(5))
    assert rank.look() == (5, False)
    assert rank.aux.steps == [4, 5]


def test_a_rank_that_waits_for_a_dead_peer_holds_its_last_step(rank: Rank) -> None:
    rank.status.hold(1.0)
    assert rank.look() == (4, True)
    assert rank.look(after=2 * SETTLE) == (4, False)
    assert rank.state.stands_on(4) == ""


def test_an_update_is_waited_for(rank: Rank) -> None:
    rank.gate.counters = (5, 4)
    rank.look()
    assert rank.look(after=FINISH) == (4, True)
    assert "has begun" in rank.state.stands_on(4)


def test_a_graph_that_is_done_but_stuck_behind_counts(rank: Rank) -> None:
    """In a collective behind the update, or in the callback of somebody else."""
    rank.gate.counters = (5, 5)
    assert rank.look() == (4, True)
    assert rank.look(after=2 * SETTLE) == (5, False)
    rank.status.release(SAVED)
    with pytest.raises(Released):  # it came out after all, and others must not save what the gasp saves
        rank.state.step_end(numbers(5), saves=True)
    assert rank.aux.steps == [4, 5]


def test_a_graph_that_is_done_is_waited_for_where_all_ranks_run(rank: Rank) -> None:
    """It is late, not stuck: behind it the framework may save this very step, and other ranks do so already."""
    rank.gate.counters = (5, 5)
    rank.status.hold(1.0, all_run=True)
    assert rank.look(after=2 * SETTLE) == (4, True)
    rank.state.step_end(numbers(5), saves=True)
    assert rank.look() == (5, True)
    rank.state.others_end()
    assert rank.look() == (5, False)


def test_a_graph_that_ends_after_all_stops_before_anybody_saves_its_step(rank: Rank) -> None:
    """Step 4 was reported as what this rank holds; a gasp of step 5 follows, under the name of a save of step 5."""
    rank.status.hold(1.0)
    assert rank.look(after=2 * SETTLE) == (4, False)
    rank.gate.counters = (5, 5)
    rank.status.release(SAVED)
    original = rank.state.stop_if_taken

    def stop(saves: bool) -> None:
        assert rank.look() == (5, False)
        original(saves)

    rank.state.stop_if_taken = stop  # type: ignore[method-assign]
    with pytest.raises(Released):
        rank.state.step_end(numbers(5), saves=True)
    assert rank.look() == (5, False)


def test_a_rank_that_was_told_to_continue_does_so(rank: Rank) -> None:
    rank.status.hold(1.0)
    assert rank.look(after=2 * SETTLE) == (4, False)
    rank.status.hold(1.0, target=6)
    rank.gate.counters = (5, 5)
    rank.state.step_end(numbers(5), saves=True)
    assert rank.look() == (5, True), "others may save step 5, as ever"
    rank.state.others_end()
    rank.state.step_begin(numbers(6))
    assert rank.look() == (5, True)


def test_a_step_that_is_being_completed_is_waited_for(rank: Rank) -> None:
    """The control thread looks in the middle of it, and does not wait."""
    rank.gate.counters = (5, 5)
    seen: list[tuple[int, bool]] = []
    rank.aux.capture = lambda numbers: seen.append(in_a_thread(rank.look))  # type: ignore[method-assign]
    rank.state.step_end(numbers(5))
    assert seen == [(4, True)]


def in_a_thread(call: Callable[[], tuple[int, bool]]) -> tuple[int, bool]:
    """What it returns there."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(30.0)


def test_where_all_ranks_continue_the_step_is_waited_for(rank: Rank) -> None:
    rank.status.hold(1.0, all_run=True)
    rank.look()
    assert rank.look(after=FINISH * PATIENCE - 0.1) == (4, True)
    assert rank.look(after=0.2) == (4, False)


@pytest.mark.parametrize("why", ["no counters", "a device"])
def test_without_counters_nothing_is_known(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    rank = Rank(monkeypatch, readable=why != "a device")
    rank.gate.seen = why != "no counters"
    rank.look()
    assert rank.look(after=FINISH) == (4, True)
    assert "it is unknown" in rank.state.stands_on(4)
    assert "it is unknown" in rank.state.settle()


@pytest.mark.parametrize(("counters", "why", "step"), [((4, 4), "", 4), ((5, 4), "between two", 4), ((5, 5), "", 5)])
def test_an_exception_out_of_the_graph(rank: Rank, counters: tuple[int, int], why: str, step: int) -> None:
    rank.gate.counters = counters
    told = rank.state.settle()
    assert why in told and bool(why) == bool(told)
    assert rank.status.step == step


def test_a_step_that_is_to_be_done_again_is_not_saved(rank: Rank) -> None:
    rank.gate.counters = (5, 5)
    rank.state.step_end(numbers(5))
    rank.state.reject()
    assert rank.state.settle() == "step 5 is to be done again"


def test_no_graph_runs_behind_a_closed_gate(rank: Rank) -> None:
    rank.state.step_end(numbers(5))
    rank.status.hold(1.0)
    rank.status.release(SAVED)
    with pytest.raises(Released):
        rank.state.step_begin(numbers(6))
    assert rank.look() == (5, False)


def test_a_look_right_before_the_gate_does_not_open_it(rank: Rank) -> None:
    """The control thread takes a rank for one in its graph that is only about to ask whether it may begin it."""
    rank.gate.counters = (5, 5)
    rank.state.step_end(numbers(5))
    rank.status.hold(1.0, all_run=True)
    rank.status.release(SAVED)
    original = rank.state._before_update
    looks: list[tuple[int, bool]] = []

    def before_update() -> None:
        looks.append(rank.look())
        original()

    rank.state._before_update = before_update
    with pytest.raises(Released):
        rank.state.step_begin(numbers(6))
    assert looks == [(5, True)], "the control thread did not come in between"


@pytest.mark.parametrize("readable", [True, False])
def test_a_rank_that_is_parked_before_the_graph_holds_its_step_at_once(
    monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """Also where its counters could not be read, and where all ranks run: nothing runs that might go on."""
    rank = Rank(monkeypatch, readable=readable)
    rank.gate.counters = (5, 5)
    rank.state.step_end(numbers(5))
    rank.status.hold(30.0, all_run=True)
    with coming_to_the_gate(rank) as thread:
        assert rank.look() == (5, False)
        assert rank.state.stands_on(5) == ""
        rank.status.hold(30.0, target=6, all_run=True)
        assert rank.status.inside
        thread.join(30.0)
        assert rank.look() == (5, True), "it is in the graph of step 6 now"
        rank.gate.counters = (6, 6)
        rank.state.step_end(numbers(6))
        assert rank.look() == (6, False)


@contextmanager
def coming_to_the_gate(rank: Rank) -> Iterator[threading.Thread]:
    """Another thread is the training thread, and is parked."""

    def train() -> None:
        with suppress(Released):
            rank.state.step_begin(numbers(6))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        while not rank.status.at_gate:
            assert thread.is_alive()
        yield thread
    finally:
        rank.status.release(SAVED)
        thread.join(30.0)


def test_each_recovery_has_the_full_time(rank: Rank) -> None:
    """An order to go on further counts from its own beginning."""
    rank.status.hold(1.0)
    assert rank.look(after=2 * SETTLE) == (4, False)
    rank.status.hold(1.0)
    assert rank.look() == (4, True)
    assert rank.look(after=2 * SETTLE) == (4, False)


def test_a_step_that_ends_while_it_is_looked_at_is_not_the_old_one(rank: Rank) -> None:
    """The graph has changed parameters, and the training thread says so between reading the counters and comparing."""

    def read() -> tuple[int, int]:
        rank.state.step_end(numbers(5))
        return 5, 5

    def overtaken() -> tuple[int, int]:
        rank.gate.read, rank.gate.counters = original, (5, 5)  # type: ignore[method-assign]
        return read()

    original = rank.gate.read
    rank.gate.read = overtaken  # type: ignore[method-assign]
    assert "has begun" in rank.state.stands_on(4)
    assert rank.state.stands_on(5) == ""


def test_the_step_that_the_graph_has_made_is_not_the_one_that_comes_behind(rank: Rank) -> None:
    """The training thread comes to the next gate while the control thread looks."""
    rank.status.hold(1.0)
    rank.status.release(SAVED)
    rank.look()
    rank.now += 2 * SETTLE
    original = rank.gate.read

    def overtaken() -> tuple[int, int]:
        rank.gate.read, rank.gate.counters = original, (5, 5)  # type: ignore[method-assign]
        rank.state._in_graph = True
        rank.state._next = numbers(6)  # as `step_begin` behind a completed step 5, before it parks
        return 5, 5

    rank.gate.read = overtaken  # type: ignore[method-assign]
    rank.status.look()
    assert rank.status.step == 5, "step 6 has not run"


def test_a_save_of_the_framework_is_waited_for(rank: Rank) -> None:
    """It has the name that the gasp has, and MindSpore removes what it finds under it."""
    rank.gate.counters = (5, 5)
    rank.state.step_end(numbers(5), saves=True)
    rank.status.hold(1.0)
    assert rank.look() == (5, True)
    rank.state.others_end()
    rank.status.release(SAVED)
    with pytest.raises(Released):  # the gate is not passed
        rank.state.step_begin(numbers(6))
    assert rank.look() == (5, False)


def test_a_callback_that_does_not_end_is_not_waited_for_to_the_end(rank: Rank) -> None:
    """It may wait for a rank that is gone."""
    rank.gate.counters = (5, 5)
    rank.state.step_end(numbers(5), saves=True)
    assert rank.look() == (5, True)
    assert rank.look(after=FINISH * PATIENCE) == (5, False)
    rank.status.release(SAVED)
    with pytest.raises(Released):  # before it makes a manifest for what the gasp has put in its place
        rank.state.stop_if_taken(True)


# -- the source ------------------------------------------------------------------------------------


class Native:
    """Writes the step into the file; `during` happens then."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.written: list[Path] = []
        self.during: Any = lambda: None

    def target(self, numbers: Numbers, ranks: Any) -> Target:
        """As MindFormers would."""
        return legacy_target(LegacyName("tiny", numbers.epoch, numbers.within, "ckpt"), ranks)

    def write(self, folder: Path, files: Any, numbers: Numbers, statistics: Any) -> None:
        """The step."""
        self.written.append(folder / files[0])
        self.written[-1].write_text(str(numbers.step))
        self.during()


def source_of(rank: Rank, directory: Path, replicas: Any = None) -> tuple[MindSporeSource, Native]:
    """A source for rank 0 of two."""
    native = Native(directory)
    place = Place(rank=0, world_size=2, replicas=replicas or data_parallel(2), job="job")
    return MindSporeSource(rank.state, native, ManifestWriter(FORMAT, place), GaspConfig(directory=directory)), native


def test_a_survivor_writes_the_files_of_all_ranks_once(rank: Rank, tmp_path: Path) -> None:
    source, native = source_of(rank, tmp_path)
    saved = source.save(4, {}, "because")
    source.publish(saved, {0: saved.part})
    assert len(native.written) == 1, "equal contents share their bytes"
    files = LEGACY.files(Path(saved.path))
    assert sorted(files) == [
        "rank_0/tiny_rank_0-1_4.ckpt",
        "rank_1/tiny_rank_1-1_4.ckpt",
        "tiny_rank-1_4.ckpt.small",
    ]
    assert (tmp_path / "rank_1" / "meta.json").exists()
    assert not [path for path in tmp_path.iterdir() if ".tmp" in path.name]


class Param:
    """A parameter of MindSpore's, by what is asked of it."""

    dtype = "Float32"

    def __init__(self) -> None:
        self.value = numpy.zeros(4, numpy.float32)

    def asnumpy(self) -> Any:
        """The live values."""
        return self.value


def train(frozen: Frozen, graph: Param | None = None, callback: Param | None = None) -> list[str]:
    """Two steps; what the graph of each changes, and what a callback behind it."""
    told = []
    for _ in range(2):
        frozen.step_begin()
        if graph is not None:
            graph.value += 1
        told += frozen.step_end()
        if callback is not None:
            callback.value += 1
    return told


def test_what_the_forward_pass_changes_is_told_from_what_is_frozen_and_what_callbacks_change() -> None:
    still, target, average = Param(), Param(), Param()
    frozen = Frozen({"still": still, "target": target, "average": average}, {})
    (told,) = train(frozen, target, average)
    assert told.startswith("the forward pass changes target, too large")
    assert frozen.changed() == "target", "wherever it is read in a graph"
    still.value += 1
    assert frozen.changed() == "still, target", "late, as a target network that is copied each hundredth step"


def test_accumulated_gradients_that_are_kept_are_named() -> None:
    param = Param()
    assert train(Frozen({}, {"accu_grads.w": param})) == []
    (told, _) = train(Frozen({}, {"accu_grads.w": param}), param)
    assert told.startswith("accu_grads.w: gradients are accumulated")


def test_a_large_parameter_that_the_graph_has_changed_is_not_saved_as_of_the_step_before(
    rank: Rank, tmp_path: Path
) -> None:
    source, _ = source_of(rank, tmp_path)
    target = Param()
    rank.state.frozen = Frozen({"target": target}, {})
    saved = source.save(4, {}, "because")
    source.discard(saved)
    target.value += 1
    with pytest.raises(NotSaveable, match="may have changed target already"):
        source.save(4, {}, "because")
    rank.gate.counters = (5, 5)
    rank.state.step_end(numbers(5))
    source.discard(source.save(5, {}, "because"))
    assert not list(tmp_path.iterdir())


def aux_state(still: bytes, *names: str) -> bytes:
    """What a rank has captured: one zero of each name."""
    return msgspec.msgpack.encode(
        AuxState(
            version=1,
            numbers=numbers(4),
            python=b"",
            numpy=("MT19937", b"", 0, 0, 0.0),
            generator=(0, 0),
            statistics=tuple(Statistic(name, "<f4", (1,), bytes(4)) for name in names),
            still=still,
        )
    )


def test_constants_that_differ_from_rank_to_rank_are_noted_and_do_not_prevent_the_save(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    native, place = Native(tmp_path), Place(rank=0, world_size=3, replicas=data_parallel(3), job="job")
    config = GaspConfig(directory=tmp_path)
    source = MindSporeSource(rank.state, native, ManifestWriter(FORMAT, place), config, notes.append)
    monkeypatch.setattr(source, "capture", lambda step: aux_state(b"mine", "mean"))
    table = Param()
    rank.state.frozen = Frozen({}, {}, {"table": (table, xxhash.xxh3_128_digest(bytes(16)))})
    source.discard(source.save(4, {1: aux_state(b"mine", "mean")}, "because"))
    assert not notes
    theirs = {1: aux_state(b"theirs", "mean"), 2: b""}
    source.discard(source.save(4, theirs, "because"))
    [note] = notes
    assert note.startswith("rank 1 began with other values than rank 0")
    with pytest.raises(NotSaveable, match="what changes on rank 1"):
        source.save(4, {1: aux_state(b"theirs", "mean", "table")}, "because")
    table.value += 1
    with pytest.raises(NotSaveable, match="that have changed: table"):
        source.save(4, theirs, "because")
    assert not list(tmp_path.iterdir()) and len(notes) == 1


def test_a_rank_with_its_own_shard_writes_only_that(rank: Rank, tmp_path: Path) -> None:
    source, native = source_of(rank, tmp_path, replicas=((0,), (1,)))
    source.save(4, {}, "because")
    assert [path.name for path in native.written] == ["tiny_rank_0-1_4.ckpt"]


def test_shards_of_several_ranks_become_one_checkpoint(rank: Rank, tmp_path: Path) -> None:
    """Rank 0 publishes: its own files, those of rank 1, one file of auxiliary states, and one manifest of all."""
    shards = ((0,), (1,))
    native, config = Native(tmp_path), GaspConfig(directory=tmp_path)
    places = [Place(rank=one, world_size=2, replicas=shards, job="job") for one in (0, 1)]
    first, second = (MindSporeSource(rank.state, native, ManifestWriter(FORMAT, p), config) for p in places)
    saved = [source.save(4, {}, "because") for source in (first, second)]
    assert first.publish(saved[0], {one: result.part for one, result in enumerate(saved)}) == ""
    path = Path(saved[0].path)
    assert sorted(LEGACY.files(path)) == [
        "rank_0/tiny_rank_0-1_4.ckpt",
        "rank_1/tiny_rank_1-1_4.ckpt",
        "tiny_rank-1_4.ckpt.small",
    ]
    assert verify(path, LEGACY).ok
    assert not [left for left in tmp_path.iterdir() if ".tmp" in left.name]


@pytest.mark.parametrize("counters", [(5, 4), (5, 5)])
def test_a_save_that_the_graph_overtakes_is_thrown_away(rank: Rank, tmp_path: Path, counters: tuple[int, int]) -> None:
    source, native = source_of(rank, tmp_path)
    native.during = lambda: setattr(rank.gate, "counters", counters)
    with pytest.raises(Moved):
        source.save(4, {}, "because")
    assert list(tmp_path.iterdir()) == []


def test_another_step_than_the_one_that_is_there_is_refused(rank: Rank, tmp_path: Path) -> None:
    source, _ = source_of(rank, tmp_path)
    with pytest.raises(NotSaveable, match="not at 7"):
        source.save(7, {}, "because")
    with pytest.raises(Moved):
        source.save(3, {}, "because")


def test_a_directory_checkpoint_is_published_completely(rank: Rank, tmp_path: Path) -> None:
    class Iterations(Native):
        """MindFormers' newer format, in a job of one process."""

        def target(self, numbers: Numbers, ranks: Any) -> Target:
            """A directory."""
            return iteration_target(numbers.step, "tiny", ["model", "opt"])

        def write(self, folder: Path, files: Any, numbers: Numbers, statistics: Any) -> None:
            """Each file."""
            for name in files:
                (folder / name).write_text(name)

    place = Place(rank=0, world_size=1, replicas=data_parallel(1), job="job")
    writer = ManifestWriter(FORMAT, place)
    source = MindSporeSource(rank.state, Iterations(tmp_path), writer, GaspConfig(directory=tmp_path))
    saved = source.save(4, {}, "because")
    source.publish(saved, {0: saved.part})
    names = {path.name for path in (tmp_path / "iteration_00000004").iterdir()}
    assert names == {
        "common.json",
        "lastgasp.small",
        "tiny-model-0000000-0000001.safetensors",
        "tiny-opt-0000000-0000001.safetensors",
    }
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert not [path for path in tmp_path.iterdir() if ".tmp" in path.name]


@pytest.mark.parametrize(
    ("names", "told", "expected"),
    [
        ((), None, None),
        ((), 8.0, 8.0),
        (("scale_sense",), 8.0, 64.0),
        (("network.scale_sense",), None, 64.0),
        (("my_scale_sense", "mean"), None, None),
    ],
)
def test_the_loss_scale_is_the_one_that_was_captured(
    names: tuple[str, ...], told: float | None, expected: float | None
) -> None:
    """Not what the network reports at the end of a step: that is lost if the control thread sees the end."""
    statistics = {name: numpy.array([64.0], numpy.float32) for name in names}
    assert loss_scale(Numbers(step=4, epoch=1, within=4, loss_scale=told), statistics) == expected
