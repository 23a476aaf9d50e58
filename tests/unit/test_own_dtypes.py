"""Optimizer states come back in the dtype that they had, unless somebody saves them in another way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lastgasp.pytorch.own_dtypes import load_parts


def trained(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that keeps a number of its own dtype."""
    model = nn.Linear(2, 2, dtype=dtype)
    optimizer = torch.optim.NAdam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def loaded(stored: Any, state: Any, dtype: torch.dtype) -> torch.dtype:
    """Of what NAdam keeps in float32, behind a load."""
    model, optimizer = trained(dtype)
    load_parts({"": model}, {"": stored}, {"": optimizer}, {"": state})
    found: torch.dtype = optimizer.state[next(model.parameters())]["mu_product"].dtype
    return found


def test_each_state_has_the_dtype_that_it_had() -> None:
    model, optimizer = trained(torch.bfloat16)
    assert loaded(model.state_dict(), optimizer.state_dict(), torch.bfloat16) == torch.float32


def test_where_the_parameters_have_another_dtype_now_torchs_rule_counts() -> None:
    model, optimizer = trained(torch.bfloat16)
    assert loaded(model.state_dict(), optimizer.state_dict(), torch.float64) == torch.float64


def test_states_that_a_hook_saves_in_another_dtype_are_left_alone() -> None:
    """To save them smaller; torch makes them the parameters' again."""
    model, optimizer = trained()
    state = optimizer.state_dict()
    for values in state["state"].values():
        values.update({key: value.half() for key, value in values.items()})
    other, later = trained()
    later.register_state_dict_post_hook(lambda optimizer, state: state)
    load_parts({"": other}, {"": model.state_dict()}, {"": later}, {"": state})
    assert later.state[next(other.parameters())]["exp_avg"].dtype == torch.float32
