"""What is kept of a call of Megatron's `pretrain`: where that is impossible the job trains all the same."""

from __future__ import annotations

import dataclasses
import sys
import threading
from argparse import Namespace
from types import ModuleType
from typing import Any

import pytest

from lastgasp_megatron.again import Pretrain


@dataclasses.dataclass
class Config:
    """As Megatron's containers of settings."""

    iterations: int


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's two modules, as far as they are needed."""
    package: Any = ModuleType("megatron.training")
    package.training, package.global_vars = ModuleType("megatron.training.training"), ModuleType("global_vars")
    for name, module in (("megatron", ModuleType("megatron")), ("megatron.training", package),
                         ("megatron.training.training", package.training),
                         ("megatron.training.global_vars", package.global_vars)):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    package.training._STARTUP_TIMESTAMPS = {"program_start": None}
    package.training.destroy_global_state = lambda: None
    package.global_vars._GLOBAL_ARGS = Namespace(load="ckpt")
    package.global_vars.set_global_variables = lambda args: None
    return package


def test_the_next_call_gets_what_the_first_one_got(training: Any) -> None:
    given = Config(iterations=5)
    kept = Pretrain((given, len), {}, first=True)
    given.iterations, training.global_vars._GLOBAL_ARGS.load = 9, "elsewhere"
    training.training._STARTUP_TIMESTAMPS["program_start"] = 1.0
    kept.reset()
    assert kept.given == ((Config(iterations=5), len), {})
    assert Namespace(load="ckpt") == training.global_vars._GLOBAL_ARGS
    assert training.training._STARTUP_TIMESTAMPS == {"program_start": None}


@pytest.mark.parametrize("where", ["module", "settings", "version"])
def test_what_cannot_be_kept_costs_the_recovery_in_place_and_not_the_job(where: str, training: Any) -> None:
    if where == "module":
        training.training._LOCKS = [threading.Lock()]
    elif where == "settings":
        training.global_vars._GLOBAL_ARGS.lock = threading.Lock()
    else:
        del training.training.destroy_global_state
    kept = Pretrain((len,), {}, first=True)
    assert kept.why
    assert kept.given == ((len,), {})
