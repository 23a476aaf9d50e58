"""Digests of live state: every bit and its place count, how a tensor lies in memory does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lastgasp.pytorch import statedigest
from lastgasp.pytorch.statedigest import digest, digests_of, folded

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool, torch.cfloat]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,)], ids=str)
def test_equal_tensors_have_equal_digests_however_they_lie(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 2).to(kind)
    other = torch.stack([tensor, tensor], -1)[..., 0] if tensor.numel() else tensor.clone()  # has gaps
    assert digest([tensor]) == digest([other])
    assert len(digest([tensor])) == 16


def first_bit(tensor: Tensor) -> None:
    """Of the last element."""
    tensor.view(torch.int32)[-1] ^= 1


def swapped(tensor: Tensor) -> None:
    """Two neighbours; their sum stays."""
    tensor[[3, 4]] = tensor[[4, 3]]


def sign_of_zero(tensor: Tensor) -> None:
    """Equal as numbers."""
    tensor[0] = -0.0


@pytest.mark.parametrize("change", [first_bit, swapped, sign_of_zero])
@pytest.mark.parametrize("way", [lambda t: digest([t]), folded], ids=["host", "device"])
def test_every_bit_and_its_place_count(change: Callable[[Tensor], None], way: Callable[[Tensor], object]) -> None:
    tensor = torch.arange(9, dtype=torch.float32)
    before = way(tensor)
    change(tensor)
    assert way(tensor) != before


def test_folding_in_parts_is_folding_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = folded(tensor)
    monkeypatch.setattr(statedigest, "_CHUNK", 64)
    assert folded(tensor) == whole


def test_shape_and_type_count() -> None:
    zeros = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.float64)]
    assert len({digest([z]) for z in zeros}) == len(zeros)


def trained(seed: int, steps: int) -> tuple[nn.Module, Any]:
    """A model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_model_and_optimizer_are_distinguished() -> None:
    model, optimizer = trained(1, 2)
    before = digests_of({"model": model}, {"optimizer": optimizer})
    again = copy.deepcopy((model, optimizer))
    again[1].param_groups[0]["params"] = list(again[0].parameters())
    optimizer.state[next(model.parameters())]["exp_avg"][0, 0] += 1
    after = digests_of({"model": model}, {"optimizer": optimizer})
    assert before["model"] == after["model"]
    assert before["optimizer"] != after["optimizer"]


def test_buffers_and_gradients_do_not_count() -> None:
    model, optimizer = trained(1, 0)
    before = digests_of({"model": model}, {"optimizer": optimizer})
    model(torch.randn(3, 4)).sum().backward()
    assert digests_of({"model": model}, {"optimizer": optimizer}) == before


def test_the_loss_of_a_ranks_last_batch_does_not_count() -> None:
    """LBFGS keeps it; where the other numbers differ ranks have done something else."""
    model, optimizer = nn.Linear(4, 2), torch.optim.SGD([nn.Parameter(torch.ones(2))])
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state.update(n_iter=3, prev_loss=0.5, prev_flat_grad=torch.ones(2))
    before = digests_of({"model": model}, {"optimizer": optimizer})
    state["prev_loss"] = 0.25
    assert digests_of({"model": model}, {"optimizer": optimizer}) == before
    state["n_iter"] = 4
    assert digests_of({"model": model}, {"optimizer": optimizer}) != before
    state["n_iter"], state["scale"] = 3, 0.5
    scaled = digests_of({"model": model}, {"optimizer": optimizer})
    state["scale"] = 0.25  # of an optimizer of the user's: ranks that differ in it do not train alike
    assert digests_of({"model": model}, {"optimizer": optimizer}) != scaled


def test_what_is_not_there_yet() -> None:
    lazy = nn.LazyLinear(3)
    on_meta = nn.Linear(2, 2, device="meta")
    assert digests_of({"lazy": lazy, "meta": on_meta}, {"lbfgs": torch.optim.LBFGS(on_meta.parameters())}).keys() == {
        "lazy", "meta", "lbfgs"
    }  # fmt: skip


class Quantized(Tensor):
    """Consists of two others, and can hardly do anything, as torchao's `OptimState8bit`."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        """As torch wants it."""
        return ["codes", "scale"], []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


def test_a_tensor_that_consists_of_others() -> None:
    one, same = (Quantized(torch.arange(4, dtype=torch.uint8), torch.ones(1)) for _ in range(2))
    others = [Quantized(one.codes + 1, one.scale), Quantized(one.codes, one.scale * 2), torch.zeros(4)]
    assert digest([one]) == digest([same]) and digest([one]) not in map(digest, ([other] for other in others))
