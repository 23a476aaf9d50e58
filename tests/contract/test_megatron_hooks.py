"""Hooks stay in place, or the job stops, whatever MindSpeed does before, after and in between (facts/megatron.md §4).

On stand-ins with the signatures of core_v0.12.1 and a patch manager that behaves as MindSpeed's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

ORDERS = Path(__file__).parents[1] / "support/megatron_orders.py"
ALL = ["setup_model_and_optimizer", "load_checkpoint", "train", "train_step", "train_step", "save_checkpoint"]


def _run(order: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ORDERS), order]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **environ})


def _hooked(order: str, **environ: str) -> tuple[list[str], list[str]]:
    done = _run(order, **environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return found["hooked"], found["called"]


@pytest.mark.parametrize("order", ["stock", "stock_late"])
def test_stock_megatron_is_hooked_whether_it_is_imported_before_or_after_install(order: str) -> None:
    hooked, called = _hooked(order)
    assert hooked == ALL
    assert called == ["pretrain", "initialize_megatron", *ALL]


@pytest.mark.parametrize("order", ["a", "b", "c", "d", "e", "g"])
def test_every_hook_is_called_once_in_every_order_of_mindspeeds_patches(order: str) -> None:
    hooked, called = _hooked(order)
    assert hooked == ALL
    assert called.count("mindspeed_llm.train") == 1
    assert called.count("train_step") == 2


@pytest.mark.parametrize("order", ["c", "g"])
def test_mindspeeds_own_wrappers_stay_inside_ours(order: str) -> None:
    _, called = _hooked(order)
    assert called.count("mindspeed.save_checkpoint") == 1
    assert called.count("mindspeed.train_step") == 2


@pytest.mark.parametrize(
    ("order", "found"),
    [("missing", "None under that name"), ("changed", "train_step(state), without model")],
)
def test_a_hook_that_cannot_be_placed_stops_the_job_with_what_was_expected_and_found(order: str, found: str) -> None:
    done = _run(order)
    assert done.returncode == 1
    assert "HookNotPlaced: lastgasp cannot protect this job" in done.stderr
    assert "expected megatron.training.training.train_step(model, optimizer, opt_param_scheduler, ...)" in done.stderr
    assert found in done.stderr
    assert "megatron-core 0.12.1-standin" in done.stderr


def test_uninstalled_not_one_attribute_differs() -> None:
    assert _hooked("undo")[0] == []


def test_with_lastgasp_0_nothing_is_hooked_and_that_is_said() -> None:
    done = _run("off", LASTGASP="0")
    assert json.loads(done.stdout.splitlines()[-1])["hooked"] == []
    assert "lastgasp is off" in done.stderr


def test_options_stand_in_megatrons_parser_next_to_the_users() -> None:
    assert _hooked("arguments")[0] == ["/somewhere", "True", "3"]
