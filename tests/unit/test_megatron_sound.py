"""What an optimizer holds is what a checkpoint takes it for, or nothing is saved."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lastgasp_megatron.sound import unsound
from support.megatron.slices import optimizers


def mains(optimizer: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = optimizer.optimizer.param_groups[0]["params"]
    return found


def reused(optimizer: Any) -> None:
    """As --reuse-fp32-param between two steps: bf16 in one half of the memory, the residual in the other."""
    for main in mains(optimizer):
        bits = main.view(torch.int32).clone()
        halves = torch.cat([(bits >> 16).to(torch.int16), (bits & 0xFFFF).to(torch.int16)])
        main.view(torch.int16).copy_(halves)


def swapped(optimizer: Any) -> None:
    """As --swap-optimizer between two steps."""
    mains(optimizer)[0].untyped_storage().resize_(0)


def moments_swapped(optimizer: Any) -> None:
    optimizer.optimizer.state[mains(optimizer)[1]]["exp_avg"].untyped_storage().resize_(0)


def moment_of(name: str, value: float) -> Callable[[Any], None]:
    def spoil(optimizer: Any) -> None:
        optimizer.optimizer.state[mains(optimizer)[1]][name][1] = value

    return spoil


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_sound_optimizer(parts: int) -> None:
    _, _, found = optimizers(parts)
    assert [unsound(one, settled) for one in found for settled in (True, False)] == [""] * 2 * parts


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (reused, "does not round to the bfloat16 weight"),
        (swapped, r"the memory of fp32 weight \(5,\) is not there"),
        (moments_swapped, r"the memory of exp_avg \(6,\) is not there"),
        (moment_of("exp_avg", NAN), "exp_avg .* is not finite"),
        (moment_of("exp_avg", INF), "exp_avg .* is not finite"),
        (moment_of("exp_avg_sq", NAN), "exp_avg_sq .* not squares"),
        (moment_of("exp_avg_sq", -1e-9), "exp_avg_sq .* not squares"),
    ],
)
def test_what_is_not_what_it_seems_is_reported(spoil: Callable[[Any], None], said: str) -> None:
    _, _, (one,) = optimizers(1)
    spoil(one)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(unsound(one, settled=True))


def test_between_the_update_and_its_copy_the_model_is_behind() -> None:
    _, _, (one,) = optimizers(1)
    for main in mains(one):
        main.add_(0.5)
    assert unsound(one, settled=False) == ""
    assert "does not round" in unsound(one, settled=True)
    mains(one)[2][0] = NAN
    assert "fp32 weight (4,) is not finite" in unsound(one, settled=False)


def test_a_training_that_has_itself_come_to_nan_is_saved_as_it_is() -> None:
    params, _, (one,) = optimizers(1)
    with torch.no_grad():
        params[0][2] = NAN
    mains(one)[0][2] = NAN
    one.optimizer.state[mains(one)[0]]["exp_avg"][2] = NAN
    assert unsound(one, settled=True) == ""


def test_an_optimizer_with_copies_of_all_weights() -> None:
    model, main = torch.tensor([1.0, -2.0], dtype=torch.bfloat16), torch.tensor([1.001, -2.001])
    exp_avg = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2), "step": torch.tensor(3.0)}
    inner = SimpleNamespace(param_groups=[{"params": [main]}], state={main: exp_avg})
    one = SimpleNamespace(optimizer=inner, float16_groups=[[model]], fp32_from_float16_groups=[[main]])
    assert unsound(one, settled=True) == ""
    main[1] = -2.1
    assert "does not round" in unsound(one, settled=True)


def test_fp32_weights_are_the_truth_themselves() -> None:
    main = torch.tensor([1.0, 2.0])
    inner = SimpleNamespace(param_groups=[{"params": [main, torch.empty(0)]}], state={})
    assert unsound(SimpleNamespace(optimizer=inner), settled=True) == ""
    assert unsound(SimpleNamespace(is_stub_optimizer=True), settled=True) == ""
