"""Hooks stay in place, or the job stops, whatever MindSpeed does before, after and in between (megatron.md §4).

On stand-ins with the signatures of core_v0.12.1 and a patch manager that behaves as MindSpeed's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

ORDERS = Path(__file__).parents[1] / "support/megatron_orders.py"
ALL = ["setup_model_and_optimizer", "load_checkpoint", "train", "train_step", "train_step", "save_checkpoint"]


@dataclass(frozen=True)
class Start:
    """One order: exit code, standard error, hooks and functions that were called."""

    code: int
    stderr: str
    hooked: list[str]
    called: list[str]


@pytest.fixture(scope="module")
def starts() -> dict[str, Start]:
    """All orders, run once."""
    done = subprocess.run([sys.executable, str(ORDERS)], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return {order: Start(**said) for order, said in json.loads(done.stdout).items()}


def _hooked(starts: dict[str, Start], order: str) -> tuple[list[str], list[str]]:
    start = starts[order]
    assert start.code == 0, start.stderr
    return start.hooked, start.called


@pytest.mark.parametrize("order", ["stock", "stock_late"])
def test_stock_megatron_is_hooked_whether_it_is_imported_before_or_after_install(
    order: str, starts: dict[str, Start]
) -> None:
    hooked, called = _hooked(starts, order)
    assert hooked == ALL
    assert called == ["pretrain", "initialize_megatron", *ALL]


@pytest.mark.parametrize("order", ["a", "b", "c", "d", "e", "g"])
def test_every_hook_is_called_once_in_every_order_of_mindspeeds_patches(
    order: str, starts: dict[str, Start]
) -> None:
    hooked, called = _hooked(starts, order)
    assert hooked == ALL
    assert called.count("mindspeed_llm.train") == 1
    assert called.count("train_step") == 2


@pytest.mark.parametrize("order", ["c", "g"])
def test_mindspeeds_own_wrappers_stay_inside_ours(
    order: str, starts: dict[str, Start]
) -> None:
    _, called = _hooked(starts, order)
    assert called.count("mindspeed.save_checkpoint") == 1
    assert called.count("mindspeed.train_step") == 2


@pytest.mark.parametrize(
    ("order", "found"),
    [("missing", "found no such function"), ("changed", "train_step(state), without model")],
)
def test_a_hook_that_cannot_be_placed_stops_the_job_with_what_was_expected_and_found(
    order: str, found: str, starts: dict[str, Start]
) -> None:
    done = starts[order]
    assert done.code == 1
    assert "HookNotPlaced: lastgasp cannot protect this job" in done.stderr
    assert "expected megatron.training.training.train_step(model, optimizer, opt_param_scheduler, ...)" in done.stderr
    assert found in done.stderr
    assert "megatron-core 0.12.1-standin" in done.stderr


def test_uninstalled_not_one_attribute_differs(starts: dict[str, Start]) -> None:
    assert _hooked(starts, "undo")[0] == []


def test_with_lastgasp_0_nothing_is_hooked_and_that_is_reported(starts: dict[str, Start]) -> None:
    hooked, called = _hooked(starts, "off")
    assert hooked == []
    assert called.count("train_step") == 2
    assert "lastgasp is off" in starts["off"].stderr


def test_options_are_in_megatrons_parser_next_to_the_users(starts: dict[str, Start]) -> None:
    assert _hooked(starts, "arguments")[0] == ["/somewhere", "True", "3"]


def test_marks_follow_what_mindspeed_replaces_and_are_gone_when_closed(starts: dict[str, Start]) -> None:
    hooked, called = _hooked(starts, "marks")
    one = ["forward", "backward"]
    assert hooked == [*one, "step 1", *one, "step 2"]
    assert called == ["mindspeed.forward_step", "backward_step", *["forward_step", "backward_step"] * 2]
