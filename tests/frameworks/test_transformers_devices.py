"""Trainer on an accelerator, whose work is queued: what a gasp reads, and what training does not wait for."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import msgspec
import torch

from frameworks.transformers_rig import Breaks, outcome, trainer
from lastgasp.adapter import torch as shared
from lastgasp.testing.faults import InjectedFault
from lastgasp_transformers import LastGasp, losses
from lastgasp_transformers.losses import Found, LossSum, Own, found_in, lost
from lastgasp_transformers.state import Training
from lastgasp_transformers.values import CarriedValues
from support.accelerator import Accelerator

pytestmark = [pytest.mark.usefixtures("restored_environ"), pytest.mark.timeout(300)]
DEVICE = torch.device("cuda:0")


def wrapped(around: Any, call: Any) -> Any:
    """A method that is called by another one."""
    return lambda *args, **more: around(call, *args, **more)


def test_a_gasp_waits_for_all_that_is_copied_at_the_end_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last mark of a step is behind the last copy."""
    calls = list[str]()

    def noted(call: Any, *args: Any, **more: Any) -> Any:
        found = call(*args, **more)
        calls.append(call.__name__)
        return found

    for cls, name in ((shared.QueuedWork, "mark"), (shared.MovingParameters, "closes"), (CarriedValues, "take"),
                      (shared.TorchState, "snapshot"), (Training, "completed")):  # fmt: skip
        monkeypatch.setattr(cls, name, wrapped(noted, getattr(cls, name)))
    with pytest.raises(InjectedFault):
        trainer(tmp_path, Breaks(2), LastGasp()).train()
    ends = [at for at, name in enumerate(calls) if name == "completed"]
    assert len(ends) == 2
    assert {"closes", "take", "snapshot"} <= set(calls)
    assert [calls[at - 1] for at in ends] == ["mark"] * 2


def test_what_an_evaluation_has_copied_is_waited_for_and_nothing_else() -> None:
    """Where nothing was copied there is no mark: it would stand behind work that may never be done."""
    module, marks = torch.nn.Linear(1, 1), list[int]()
    moving = shared.MovingParameters(module, lambda _: None, lambda: marks.append(1))
    training: Any = SimpleNamespace(_moving=moving)
    moving.closes(1)
    Training.evaluates(training)
    assert marks == []
    with torch.no_grad():
        module.weight.mul_(2.0)
    moving.in_aside()
    moving.closes(2)
    for _ in range(2):
        Training.evaluates(training)
    assert marks == [1]


def test_values_are_read_beside_the_work_of_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they come behind a collective that never ends."""
    module, streams = Accelerator(), list[object]()
    queued = shared.QueuedWork([DEVICE], module)
    values = CarriedValues.__new__(CarriedValues)
    here = {"queued": queued, "_step": 3, "roots": [1], "_values": 1, "_began": 1, "_start": 1}
    vars(values).update(here, _place=SimpleNamespace(world_size=2))

    def changed(*_: object) -> bytes:
        streams.append(module.current_stream())
        return b"values"

    monkeypatch.setattr("lastgasp_transformers.values.changed", changed)
    queued.mark()
    module.training.give(threading.Event().is_set)  # a collective with a dead peer
    assert values._of(3) == b"values"
    assert streams == module.made


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> tuple[Accelerator, LossSum]:
    """The sum of losses on a stand-in for a device."""
    monkeypatch.setattr(losses, "_page_locked", lambda dtype: torch.zeros((), dtype=dtype))
    module = Accelerator()
    return module, LossSum(DEVICE, module)


def test_the_loss_is_not_waited_for(queued: tuple[Accelerator, LossSum]) -> None:
    module, found = queued
    total, done = torch.tensor(1.5), threading.Event()
    module.training.give(done.is_set)
    found.ahead(total, torch.tensor(0.25), True, 3)
    assert found.told() is None
    done.set()
    assert found.told() == 1.75
    total += 0.25
    found.ask(total)
    assert found.told() == found.of(total) == 1.75


def test_a_trainer_comes_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queued: tuple[Accelerator, LossSum]
) -> None:
    plain = trainer(tmp_path / "plain")
    expected = outcome(plain, plain.train().training_loss)
    monkeypatch.setattr("lastgasp_transformers.state.LossSum", lambda _: queued[1])
    one = trainer(tmp_path / "ours", Breaks(5), LastGasp())
    with pytest.raises(InjectedFault):
        one.train()
    found = outcome(one, one.train().training_loss)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("opened", [True, False], ids=["updates", "raises before"])
def test_the_record_of_a_step_under_way_gets_its_loss_when_the_device_has_told_it(
    opened: bool, queued: tuple[Accelerator, LossSum]
) -> None:
    """The gate waits for all that was queued; a rank that raises before it asks once more."""
    (module, sums), done, recorder = queued, threading.Event(), shared.AuxRecorder()
    total = torch.tensor(1.0)
    args = SimpleNamespace(logging_nan_inf_filter=True)
    state = SimpleNamespace(sync_gradients=True)
    fake = SimpleNamespace(_tr_loss=total, args=args, _globalstep_last_logged=4, current_flos=7.0,
                           accelerator=SimpleNamespace(gradient_state=state),
                           lr_scheduler=SimpleNamespace(state_dict=dict),
                           state=SimpleNamespace(log_history=[]))  # fmt: skip
    training = Training.__new__(Training)
    vars(training).update(
        trainer=fake, step=5, phase="", recorder=recorder, _losses=sums, _loss=0.75, _ahead=False, _lacking=False,
        _place=SimpleNamespace(world_size=2), _data=SimpleNamespace(position=None), _gate=done.set,
        _moving=SimpleNamespace(opens=lambda: None), seats=None,
    )  # fmt: skip

    def recorded() -> Found:
        return found_in(shared.extra_of(recorder.read(6) or b""))

    module.training.give(done.is_set)
    training.before_backward(torch.tensor(0.25))
    assert (recorded().loss, recorded().lacking) == (0.75, True)
    total += 0.25
    if opened:
        training._before_update()
    else:
        done.set()
        assert training.settle("a fault") == ""
    assert (recorded().loss, recorded().lacking) == (1.25, False)
    recorder.close()


@pytest.mark.parametrize("own", [0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("filtered", [True, False])
def test_on_a_device_the_loss_has_the_same_bits(
    own: float, filtered: bool, queued: tuple[Accelerator, LossSum]
) -> None:
    on_cpu, total = LossSum(torch.device("cpu")), torch.tensor(0.7)
    for one in (queued[1], on_cpu):
        one.ahead(total, torch.tensor(own), filtered, 3)
    assert msgspec.msgpack.encode(queued[1].told()) == msgspec.msgpack.encode(on_cpu.told())


def test_a_sum_that_was_changed_since_is_read_anew(queued: tuple[Accelerator, LossSum]) -> None:
    for found in (queued[1], LossSum(torch.device("cpu"))):
        total = torch.tensor(1.0)
        found.ask(total)
        total += 1.0
        assert found.of(total) == 2.0
        assert found.of(torch.tensor(5.0)) == 5.0


def test_a_loss_that_the_device_has_told_nobody_is_noted() -> None:
    recorder = shared.AuxRecorder()
    aux = dict[int, bytes]()
    for rank, own in enumerate((Own(1.0, 2.0), Found(1.0, 2.0, lacking=True))):
        recorder.extra = msgspec.msgpack.encode(own)
        recorder.capture(4, settled=False)
        aux[rank] = recorder.read(4) or b""
    recorder.close()
    assert "of ranks [1] was lost" in lost(aux)
    assert lost({0: aux[0], 2: b""}) == ""
    assert found_in(shared.extra_of(aux[0])).loss == 1.0
