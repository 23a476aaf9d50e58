"""TaskD's agents: torch's own agent runs the workers under lastgasp's hold; msrun's belong to `lastgasp run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from .network import is_right
from .said import once, refused, variables

OPERATORS = ("KILL_WORKER", "START_ALL_WORKER", "START_WORKER_LIST", "MONITOR", "RESTART")
PYTORCH, MINDSPORE = "PyTorch", "MindSpore"
RESTARTS = "PET_MAX_RESTARTS"
MOST_RESTARTS = "32767"
"""TaskD's patch makes it of torchrun's default, which is none (docs/facts/taskd.md §2)."""


UNDER_MSRUN = (
    "lastgasp does not take msrun's workers over by TaskD's names; start the job with `lastgasp run --framework "
    "mindspore` in place of msrun. Under msrun alone, msrun runs them by itself"
)


class _Agent:
    def __init__(self, framework: str, instance: Any) -> None:
        self.framework, self.instance = framework, instance
        self.operations: dict[str, Callable[..., Any]] = {}


_current: _Agent | None = None


def init(config: object, cls: Any = None) -> bool:
    """`init_taskd_agent`."""
    global _current
    if not is_right("init_taskd_agent", config):
        return False
    assert isinstance(config, dict)
    framework = config.get("Framework")
    if framework not in (PYTORCH, MINDSPORE):
        return refused(f"init_taskd_agent: Framework={framework!r} is neither {PYTORCH!r} nor {MINDSPORE!r}")
    if framework == MINDSPORE:
        return refused(f"init_taskd_agent: {UNDER_MSRUN}")
    if cls is None:
        return refused("init_taskd_agent: with PyTorch the elastic agent belongs into cls")
    variables()
    _current = _Agent(framework, cls)
    return True


def start() -> Any:
    """`start_taskd_agent`: run the workers to their end; None without an init.

    Returns:
        torch's RunResult; None with MindSpore.
    """
    if _current is None:
        refused("start_taskd_agent: init_taskd_agent has not been called, or was refused")
        return None
    if _current.framework == PYTORCH:
        from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

        once("torch's agent runs the workers, with lastgasp's hold where lastgasp has started it")
        return (_invoke_run or SimpleElasticAgent._invoke_run)(_current.instance, "default")
    return None


def register(operator: object, function: object) -> bool:
    """`register_func`."""
    if _current is None:
        return refused("register_func: init_taskd_agent has not been called, or was refused")
    if operator not in OPERATORS or not callable(function):
        return refused(f"register_func: {operator!r} is none of {', '.join(OPERATORS)}, or its function is none")
    _current.operations[str(operator)] = function
    return True


def patch() -> None:
    """What importing `taskd.python.adaptor.patch` is for: jobs restart, without a flag of torchrun's."""
    os.environ.setdefault(RESTARTS, MOST_RESTARTS)
    once("TaskD's patch of torchrun is not needed: lastgasp's agent runs the workers and restarts them")


_invoke_run: Any = None
"""torch's own loop, kept before anybody replaces it (`keep_stock_loop`)."""


def keep_stock_loop() -> None:
    """A script that replaces `_invoke_run` by a call of `start_taskd_agent` gets torch's own loop from that."""
    global _invoke_run
    if _invoke_run is None and "torch.distributed.elastic.agent.server.api" in sys.modules:
        from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

        _invoke_run = SimpleElasticAgent._invoke_run


class MSRunPlugin:
    """The older form of TaskD's agent for msrun, which goes on by itself where this one refuses."""

    def __init__(self) -> None:
        raise RuntimeError(UNDER_MSRUN)
