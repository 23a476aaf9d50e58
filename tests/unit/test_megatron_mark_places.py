"""MegatronMarks on stand-in modules: what happens where a place is missing, when something raises, and afterwards."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

from torch.distributed import distributed_c10d  # noqa: E402

from lastgasp.deferred_source import DeferredSource  # noqa: E402
from lastgasp.errors import NotSaveable  # noqa: E402
from lastgasp.steps import bits  # noqa: E402
from lastgasp.steps.marks import Marks  # noqa: E402
from lastgasp_megatron.communication import MegatronCommunication  # noqa: E402
from lastgasp_megatron.marks import MegatronMarks  # noqa: E402
from support.ranges import named, seen  # noqa: E402

SCHEDULES, TRAINING = "megatron.core.pipeline_parallel.schedules", "megatron.training.training"
RERUN = "megatron.core.rerun_state_machine"


class RerunDataIterator:
    """As Megatron's: Python looks `__next__` up in the class."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


class Loop:
    """A training of one micro-batch that calls what Megatron's modules hold."""

    def __init__(self, iterator: RerunDataIterator) -> None:
        self.iterator = iterator
        self.optimizer = SimpleNamespace(step=lambda: (True, 0.0, 0))

    def train_step(self) -> None:
        schedules, training = sys.modules[SCHEDULES], sys.modules[TRAINING]
        schedules.forward_step(self.iterator)
        schedules.backward_step()
        training.finalize_model_grads()
        self.optimizer.step()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Stand-ins of those modules of Megatron's that are marked."""
    found = {name: ModuleType(name) for name in (SCHEDULES, TRAINING, RERUN)}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    vars(found[SCHEDULES]).update(forward_step=lambda iterator: next(iterator), backward_step=lambda: None)
    vars(found[TRAINING]).update(finalize_model_grads=lambda: None)
    kind = type("RerunDataIterator", (RerunDataIterator,), {"__next__": RerunDataIterator.__next__})
    vars(found[RERUN]).update(RerunDataIterator=kind)
    return found


@pytest.fixture
def marks() -> Iterator[Marks]:
    """Everything on."""
    marks = Marks.open(rank=0, world_size=1)
    yield marks
    marks.close(remove=True)


def mine(marks: Marks) -> MegatronMarks:
    return MegatronMarks(marks, torch.device("cpu"))


def test_a_step_holds_its_parts(modules: dict[str, ModuleType], marks: Marks) -> None:
    loop, ours = Loop(modules[RERUN].RerunDataIterator(9)), mine(marks)
    ours.install(loop.optimizer)
    ours.install(loop.optimizer)
    for step in (4, 5):
        ours.step_begins()
        loop.train_step()
        ours.step_ends(step)
    sys.modules[SCHEDULES].forward_step(loop.iterator)  # validation
    names = [one.name for one in seen(marks)]
    one = ["dataloader", "forward", "backward", "backward", "optimizer"]
    assert names == [*one, "step 4", *one, "step 5"]
    ours.close()


def test_a_step_that_completes_no_iteration_is_not_marked(modules: dict[str, ModuleType], marks: Marks) -> None:
    loop, ours = Loop(modules[RERUN].RerunDataIterator(9)), mine(marks)
    ours.install(loop.optimizer)
    ours.step_begins()
    ours.step_ends(None)
    assert named(seen(marks), "step") == []
    ours.close()


def test_a_second_batch_ends_the_forward_pass_before_it(modules: dict[str, ModuleType], marks: Marks) -> None:
    vars(modules[SCHEDULES])["forward_step"] = lambda iterator: (next(iterator), next(iterator))
    loop, ours = Loop(modules[RERUN].RerunDataIterator(9)), mine(marks)
    ours.install(loop.optimizer)
    ours.step_begins()
    loop.train_step()
    ours.step_ends(1)
    names = [one.name for one in seen(marks)]
    assert names[:4] == ["dataloader", "forward", "dataloader", "forward"]
    ours.close()


def test_the_end_of_the_data_and_closing_leave_nothing(modules: dict[str, ModuleType], marks: Marks) -> None:
    before = {name: dict(vars(module)) for name, module in modules.items()}
    fetch = vars(modules[RERUN].RerunDataIterator)["__next__"]
    loop, ours = Loop(modules[RERUN].RerunDataIterator(0)), mine(marks)
    step = loop.optimizer.step
    ours.install(loop.optimizer)
    ours.step_begins()
    with pytest.raises(StopIteration):
        loop.train_step()
    ours.close()
    ours.close()
    assert seen(marks) == []
    assert {name: dict(vars(module)) for name, module in modules.items()} == before
    assert vars(modules[RERUN].RerunDataIterator)["__next__"] is fetch
    assert loop.optimizer.step is step


def test_missing_places_are_logged_once_and_stop_nothing(
    modules: dict[str, ModuleType], marks: Marks, caplog: pytest.LogCaptureFixture
) -> None:
    del modules[SCHEDULES].forward_step, modules[RERUN].RerunDataIterator
    loop, ours = Loop(RerunDataIterator(9)), mine(marks)
    with caplog.at_level(logging.WARNING, "lastgasp"):
        ours.install(loop.optimizer)
        for step in (1, 2):
            ours.step_begins()
            modules[SCHEDULES].backward_step()
            loop.optimizer.step()
            ours.step_ends(step)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "no marks of dataloader",
        "no marks of forward",
    ]
    assert [one.name for one in named(seen(marks), "step")] == ["step 1", "step 2"]
    ours.close()


def test_what_somebody_replaced_is_marked_again(modules: dict[str, ModuleType], marks: Marks) -> None:
    loop, ours = Loop(modules[RERUN].RerunDataIterator(9)), mine(marks)
    ours.install(loop.optimizer)
    vars(modules[SCHEDULES])["forward_step"] = theirs = _theirs
    ours.place()
    ours.step_begins()
    loop.train_step()
    ours.step_ends(1)
    assert "forward" in [one.name for one in seen(marks)]
    ours.close()
    assert modules[SCHEDULES].forward_step is theirs


def _theirs(iterator: Any) -> Any:
    return next(iterator)


def test_collectives_are_wrapped_under_megatrons_names_as_the_switch_says(
    monkeypatch: pytest.MonkeyPatch, marks: Marks
) -> None:
    import torch.distributed as dist

    copies = {
        "dist_all_gather_func": dist.all_gather_into_tensor,
        "_coalescing_manager": distributed_c10d._coalescing_manager,
    }
    theirs, others = ModuleType("megatron.core.buffers"), ModuleType("somebody.else")
    for module in (theirs, others):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module).update(copies)
    plain, communication = dict(vars(others)), MegatronCommunication(marks)
    for mask, wrapped in ((bits.ALL, True), (bits.DEFAULT_ON, False), (bits.ALL, True)):
        marks.mask = mask
        communication.look()
        assert all((vars(theirs)[name] is not value) is wrapped for name, value in copies.items())
        assert dict(vars(others)) == plain, "modules that are not Megatron's are left alone"
    communication.close()
    assert all(vars(theirs)[name] is value for name, value in copies.items())
    assert dist.all_gather_into_tensor is copies["dist_all_gather_func"]


def test_what_torch_keeps_elsewhere_is_logged_once_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, marks: Marks, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[str]:
        yield "handle"

    def broken(group: Any) -> list[Any]:
        raise AttributeError("gone")

    theirs = ModuleType("megatron.core.buffers")
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    monkeypatch.setattr(distributed_c10d, "_coalescing_manager", manager)
    monkeypatch.setattr("lastgasp_megatron.communication._collected", broken)
    vars(theirs)["_coalescing_manager"] = manager
    marks.mask, communication = bits.ALL, MegatronCommunication(marks)
    communication.look()
    assert theirs._coalescing_manager is not manager
    with caplog.at_level(logging.ERROR, "lastgasp"):
        for _ in range(2):
            with theirs._coalescing_manager() as handle:
                assert handle == "handle"
    communication.close()
    assert theirs._coalescing_manager is manager
    assert [record.message.partition(" (")[0] for record in caplog.records] == ["a collective could not be marked"]


def test_the_gasps_save_is_marked_and_without_a_state_refused(marks: Marks) -> None:
    source = DeferredSource(0)
    source.mark = marks.mark("save_checkpoint")
    with pytest.raises(NotSaveable):
        source.save(3, {}, "x")
    before = marks.head
    inner: Any = SimpleNamespace(save=lambda step, aux, reason: (step, reason))
    source.inner = inner
    assert source.save(3, {}, "x") == (3, "x")  # type: ignore[comparison-overlap]
    assert marks.head == before + 1
    assert seen(marks)[-1].name == "save_checkpoint"
