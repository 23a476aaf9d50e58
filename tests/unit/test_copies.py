"""The copies of buffers at each boundary, in C and in Python: the same, whatever a buffer becomes."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lastgasp.pytorch import compiled, rng
from lastgasp.pytorch.aux_state import AuxRecorder, decode_aux
from lastgasp.steps.writer import SWITCH


@pytest.fixture(params=["c", "python"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copier."""
    if request.param == "python":
        monkeypatch.setenv(SWITCH, "1")
    elif compiled.compiled() is None:
        pytest.skip("the extension lastgasp.pytorch._copies is not built: pip install -e . where there is a compiler")
    return str(request.param)


class Holder(nn.Module):
    """Two buffers."""

    kept: Tensor
    other: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", value)
        self.register_buffer("other", torch.arange(3))


@pytest.fixture
def module() -> Holder:
    return Holder(torch.arange(4.0))


@pytest.fixture
def recorder(kind: str, module: Holder) -> Iterator[AuxRecorder]:
    made = AuxRecorder(module=module)
    assert made._rng_slots[0].fast is None if kind == "python" else made._rng_slots[0].fast is not None
    yield made
    made.close()


def captured(recorder: AuxRecorder, step: int) -> dict[str, Tensor]:
    recorder.capture(step, settled=True)
    data = recorder.read(step)
    assert data is not None
    return decode_aux(data).buffers


def in_place(module: Holder) -> None:
    module.kept.add_(1)


def another_tensor(module: Holder) -> None:
    module.kept = torch.arange(4.0) * 3


def other_memory(module: Holder) -> None:
    module.kept.data = torch.arange(4.0) * 5


def strides(module: Holder) -> None:
    module.kept = torch.arange(8.0)[::2]


def a_graph(module: Holder) -> None:
    module.kept = torch.arange(4.0, requires_grad=True) * 2


def another_shape(module: Holder) -> None:
    module.kept = torch.arange(9.0)


def another_type(module: Holder) -> None:
    module.kept = torch.arange(4)


@pytest.mark.parametrize(
    "change", [in_place, another_tensor, other_memory, strides, a_graph, another_shape, another_type]
)
def test_a_buffer_is_captured_in_its_current_form(
    recorder: AuxRecorder, module: Holder, change: Callable[[Holder], None]
) -> None:
    captured(recorder, 1)
    for step in range(2, 12):  # each slot, more than once
        if step != 5:
            (change if step % 3 == 0 else in_place)(module)
        found = captured(recorder, step)
        assert {name: value.dtype for name, value in found.items()} == {
            name: value.dtype for name, value in module.named_buffers()
        }
        assert all(torch.equal(found[name], value) for name, value in module.named_buffers())
        if change is a_graph:
            module.kept = module.kept.detach()


def test_a_view_that_is_conjugated_is_not_taken_byte_for_byte(kind: str) -> None:
    module = Holder(torch.tensor([1 + 2j, 3 - 4j]).conj())
    recorder = AuxRecorder(module=module)
    assert torch.equal(captured(recorder, 1)["kept"], module.kept.resolve_conj())
    recorder.close()


@pytest.mark.parametrize("large", [False, True])
def test_empty_and_large_buffers(kind: str, large: bool) -> None:
    module = Holder(torch.arange(40_000.0) if large else torch.empty(0, 3))
    recorder = AuxRecorder(module=module)
    for step in range(1, 7):
        module.other += 1
        if large and step == 4:
            module.kept.mul_(2)
        found = captured(recorder, step)
        assert all(torch.equal(found[name], value) for name, value in module.named_buffers())
    recorder.close()


def test_a_part_that_c_cannot_capture_is_asked_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_python_memory", lambda: None)
    monkeypatch.setattr(rng, "_gauss_offset", lambda: None)
    recorder = rng.RngRecorder()
    random.gauss(0, 1)
    assert rng.decode(recorder.snapshot()).python == random.getstate()


def test_nothing_keeps_the_tensors_once_the_recorder_is_gone(kind: str) -> None:
    module = Holder(torch.arange(4.0))
    recorder = AuxRecorder(module=module)
    captured(recorder, 1)
    kept = weakref.ref(module)
    recorder.close()
    del module, recorder
    gc.collect()
    assert kept() is None


def test_the_extension_refuses_what_does_not_fit() -> None:
    copies = compiled.compiled()
    if copies is None:
        pytest.skip("the extension is not built")
    view, tensor = memoryview(bytearray(16)), torch.arange(4.0)
    with pytest.raises(ValueError, match="outside"):
        copies.Buffers(view, (({"x": tensor}, "x", tensor, 4, 16, 8),))
    with pytest.raises(ValueError, match="no memory"):
        copies.Buffers(view, (({"x": tensor}, "x", torch.empty(0), 4, 16, 0),))
    with pytest.raises(TypeError):
        copies.Buffers(view, ((object(), "x", tensor, 4, 16, 0),))
    with pytest.raises(ValueError, match="too small"):
        copies.Random(view, None, 0, None, None, 0, 0, 0, torch.get_rng_state, 5056)
    with pytest.raises((TypeError, BufferError)):
        copies.Buffers(b"read only", ())
    for wrong in ((), [1], [(1, 2, 3)], [(1, int, None, None, "x")]):
        with pytest.raises(TypeError):
            copies.changes(wrong)
    for call in (copies.look, copies.unchanged, copies.truths):
        with pytest.raises(TypeError):
            call(tensor)
    assert copies.look(tensor, 1, 1, 4) is None and not copies.unchanged(tensor, 0, 1, 1, b"")
    with pytest.raises(AttributeError):
        copies.look("no tensor", 1, 1, 4)
