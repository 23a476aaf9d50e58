"""Implements in this process the interface of TaskD's agent that msrun calls, in both of its forms.

mindspore 2.8 and later import `taskd.api.taskd_agent_api`, 2.7 the class `MSRunPlugin` (docs/facts/taskd.md §8).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

OPERATIONS = ("KILL_WORKER", "START_ALL_WORKER", "MONITOR")
"""The operations that msrun must offer."""
_API = "taskd.api.taskd_agent_api"
_PLUGIN = "taskd.python.framework.agent.ms_mgr.msrun_plugin"


class Agent:
    """The operations that msrun registers, and what runs when it hands over.

    Attributes:
        operations: msrun's functions by their names.
        main: called once, in msrun's main thread; the job runs while it does.
    """

    def __init__(self) -> None:
        self.operations: dict[str, Callable[..., Any]] = {}
        self.main: Callable[[], None] = _nothing

    def init_taskd_agent(self, config: Mapping[str, object], cls: object = None) -> bool:
        """Report that the agent is available."""
        return True

    def register_func(self, operator: str, func: Callable[..., Any]) -> bool:
        """Register one of msrun's functions."""
        self.operations[operator] = func
        return True

    def start_taskd_agent(self) -> None:
        """Take over from msrun; return when the job has ended."""
        self.main()


def _nothing() -> None:
    raise AssertionError("msrun handed over before there was anybody to hand over to")


@contextlib.contextmanager
def serving(agent: Agent) -> Iterator[None]:
    """Within the context, msrun finds this agent in place of TaskD's, whether TaskD is installed or not."""
    modules = _modules(agent)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "taskd"}
    for name in before:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _modules(agent: Agent) -> dict[str, ModuleType]:
    class MSRunPlugin:
        def register_callbacks(self, operator: str, func: Callable[..., Any]) -> None:
            agent.register_func(operator, func)

        def start(self) -> None:
            agent.start_taskd_agent()

    found: dict[str, ModuleType] = {}
    for path in (_API, _PLUGIN):
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end]), "Stands in for TaskD's."))
    for name in ("init_taskd_agent", "register_func", "start_taskd_agent"):
        setattr(found[_API], name, getattr(agent, name))
    vars(found[_PLUGIN])["MSRunPlugin"] = MSRunPlugin
    for name, module in found.items():
        module.__path__ = []  # a package, so that `import a.b` works; nothing is searched on disk
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(found[parent], child, module)
    return found
