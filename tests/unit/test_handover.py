"""What one rank hands over to another is the same there, and is not copied on the way."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Adam

from lastgasp.pytorch.handover import SMALL, made_of, parts_of


def there(value: Any) -> Any:
    """As another process makes it of copies of the parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return made_of([part.clone() for part in parts_of(value)])


@pytest.mark.parametrize("length", [0, 1, SMALL // 4, SMALL // 4 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64,
                                   torch.uint16, torch.float8_e4m3fn])  # fmt: skip
def test_tensors_of_any_size_and_type(length: int, dtype: torch.dtype) -> None:
    value = torch.arange(length).to(dtype)
    found = there([value])[0]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    assert found.numel() == 0 or found.data_ptr() % 64 == value.data_ptr() % 64


def test_views_parameters_and_what_is_no_tensor() -> None:
    whole = torch.randn(300, 200)
    value = {
        "whole": whole,
        "row": whole[3],
        "turned": whole.t(),
        "as bytes": whole.view(torch.uint8),
        "memory": whole.untyped_storage(),
        "parameter": nn.Parameter(whole, requires_grad=False),
        "numpy": np.arange(100_000),
        "ordered": OrderedDict(a=1, b=b"x" * 100_000),
    }
    found = there(value)
    assert torch.equal(found["turned"], whole.t())
    assert found["turned"].stride() == whole.t().stride()
    assert type(found["parameter"]) is nn.Parameter
    assert not found["parameter"].requires_grad
    assert (found["numpy"] == value["numpy"]).all()
    assert found["ordered"] == value["ordered"]
    found["whole"].zero_()
    assert not any(found[name].any() for name in ("row", "turned", "as bytes", "parameter"))
    assert found["memory"]._untyped_storage.data_ptr() == found["whole"].data_ptr()


def test_the_memory_of_large_tensors_is_not_copied() -> None:
    net = nn.Linear(300, 300)
    optimizer = Adam(net.parameters())
    net(torch.ones(300)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    parts = parts_of(state)
    moments = {state["state"][0][name].data_ptr() for name in ("exp_avg", "exp_avg_sq")}
    assert {part.data_ptr() for part in parts[1:]} == moments
    assert {tensor.data_ptr() for tensor in made_of(parts)["state"][0].values()} >= moments
    assert torch.equal(there(state)["state"][1]["exp_avg"], state["state"][1]["exp_avg"])
