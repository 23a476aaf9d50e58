"""A rank's image: what goes into its arena comes out of it, bit by bit, and whoever has it needs nothing else."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

from lastgasp_megatron.image import Image, decoded, encoded, problem  # noqa: E402
from lastgasp_megatron.merge import merged, weights_of_masters, with_values  # noqa: E402
from lastgasp_megatron.shards import copied  # noqa: E402
from support.megatron.images import image, payload  # noqa: E402
from support.megatron.slices import KIND, SIZES, optimizers  # noqa: E402


def through_bytes(one: Image) -> Image:
    return decoded(payload(one))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_images_of_all_parts_become_the_files(parts: int) -> None:
    params, weights, _ = optimizers(parts)
    found = [through_bytes(image(part, parts)) for part in range(parts)]
    assert all((one.rank, one.step, one.aux, one.shard.part) == (i, 7, b"random", i) for i, one in enumerate(found))
    first = found[0]
    assert first.content is not None
    state = merged(first.layouts[0], [copied(one.held[0]) for one in found])
    world = state[0][KIND]
    for key, expected in (("param", weights), ("exp_avg", weights * 2), ("exp_avg_sq", weights.square() * 3)):
        assert torch.equal(world[key], expected), key
    model = with_values(first.content, [state])["model"]
    for number, value in enumerate(torch.split(weights.to(torch.bfloat16), list(SIZES))):
        assert torch.equal(model[str(number)], value) and model[str(number)].dtype == params[number].dtype


def test_an_optimizer_that_has_all_comes_back_with_its_weights() -> None:
    main, model = torch.tensor([1.001, -2.3, 0.1]), torch.zeros(3, dtype=torch.bfloat16)
    optimizer = SimpleNamespace(float16_groups=[[model]], fp32_from_float16_groups=[[main]])
    more = {
        "model": {"w": weights_of_masters(optimizer)[id(model)], "buffer": torch.arange(6).view(2, 3).t()},
        "optimizer": {"fp32_from_fp16_params": [[main]], "step": torch.tensor(3.0), "empty": torch.empty(0, 4)},
    }
    found = through_bytes(dataclasses.replace(image(0, 1, **more), held=(), layouts=()))
    assert found.content is not None
    content = with_values(found.content, [])
    assert torch.equal(content["model"]["w"], main.to(torch.bfloat16))
    assert torch.equal(content["model"]["buffer"], torch.arange(6).view(2, 3).t())
    kept = content["optimizer"]
    assert torch.equal(kept["fp32_from_fp16_params"][0][0], main) and kept["step"] == 3.0
    assert kept["empty"].shape == (0, 4)


def test_memory_that_two_tensors_share_is_copied_once() -> None:
    main = torch.arange(1024.0)
    pieces = encoded(image(0, 1, optimizer={"one": main, "other": main.view(32, 32)}), lambda number, flat: flat)
    alone = encoded(image(0, 1, optimizer={"one": main}), lambda number, flat: flat)
    assert sum(map(len, pieces[1:])) == sum(map(len, alone[1:]))


def test_tensors_of_a_device_are_copied_to_the_host() -> None:
    asked: list[int] = []

    def host(number: int, flat: Any) -> Any:
        asked.append(number)
        return torch.zeros(flat.shape, dtype=torch.uint8)

    encoded(image(0, 1, optimizer={"a": torch.ones(3, device="meta"), "b": torch.ones(4)}), host)
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_what_cannot_be_an_optimizers_state_is_not_saved(name: str, value: float) -> None:
    one = through_bytes(image(1, 2))
    assert problem(one) == ""
    tensors = one.held[0][0][KIND][0].pieces[0][2]
    tensors[name][0] = value
    assert bool(problem(one)) == (name == "exp_avg_sq" or value != -1.0)
    tensors["param"][0] = float("nan")
    assert problem(one) == "", "training itself has come to this"


def test_what_was_not_looked_at_is_not_saved() -> None:
    assert "before the optimizer's state had been looked at" in problem(dataclasses.replace(image(1, 2), looked=False))
