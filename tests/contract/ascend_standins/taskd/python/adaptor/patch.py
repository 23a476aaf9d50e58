"""Importing it replaces methods of torch's elastic agent; its `launch_agent` takes three arguments.

As in the real package: the agent's node rank is the rendezvous handler's `rank`, which only the static one has; each
local rank has a process context of its own in `_pcontext_dict`, and `_pcontext` stays None; workers get MASTER_ADDR and
MASTER_PORT from the launcher's environment, not from its command line (a missing port becomes the text "None").
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch.distributed.elastic.agent.server.api as server
import torch.distributed.elastic.agent.server.local_elastic_agent as local
import torch.distributed.launcher.api as api
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.multiprocessing import PContext, start_processes
from torch.distributed.elastic.utils.api import macros
from torch.distributed.launcher.api import launch_agent as stock_launch_agent

from taskd.api import PATIENCE, init_taskd_proxy

launched: list[tuple[Any, ...]] = []


def _await_manager() -> None:
    """Without a manager it starts no worker and gives up with a ValueError, after minutes."""
    told = os.environ.get("STANDIN_MANAGER_TELLS")
    deadline = time.monotonic() + PATIENCE
    while told and not os.path.exists(told):
        if time.monotonic() > deadline:
            raise ValueError("no manager")
        time.sleep(0.01)


def launch_agent(config: Any, entrypoint: Any, args: Any) -> dict[int, Any]:
    """As TaskD's: torch 2.13 calls it with a fourth argument, and that is a TypeError."""
    launched.append((config, entrypoint, args))
    if os.environ.get("STANDIN_AGENT") == "only told":
        return {}
    print(f"TaskD's agent runs {args}", flush=True)
    found: dict[int, Any] = stock_launch_agent(config, entrypoint, args)
    return found


def _invoke_run(self: Any, role: str = "default") -> RunResult:
    self._pcontext_dict = {}
    upstream = os.environ.get("MASTER_ADDR", "127.0.0.1")
    threading.Thread(target=init_taskd_proxy, args=({"UpstreamAddr": upstream},), daemon=True).start()
    print(f"node {self._worker_group.spec.rdzv_handler.rank}", flush=True)
    _await_manager()
    self._initialize_workers(self._worker_group)
    while True:
        result: RunResult = self._monitor_workers(self._worker_group)
        if result.state is WorkerState.FAILED:
            self._stop_workers(self._worker_group)
            raise SystemExit(1)  # the manager's answer: the pod is rescheduled
        if result.state is not WorkerState.HEALTHY:
            return result
        time.sleep(0.05)


def _start_workers(self: Any, worker_group: WorkerGroup) -> dict[int, Any]:
    assert worker_group.store is not None
    for worker in worker_group.workers:
        rank = worker.local_rank
        environment: dict[str, Any] = {
            "LOCAL_RANK": str(rank),
            "RANK": str(worker.global_rank),
            "GROUP_RANK": str(worker_group.group_rank),
            "LOCAL_WORLD_SIZE": str(worker_group.spec.local_world_size),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "MASTER_ADDR": os.getenv("MASTER_ADDR"),
            "MASTER_PORT": str(os.getenv("MASTER_PORT")),
            "TORCHELASTIC_RUN_ID": worker_group.spec.rdzv_handler.get_run_id(),
        }
        self._pcontext_dict[rank] = start_processes(
            name=worker_group.spec.role,
            entrypoint=worker_group.spec.entrypoint,
            args={0: tuple(macros.substitute(list(worker_group.spec.args), str(rank)))},
            envs={0: environment},
            logs_specs=self._logs_specs,
            start_method=self._start_method,
        )
    return _pids(self._pcontext_dict)


def _stop_workers(self: Any, worker_group: WorkerGroup) -> None:
    for worker in worker_group.workers:
        self._pcontext_dict[worker.local_rank].close(signal.SIGKILL)


def _monitor_workers(self: Any, worker_group: WorkerGroup) -> RunResult:
    assert {worker.id for worker in worker_group.workers} == set(_pids(self._pcontext_dict).values())
    results = {rank: context.wait(0) for rank, context in self._pcontext_dict.items()}
    failures = {
        worker_group.workers[rank].global_rank: failure
        for rank, result in results.items()
        if result is not None
        for failure in result.failures.values()
    }
    if failures:
        return RunResult(state=WorkerState.FAILED, failures=failures)
    if any(result is None for result in results.values()):
        return RunResult(state=WorkerState.HEALTHY)
    done = {worker.global_rank: "completed" for worker in worker_group.workers}
    return RunResult(state=WorkerState.SUCCEEDED, return_values=done)


def _pids(contexts: dict[int, PContext]) -> dict[int, int]:
    return {rank: pid for rank, context in contexts.items() for pid in context.pids().values()}


vars(api)["launch_agent"] = launch_agent
for name, function in {"_invoke_run": _invoke_run}.items():
    setattr(server.SimpleElasticAgent, name, function)
for name, method in {
    "_start_workers": _start_workers,
    "_stop_workers": _stop_workers,
    "_monitor_workers": _monitor_workers,
}.items():
    setattr(local.LocalElasticAgent, name, method)
