"""What is kept of a call of Megatron's `pretrain`: where that is impossible the job trains all the same."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lastgasp_megatron.again import Pretrain, not_again
from lastgasp_megatron.script import ScriptValues

SCRIPT = """
import functools
from elsewhere import asked

count = 0

def counted():
    global count
    count += 1
    return count

before = functools.cache(counted)
made = functools.lru_cache(maxsize=1)(lambda: counted())

class Of:
    made = staticmethod(functools.cache(lambda: counted()))
    own = functools.cache(lambda self: counted())
"""


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
    package.training._STARTUP_TIMESTAMPS, package.training._seqlen_stats_active = {"program_start": None}, False
    further: Any = ModuleType("multi_token_prediction")
    further.MTPLossLoggingHelper = type("MTPLossLoggingHelper", (), {"tracker": {}})
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.multi_token_prediction", further)
    package.training.destroy_global_state = lambda: None
    package.global_vars._GLOBAL_ARGS = Namespace(load="ckpt")
    package.global_vars.set_global_variables = lambda args: None
    return package


def test_the_next_call_gets_what_the_first_one_got(training: Any) -> None:
    given = Config(iterations=5)
    kept = Pretrain((given, len), {}, first=True)
    given.iterations, training.global_vars._GLOBAL_ARGS.load = 9, "elsewhere"
    training.training._STARTUP_TIMESTAMPS["program_start"] = 1.0
    training.training._seqlen_stats_active = True  # a collective would follow on this rank alone
    further = sys.modules["megatron.core.transformer.multi_token_prediction"].MTPLossLoggingHelper
    further.tracker["values"] = 3.0
    kept.reset()
    assert not training.training._seqlen_stats_active and not further.tracker
    assert kept.given == ((Config(iterations=5), len), {})
    assert Namespace(load="ckpt") == training.global_vars._GLOBAL_ARGS
    assert training.training._STARTUP_TIMESTAMPS == {"program_start": None}


@pytest.mark.parametrize("name", ["activation_logging", "dgrad_logging"])
def test_what_was_logged_of_a_step_that_was_cut_short_is_dropped(
    name: str, training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging: Any = ModuleType(name)
    logging._LOGGER = "hooked into the model of before"
    monkeypatch.setitem(sys.modules, f"megatron.training.{name}", logging)
    Pretrain((len,), {}, first=True).reset()
    assert logging._LOGGER is None


def test_what_functions_of_the_script_remember_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pretrain_gpt.py has such a one, which holds where a stream of its data is; a new process begins without."""
    elsewhere: Any = ModuleType("elsewhere")
    exec("import functools\nasked = functools.cache(lambda: 0)", vars(elsewhere))
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    module: Any = ModuleType("losses")
    module.__file__ = str(tmp_path / "losses.py")
    exec(SCRIPT, vars(module))
    monkeypatch.setitem(sys.modules, "losses", module)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "pretrain.py"), raising=False)
    assert module.before() == 1
    values = ScriptValues([])
    assert [module.made(), module.Of.made(), module.Of().own()] == [2, 3, 4] and module.made() == 2
    module.asked()
    values.put_back()
    assert [module.before(), module.made(), module.Of.made(), module.Of().own()] == [1, 2, 3, 4]  # the counter, too
    assert module.asked.cache_info().currsize == 1  # a library's own


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (1, 2), (3, 4)])
def test_ranks_are_counted_anew(rank: int, size: int, training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time from what they were at the start: some may be missing, and be there again."""
    training.global_vars._GLOBAL_ARGS = Namespace(rank=3, world_size=4, data_parallel_size=4)
    kept = Pretrain((len,), {}, first=True)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    for _ in range(2):
        kept.reset()
        found = training.global_vars._GLOBAL_ARGS
        assert (found.rank, found.world_size, found.data_parallel_size) == (rank, size, size)


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


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"fp8": "e4m3"}, "--fp8"), ({"cuda_graph_impl": "local"}, "--cuda-graph-impl"),
        ({"profile": True}, "--profile"),
        ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type"),
        ({"async_save": True, "async_strategy": "nvrx"}, "--async-strategy nvrx"),
        ({"logits_load_dir": "logits"}, "--logits-load-dir"),  # the script keeps its place in the stream of logits
    ],
)  # fmt: skip
def test_what_keeps_more_than_is_dropped_is_not_entered_again(settings: dict[str, Any], named: str) -> None:
    usual = {"fp8": None, "cuda_graph_impl": "none", "profile": False, "async_save": False, "num_experts": 4}
    assert not_again(Namespace(**usual)) == ""
    assert not_again(Namespace(**usual | settings)) == f"it was not tried with {named}"


def test_variables_of_the_script_are_those_of_the_first_call(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Any = ModuleType("__main__")
    script.__file__, script.count, script.seen, script.draws = str(tmp_path / "train.py"), 0, [1], random.Random(5)
    beside: Any = ModuleType("beside")
    before: dict[Any, int] = {"steps": 0} | dict.fromkeys(range(100), 0)
    beside.__file__, beside.by_name = str(tmp_path / "beside.py"), dict(before)
    script.beside, script.args = beside, training.global_vars._GLOBAL_ARGS
    for name, module in (("__main__", script), ("beside", beside)):
        monkeypatch.setitem(sys.modules, name, module)
    assert Pretrain((), {}, first=True).values is None
    monkeypatch.setenv("LASTGASP_RECOVERY", "auto")
    values = Pretrain((), {}, first=True).values
    assert values is not None and values.cannot() == ""
    first = script.draws.random()
    script.count, script.later, beside.by_name["steps"], beside.by_name[50] = 3, True, 3, 1
    script.seen.append(2)
    values.put_back()
    assert (script.count, script.seen, beside.by_name, script.draws.random()) == (0, [1], before, first)
    assert not hasattr(script, "later") and script.beside is beside
    late: Any = ModuleType("late")
    late.__file__ = str(tmp_path / "late.py")
    monkeypatch.setitem(sys.modules, "late", late)
    assert values.cannot() == "late was imported after pretrain() was called"


@pytest.mark.parametrize(
    ("settings", "recovery", "first", "joins"),
    [
        ({}, "auto", True, True), ({"lastgasp_recovery": "auto"}, "", True, True),
        ({"lastgasp_recovery": "retry"}, "auto", True, False), ({}, "", True, False), ({}, "auto", False, False),
        ({"async_save": True}, "auto", True, False), ({"enable_high_availability": True}, "auto", True, False),
        ({"skip_train": True}, "auto", True, False), (None, "auto", True, False),
    ],
)  # fmt: skip
def test_a_process_joins_mindio_early_where_a_new_one_could_take_its_place(
    settings: dict[str, Any] | None, recovery: str, first: bool, joins: bool, training: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Later versions alone have parsed their options by then."""
    monkeypatch.setenv("LASTGASP_RECOVERY", recovery)
    training.global_vars._GLOBAL_ARGS = Namespace(**settings) if settings is not None else None
    assert Pretrain((), {}, first=first).joins() == joins


@pytest.mark.parametrize(
    ("settings", "fewer"),
    [({}, True), ({"use_distributed_optimizer": True}, False), ({"dataloader_type": "cyclic"}, False), (None, False)],
)
def test_mindio_hears_that_ranks_may_be_missing_only_where_they_may(
    settings: dict[str, Any] | None, fewer: bool, training: Any
) -> None:
    usual = {"dataloader_type": "single", "global_batch_size": 8, "micro_batch_size": 1}
    training.global_vars._GLOBAL_ARGS = Namespace(**usual | settings) if settings is not None else None
    assert Pretrain((), {}, first=True).fewer == fewer
