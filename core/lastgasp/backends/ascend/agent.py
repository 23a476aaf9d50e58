"""TaskD's torchrun agent with torch 2.13: its replacement of `launch_agent` lacks an argument (facts/taskd.md §2)."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lastgasp.errors import ControlError
from lastgasp.launch.torchrun_hook import TASKD_PATCH

from .logdir import prepare_log_directory

PATCH = TASKD_PATCH
"""Replaces methods of torch's elastic agent when it is imported; the documentation adds it to torch/distributed/run.py
by sed."""
_API = "torch.distributed.launcher.api"


def is_patched() -> bool:
    """TaskD's agent is in place in this process."""
    return PATCH in sys.modules


def use_taskd_agent() -> None:
    """Put TaskD's agent in place, such that this torch can call it. Idempotent; call it in the launcher.

    Raises:
        ConfigError: TaskD's log directory cannot be used.
        ControlError: TaskD's patch cannot be imported.
    """
    api = importlib.import_module(_API)
    prepare_log_directory(os.environ)
    try:
        importlib.import_module(PATCH)
    except Exception as error:
        raise ControlError(f"TaskD's agent cannot be used: {type(error).__name__}: {error}") from error
    tolerate_more_arguments(api)


def tolerate_more_arguments(api: ModuleType) -> None:
    """Let `launch_agent` of the module be called with more arguments than it takes; those are left out."""
    function = vars(api)["launch_agent"]
    if not hasattr(function, "lastgasp_tolerant"):
        vars(api)["launch_agent"] = _tolerant(function)


def _tolerant(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return function
    names = [p.name for p in parameters]

    @functools.wraps(function)
    def launch_agent(*args: Any, **kwargs: Any) -> Any:
        return function(*args[: len(names)], **{name: value for name, value in kwargs.items() if name in names})

    launch_agent.lastgasp_tolerant = True  # type: ignore[attr-defined]
    return launch_agent
