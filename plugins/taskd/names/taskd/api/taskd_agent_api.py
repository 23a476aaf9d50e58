"""The agent that runs a node's workers."""

from __future__ import annotations

from typing import Any

from lastgasp_taskd import agent

__all__ = ["init_taskd_agent", "register_func", "start_taskd_agent"]
agent.keep_stock_loop()


def init_taskd_agent(config: dict[str, Any] | None = None, cls: Any = None) -> bool:
    """Prepare the agent.

    Args:
        config: Framework ("PyTorch"; "MindSpore" is refused, `lastgasp run` is its agent) and addresses.
        cls: torch's elastic agent.

    Returns:
        False where something is wrong; the log says what.
    """
    return agent.init({} if config is None else config, cls)


def start_taskd_agent() -> Any:
    """Run the workers to their end and return torch's RunResult; None before `init_taskd_agent`."""
    return agent.start()


def register_func(operator: str, func: Any) -> bool:
    """Keep one of a launcher's operations. False before `init_taskd_agent`, or for an unknown one."""
    return agent.register(operator, func)
