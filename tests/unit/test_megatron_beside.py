"""What a forward pass changes is saved as it was at the end of the step, or not at all, and only that is copied."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

import torch

from lastgasp.adapter import GaspConfig, ManifestWriter, NotSaveable
from lastgasp.topology import Place
from lastgasp_megatron import beside
from lastgasp_megatron.beside import Beside
from lastgasp_megatron.compose import Composer
from lastgasp_megatron.devices import Device
from lastgasp_megatron.source import MegatronSource
from lastgasp_megatron.steps import Boundary, Built
from lastgasp_megatron.topology import Shard

LARGE = beside.ALWAYS // 4 + 1


class Net(torch.nn.Module):
    """A momentum encoder, a queue and a counter, which `forward` changes, and weights that it leaves alone."""

    def __init__(self, how: str = "in place") -> None:
        super().__init__()
        self.how, self.counted = how, 0
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.key = torch.nn.Parameter(torch.ones(LARGE), requires_grad=False)
        self.tower = torch.nn.Parameter(torch.ones(LARGE), requires_grad=False)
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("queue", torch.ones(LARGE))
        self.register_buffer("bank", torch.ones(LARGE))

    def get_extra_state(self) -> dict[str, int]:
        return {"counted": self.counted}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.counted = state["counted"]

    def state_dict_for_save_checkpoint(self, keep_vars: bool) -> dict[str, Any]:
        found: dict[str, Any] = self.state_dict(keep_vars=keep_vars)
        return found

    def change(self, name: str) -> None:
        found = getattr(self, name)
        if self.how == "in place":
            with torch.no_grad():
                found[1] *= 0.5
        elif self.how == "data":
            found.data[1] *= 0.5
        elif name in self._buffers:  # replaced
            setattr(self, name, found * 0.5)
        else:
            found.data = found.data * 0.5

    def forward(self) -> None:
        for name in ("key", "queue", "mean"):
            self.change(name)
        self.counted += 1


class Wrapper(torch.nn.Module):
    """As Megatron's DDP and Float16Module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def state_dict_for_save_checkpoint(self, keep_vars: bool) -> Any:
        model: Any = self.module
        return model.state_dict_for_save_checkpoint(keep_vars)


class Job:
    """A rank that trains, and what it would save."""

    def __init__(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, how: str = "in place") -> None:
        monkeypatch.setattr("lastgasp_megatron.source.file_in_checkpoint", lambda step: f"iter_{step:07d}/one.pt")
        self.net, self.notes = Net(how), list[str]()
        inner = torch.optim.SGD([self.net.weight], lr=0.1)
        optimizer = SimpleNamespace(optimizer=inner, state_dict=inner.state_dict)
        model = [Wrapper(Wrapper(self.net))]
        self.beside = Beside(model, [optimizer], self.notes.append)
        self.step, self.inside, self.updated, self.settled = 0, False, True, True
        self.moved_on, self.extra_moved_on = self.beside.changed, self.beside.extra_changed
        shard = Shard(tensor=0, pipeline=0, part=0, parts=1, data_ranks=(0,))
        args = SimpleNamespace(no_save_rng=True, global_batch_size=1)
        random: Any = SimpleNamespace(read=lambda step: b"random")
        steps: Any = self
        self.source = MegatronSource(
            steps, random, Composer(Built(args, model, optimizer, None), shard), Device(torch.device("cpu")),
            ManifestWriter("megatron", Place(rank=0, world_size=1, replicas=((0,),))), GaspConfig(directory=tmp_path),
            note=self.notes.append,
        )  # fmt: skip
        self._ends()

    def _ends(self) -> None:
        kept = self.beside.take(self.step)
        self.boundary = Boundary(self.step, 0, 0, None, (None,), (None,), kept=kept)

    def counted(self) -> tuple[None]:
        return (None,)

    def cut_short(self) -> bool:
        return False

    def logged_late(self) -> str:
        return ""

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.net()
            self.step += 1
            self._ends()

    def live(self) -> dict[str, Any]:
        found = self.net.state_dict()
        return {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in found.items()}

    def saved(self) -> dict[str, Any]:
        with self.source._own(self.step) as image:
            assert image.content is not None
            found: dict[str, Any] = image.content["model"]
            return found


@pytest.fixture
def job(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one.keys() == other.keys()
    equal = [torch.equal(one[k], other[k]) if isinstance(one[k], torch.Tensor) else one[k] == other[k] for k in one]
    return all(equal)


@pytest.mark.parametrize("how", ["in place", "data", "replaced"])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_fault_in_the_forward_pass_saves_what_the_step_before_has_ended_with(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, how: str, steps: int
) -> None:
    job = Job(tmp_path, monkeypatch, how)
    job.train(steps)
    there = job.live()
    assert same(job.saved(), there)
    job.net()
    assert not same(job.live(), there), "the forward pass has changed nothing"
    assert same(job.saved(), there) and not job.notes


@pytest.mark.parametrize("how", ["in place", "data", "replaced"])
@pytest.mark.parametrize("name", ["tower", "bank"])
def test_what_changes_for_the_first_time_costs_that_step(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, how: str, name: str
) -> None:
    job = Job(tmp_path, monkeypatch, how)
    job.train(6)
    job.net.change(name)
    with pytest.raises(NotSaveable, match=f"^{name} has changed since the end of step 6, and had not before"):
        job.saved()


def test_extra_state_that_changes_for_the_first_time_is_saved_as_it_is_with_a_note(job: Job) -> None:
    vars(job.net)["forward"] = lambda: None
    job.train(5)
    job.net.counted += 1
    assert job.saved()["_extra_state"] == {"counted": 1}
    assert len(job.notes) == 1 and job.notes[0].startswith("_extra_state (get_extra_state) differs from the end of")


class Holder:
    """A value of the user's own, with a tensor inside."""

    def __init__(self) -> None:
        self.scale, self.names = torch.ones(3), ["".join(["a", "b"])] * 2


def stream() -> io.BytesIO:
    found = io.BytesIO()
    found.write(b"scale")
    return found


FRESH: dict[str, Callable[[], Any]] = {
    "empty": lambda: torch.empty(0, dtype=torch.uint8),
    "tensor": lambda: torch.arange(4096, dtype=torch.uint8),
    "meta": lambda: torch.empty(2, device="meta"),
    "nested": lambda: {"scales": [torch.ones(3), (torch.zeros(2), 1.5)], "name": "".join(["fp", "8"])},
    "stream": stream,
    "object": Holder,
    "nothing": lambda: None,
}


@pytest.mark.parametrize("kind", FRESH)
def test_equal_extra_state_in_new_memory_has_not_changed(job: Job, kind: str) -> None:
    held = []  # so that no two are at the same address

    def fresh() -> Any:
        held.append(FRESH[kind]())
        return held[-1]

    vars(job.net)["get_extra_state"] = fresh
    job.beside = Beside([Wrapper(job.net)], [])
    for step in range(40):
        kept = job.beside.take(step)
        assert not kept.extra and not kept.missing and not job.beside.extra_changed()


@pytest.mark.parametrize("value", [torch.ones(2), {"scale": [torch.ones(2)]}, io.BytesIO(b"1"), 1, b"1"])
def test_another_value_of_extra_state_is_a_change(job: Job, value: Any) -> None:
    other = {torch.Tensor: torch.zeros(2), dict: {"scale": [torch.zeros(2)]}, io.BytesIO: io.BytesIO(b"2")}
    vars(job.net)["get_extra_state"] = lambda: value
    job.beside = Beside([Wrapper(job.net)], [])
    for step in range(3):
        job.beside.take(step)
    vars(job.net)["get_extra_state"] = lambda: other.get(type(value), 2)
    assert job.beside.extra_changed() == "_extra_state"


def test_extra_state_without_a_digest_is_copied_always(job: Job) -> None:
    vars(job.net)["get_extra_state"] = lambda: {"storage": torch.ones(2).untyped_storage()}
    job.beside = Beside([Wrapper(job.net)], [])
    assert all(job.beside.take(step).extra for step in range(6)) and not job.beside.extra_changed()


def test_extra_state_that_has_changed_once_is_copied_from_then_on(job: Job) -> None:
    vars(job.net)["forward"] = lambda: None
    job.train(3)
    job.net.counted += 1
    job.train(40)
    assert job.boundary.kept.extra == {0: {"_extra_state": {"counted": 1}}}
    job.net.counted += 1
    assert job.saved()["_extra_state"] == {"counted": 1} and not job.notes


def copied(job: Job) -> dict[str, int]:
    return {name: copy.data_ptr() for _, name, copy in job.boundary.kept.tensors}


def test_only_what_changes_is_copied_and_always_to_the_same_memory(job: Job) -> None:
    assert {*copied(job)} == {"mean"}, "it is small; of all else nobody knows yet"
    job.train(1)
    first = copied(job)
    assert {*first} == {"mean", "key", "queue"}, "neither what stays, nor what the optimizer updates"
    job.train(6)
    assert copied(job) == first


def test_what_has_changed_once_is_copied_from_then_on(job: Job) -> None:
    job.train(4)
    job.net.change("tower")
    job.train(1)
    assert "tower" in copied(job)
    there = job.live()
    job.net.change("tower")
    assert torch.equal(job.saved()["tower"], there["tower"])
    job.train(40)
    there = job.live()
    job.net.change("tower")
    assert torch.equal(job.saved()["tower"], there["tower"])


def test_no_memory_for_a_copy_is_said_once_and_costs_steps_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside._Place, "_room", lambda self, live: (_ for _ in ()).throw(RuntimeError("no room")))
    job.train(3)
    assert len(job.notes) == 1 and "mean, key, queue" not in job.notes[0] and "key" in job.notes[0]
    with pytest.raises(NotSaveable, match="key"):
        job.saved()


def test_extra_state_that_cannot_be_had_is_noted_and_costs_no_step(job: Job) -> None:
    vars(job.net)["get_extra_state"] = lambda: 1 / 0
    job.train(1)
    assert "get_extra_state failed at the end of a step" in job.boundary.kept.missing
