"""TaskD's manager without a `manager.py`, configured from the environment (docs/facts/taskd.md §1, §2)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lastgasp.errors import ConfigError, ControlError
from lastgasp.gasp.resetfile import DEFAULT_PATH

from .logdir import prepare_log_directory
from .taskd import import_taskd

log = logging.getLogger("lastgasp")

_SIZES = (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("MS_WORKER_NUM", "MS_LOCAL_WORKER"))
"""Ranks of the job and of one pod, as the operator sets them: PyTorch, MindSpore (docs/facts/taskd.md §5)."""
_CLOUD = "of the job's YAML: `lastgasp job patch` adds what is missing"


@dataclass(frozen=True)
class ManagerConfig:
    """The configuration of TaskD's manager.

    Attributes:
        job: the job's id.
        nodes: pods of the job; per_node: ranks of each. Their product is the number of workers that it waits for.
        controls: whether it also runs the MindIO controller.
    """

    job: str
    nodes: int
    per_node: int
    controls: bool

    def as_taskd(self) -> dict[str, Any]:
        """Return a new dict, as TaskD writes into it."""
        return {"job_id": self.job, "node_nums": self.nodes, "proc_per_node": self.per_node}


def manager_config(env: Mapping[str, str], nodes: int | None = None, per_node: int | None = None) -> ManagerConfig:
    """Decide from the environment and the options; pure.

    Raises:
        ConfigError: something is missing or invalid, which TaskD would only log in a thread.
    """
    job = env.get("MINDX_TASK_ID", "")
    if not job:
        raise ConfigError("MINDX_TASK_ID", None, "the job's id", "MindCluster's operator sets it in each pod.")
    world, local = _sizes(env)
    per_node = local if per_node is None else per_node
    if nodes is None:
        nodes = _nodes(world, per_node)
    for name, number in (("--nodes", nodes), ("--procs-per-node", per_node)):
        if number < 1:
            raise ConfigError(name, number, "1 or more", "Leave it out where the operator has set the sizes.")
    controls = env.get("TASKD_PROCESS_ENABLE", "on") != "off"
    _check_address(env, nodes, controls)
    return ManagerConfig(job, nodes, per_node, controls)


def _sizes(env: Mapping[str, str]) -> tuple[int, int]:
    for world, local in _SIZES:
        if env.get(world) or env.get(local):
            return _number(env, world), _number(env, local)
    return 0, 0


def _number(env: Mapping[str, str], name: str) -> int:
    value = env.get(name, "")
    if not (value.isascii() and value.isdigit()):
        remedy = "The operator sets it; else give --nodes and --procs-per-node."
        raise ConfigError(name, env.get(name), "a number", remedy)
    return int(value)


def _nodes(world: int, per_node: int) -> int:
    if per_node < 1 or world % per_node:
        allowed = f"a multiple of the {per_node} ranks of one pod"
        raise ConfigError("WORLD_SIZE", world, allowed, "Give --nodes and --procs-per-node.")
    return world // per_node


def _check_address(env: Mapping[str, str], nodes: int, controls: bool) -> None:
    if not env.get("POD_IP") and (nodes > 1 or controls):
        raise ConfigError("POD_IP", None, "the address of this pod", f"It comes from env {_CLOUD}.")
    port = env.get("TTP_PORT", "")
    if controls and not (port.isascii() and port.isdigit() and 1024 <= int(port) <= 65535):
        raise ConfigError(
            "TTP_PORT",
            env.get("TTP_PORT"),
            "a port from 1024 to 65535, the same in all pods",
            f"It comes from env {_CLOUD}. With TASKD_PROCESS_ENABLE=off it is not needed.",
        )


def run_manager(config: ManagerConfig) -> None:
    """Run the manager in this process; it serves until the process is ended.

    Raises:
        ConfigError: its log directory cannot be used.
        ControlError: TaskD cannot be imported, or its manager ended.
    """
    prepare_log_directory(os.environ)
    api = import_taskd()
    if not DEFAULT_PATH.exists():
        log.warning("%s is not mounted: TaskD's manager writes an error into its log ten times a second", DEFAULT_PATH)
    if api.init_taskd_manager(config.as_taskd()) is not True:
        raise ControlError(f"TaskD's manager refused {config}; its manager.log says why")
    api.start_taskd_manager()  # does not return while it serves
    raise ControlError("TaskD's manager ended; its manager.log says why. Is port 9601 taken by another job's?")
