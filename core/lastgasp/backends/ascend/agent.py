"""TaskD's torchrun agent with torch 2.13: its replacement of `launch_agent` lacks an argument.

It replaces methods of torch's own LocalElasticAgent and keeps one process context per rank, so a class derived from
that one (ours) cannot run under it. Its node rank is `rank` of the rendezvous handler, which only the static rendezvous
has, and it hands the launcher's MASTER_ADDR and MASTER_PORT on to the workers, whatever the command line says.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from lastgasp.errors import ConfigError, ControlError
from lastgasp.launch.torchrun_hook import TASKD_PATCH

from .logdir import prepare_log_directory

PATCH = TASKD_PATCH
"""Replaces methods of torch's elastic agent when it is imported; the documentation adds it to torch/distributed/run.py
by sed."""
TORCHS_PORT = "29500"
"""torchrun's own default of the static rendezvous."""
_API = "torch.distributed.launcher.api"


def is_patched() -> bool:
    """Whether TaskD's agent is installed in this process."""
    return PATCH in sys.modules


def use_taskd_agent() -> None:
    """Install TaskD's agent so that this torch can call it. Idempotent; call it in the launcher.

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
    stock = importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    vars(api)["LocalElasticAgent"] = stock.LocalElasticAgent  # ours may have been installed when torch was imported


def static_rendezvous(given: Mapping[str, Any], names: frozenset[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the rendezvous options that TaskD's agent needs and that neither the command line nor `PET_*` sets.

    Args:
        given: torchrun's options as parsed, by their long names without dashes in front and with underscores.
        names: those that were given.
        env: the pod's environment, as the operator sets it.

    Raises:
        ConfigError: another rendezvous is requested, or the pod's numbers are inconsistent.

    Returns:
        Options by their names on the command line, to be put in front of it.
    """
    wrong = "--standalone" if given["standalone"] else f"--rdzv-backend {given['rdzv_backend']}"
    if given["standalone"] or given["rdzv_backend"] != "static":
        remedy = "Leave it out, so that the pod's numbers are taken, or give --nnodes, --node-rank and --master-addr."
        raise ConfigError("rendezvous", wrong, "the static one, since TaskD's agent runs the workers", remedy)
    found = {"nnodes": str(_nodes(env)), "node_rank": env.get("RANK") or "0"}
    if not given["rdzv_endpoint"]:
        found["master_addr"] = env.get("MASTER_ADDR") or "127.0.0.1"
        found["master_port"] = env.get("MASTER_PORT") or TORCHS_PORT
    return {f"--{name.replace('_', '-')}": value for name, value in found.items() if name not in names}


def master_of(given: Mapping[str, Any]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT of complete options, for the launcher's environment."""
    host, _, port = (given["rdzv_endpoint"] or f"{given['master_addr']}:{given['master_port']}").rpartition(":")
    return {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}


def _nodes(env: Mapping[str, str]) -> int:
    world, local = env.get("WORLD_SIZE") or "1", env.get("LOCAL_WORLD_SIZE") or env.get("WORLD_SIZE") or "1"
    if not (world.isascii() and world.isdigit() and local.isascii() and local.isdigit() and int(local)):
        allowed = "whole numbers, LOCAL_WORLD_SIZE 1 or more"
        raise ConfigError("WORLD_SIZE, LOCAL_WORLD_SIZE", (world, local), allowed, "The job's operator sets them.")
    if int(world) % int(local):
        allowed = f"a multiple of LOCAL_WORLD_SIZE ({local})"
        raise ConfigError("WORLD_SIZE", world, allowed, "The job's operator sets both, from the YAML's replicas.")
    return int(world) // int(local)


def tolerate_more_arguments(api: ModuleType) -> None:
    """Let the module's `launch_agent` be called with surplus arguments, which are dropped."""
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
