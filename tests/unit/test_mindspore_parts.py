"""Small parts of the MindSpore plugin that need no MindSpore: encodings, names, marks, what an exception says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy
import pytest

from lastgasp.adapter.mindspore import LEGACY, LegacyName
from lastgasp_mindformers.aux_state import VERSION, AuxState, Numbers, Statistic, decode
from lastgasp_mindformers.data import UNSEEDED, changed, described, not_repeated, steps_of_epoch
from lastgasp_mindformers.exits import cause_of, is_success, kind_of, verdict_of
from lastgasp_mindformers.marks import marked_elsewhere
from lastgasp_mindformers.monitors import forgetful, is_partial
from lastgasp_mindformers.targets import iteration_target, legacy_target


def aux(version: int = VERSION) -> AuxState:
    """A auxiliary state with one statistic."""
    mean = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    return AuxState(
        version=version,
        numbers=Numbers(step=11, epoch=2, within=3, loss_scale=1024.0),
        python=b"p",
        numpy=("MT19937", b"k", 1, 0, 0.0),
        generator=(5, 6),
        statistics=(Statistic("norm.moving_mean", mean.dtype.str, mean.shape, mean.tobytes()),),
    )


def test_an_auxiliary_state_comes_back() -> None:
    state = decode(msgspec.msgpack.encode(aux()))
    assert state == aux()
    (mean,) = state.statistics
    array = mean.array()
    assert (array.dtype, array.tolist()) == (numpy.float32, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    array[0, 0] = 7.0  # it can be written, and is a copy
    assert mean.array()[0, 0] == 0.0


@pytest.mark.parametrize("data", [b"", b"\x00", msgspec.msgpack.encode(aux(version=VERSION + 1))])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="auxiliary state"):
        decode(data)


def test_a_state_of_before_the_data_were_described_is_read() -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(aux()))
    assert decode(msgspec.msgpack.encode(fields[:7])).data == ""


class Stage:
    """As a stage of MindSpore's pipelines: it is made of others."""

    def __init__(self, *children: Stage, size: int = 8) -> None:
        self.children, self._size = list(children), size

    def get_batch_size(self) -> int:
        """Batched once, at the end."""
        return self._size


class Source(Stage):
    """The first one."""


def begun(batches: int = 40, **options: Any) -> SimpleNamespace:
    """The parameters of callbacks."""
    return SimpleNamespace(batch_num=batches, train_dataset=Stage(Source(), **options))


def test_data_that_have_changed_are_reported_and_not_refused() -> None:
    here = described(begun())
    assert here == "40 batches of 8 (Stage of Source)"
    assert changed(here, described(begun())) == ""
    for other in (begun(41), begun(size=4), SimpleNamespace(batch_num=40, train_dataset=Stage(Stage(Source())))):
        assert here in changed(described(other), here) and described(other) in changed(described(other), here)


def test_what_a_resume_does_not_repeat_of_the_data() -> None:
    class RandomSampler:
        """As MindSpore's in name."""

        __module__ = "mindspore.dataset.samplers"

    class SequentialSampler:
        """Another."""

        __module__ = "mindspore.dataset.samplers"

    class RandomCrop:
        """An operation."""

    class ShuffleDataset(Stage):
        """A stage."""

    def told(*stages: Stage, seeded: bool = True, fast: bool = True, within: int = 1) -> str:
        return " ".join(not_repeated(Stage(*stages), seeded=seeded, fast=fast, within=within))

    drawn, cropped, plain = Source(), Stage(), Source()
    vars(drawn)["sampler"], vars(cropped)["operations"] = RandomSampler(), [RandomCrop()]
    vars(plain).update(sampler=SequentialSampler(), shuffle_flag=5)  # the sampler decides
    assert told(drawn, seeded=False) == UNSEEDED == told(ShuffleDataset(plain), seeded=False)
    assert told(drawn) == told(drawn, seeded=False, within=0) == told(plain, seeded=False) == ""
    assert "augmentations" in told(cropped, within=0) and told(cropped, fast=False) == ""
    assert not_repeated(object(), seeded=False, fast=True, within=1) == []


@pytest.mark.parametrize(
    ("sinks", "sink", "device", "steps"),
    [(True, 10, "Ascend", 10), (True, -1, "Ascend", 40), (False, 10, "Ascend", 40), (True, 10, "CPU", 40)],
)
def test_an_epoch_of_a_sink_size_has_that_many_steps(sinks: bool, sink: int, device: str, steps: int) -> None:
    given = {"train_dataset": SimpleNamespace(get_dataset_size=lambda: 40)}
    assert steps_of_epoch(given | {"dataset_sink_mode": sinks, "sink_size": sink}, device) == steps
    assert steps_of_epoch(given, device) == 40


def test_data_that_say_nothing_are_not_compared() -> None:
    unknown = described(SimpleNamespace(batch_num=40, train_dataset=object()))
    assert unknown == "" == changed("", "x") == changed("x", unknown)


def test_callbacks_that_begin_anew_at_a_resume_are_named() -> None:
    def named(kind: str) -> Any:
        return type(kind, (), {"__module__": "mindspore.train.callback"})()

    assert forgetful([named("LossMonitor"), MFLossMonitor()]) == ""
    told = forgetful([named("ReduceLROnPlateau"), named("EarlyStopping")])
    assert told.startswith("EarlyStopping and ReduceLROnPlateau begin anew")


@pytest.mark.parametrize("made_by", ["mindspore", "mindformers"])
def test_what_is_encrypted_cannot_be_resumed_from(made_by: str) -> None:
    kind = "ModelCheckpoint" if made_by == "mindspore" else "CheckpointMonitor"
    callback = type(kind, (), {"__module__": f"{made_by}.callback"})()
    for key in (None, b"0123456789ABCDEF"):
        callback._config = SimpleNamespace(saved_network=None, remove_redundancy=False, enc_key=key)
        assert is_partial(callback) is (key is not None and made_by == "mindspore")


def test_a_legacy_checkpoint_is_complete_over_all_ranks() -> None:
    where = legacy_target(LegacyName("tiny", 2, 3, "safetensors", "_1"), range(2))
    assert where.files == {
        0: ("rank_0/tiny_rank_0_1-2_3.safetensors",),
        1: ("rank_1/tiny_rank_1_1-2_3.safetensors",),
    }
    assert set(where.markers) == {"rank_0/meta.json", "rank_1/meta.json"}
    assert {LEGACY.title_of(path) for files in where.files.values() for path in files} == {where.name}


def test_a_directory_checkpoint_holds_everything() -> None:
    where = iteration_target(11, None, ["model"])
    assert where.files == {
        0: ("iteration_00000011/model-0000000-0000001.safetensors", "iteration_00000011/common.json")
    }
    assert where.aux.startswith("iteration_00000011/")
    assert where.markers == {"latest_checkpointed_iteration.txt": b"11"}


class MFLossMonitor:
    """Named as MindFormers' own."""


@pytest.mark.parametrize(
    ("preloaded", "monitor", "elsewhere"),
    [("/x/libmspti.so", True, True), ("/x/libmspti.so", False, False), ("", True, False), ("libtaskd.so", True, False)],
)
def test_there_is_one_series_of_steps(preloaded: str, monitor: bool, elsewhere: bool) -> None:
    assert marked_elsewhere([MFLossMonitor()] if monitor else [], preloaded) is elsewhere


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "exception"),
        (SystemExit(3), "exit"),
        (KeyboardInterrupt(), "interrupt"),
        (RuntimeError("HCCL function error: EI0006 timeout"), "peer"),
        (RuntimeError("out of memory"), "exception"),
    ],
)
def test_what_an_exception_says(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind
    assert cause_of(error).startswith(type(error).__name__)
    assert not is_success(error) and is_success(SystemExit(0))


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (ValueError("There is nan in global_norm with value nan, terminate training."), True),  # 1.9.0
        (ValueError("loss is nan, local_norm is None, global_norm is inf, terminate training."), True),  # 1.6.0
        (ValueError("In epoch: 1 step: 9, loss is NAN or INF, training process cannot continue, terminating training."),
         True),
        (ValueError("Current global norm 9 of step 7 has been 2 consecutive times greater than threshold 1, stop "
                    "training..."), True),
        (ValueError("Current global norm 9 of step 6 has been 1 consecutive times greater than threshold: 1"), False),
        (RuntimeError("TREError occurred......"), False),
        (ValueError("loss is nan"), False),
        (RuntimeError("terminate training."), False),
        (ValueError(), False),
    ],
)
def test_a_verdict_on_a_result(error: BaseException, ends: bool) -> None:
    found = verdict_of(error)
    assert (found is not None) == ends
    assert found is None or (found.code, str(error) in found.why) == (1, True)
