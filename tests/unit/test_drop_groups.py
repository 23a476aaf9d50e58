"""Process groups are dropped, and one that does not end is not waited for."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lastgasp.pytorch import drop_groups as module
from lastgasp.pytorch.drop_groups import drop_groups


class Group:
    """Its destructor waits for a thread."""

    def __init__(self, ends: threading.Event, gone: threading.Event) -> None:
        self._ends, self._gone = ends, gone

    def __del__(self) -> None:
        self._ends.wait(60)
        self._gone.set()


LAST_COLLECTIVE = """
import os, sys, threading, time
import torch
import torch.distributed as dist
from lastgasp.gasp import signin

store, groups = dist.HashStore(), {}
def join(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2)
both = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
for one in both:
    one.start()
for one in both:
    one.join()
signin.sign(signin.Entry(rank=0, pid=os.getpid(), hold=1.0, directory="", left=True))
options = dist.BroadcastOptions()
options.rootRank = 1
sys.setswitchinterval(10)  # a script that ends within its interval
groups[0].broadcast([torch.zeros(4)], options)  # who drops this tensor is the group's thread
groups[1].broadcast([torch.zeros(4)], options).wait()
until = time.perf_counter() + 1.0
while time.perf_counter() < until:
    pass
"""


def test_a_thread_of_gloos_that_waits_for_the_gil_does_not_abort_a_training_that_has_ended() -> None:
    """Without the line that signs the process aborts (torch 2.13), nearly always."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LASTGASP_")}
    command = [sys.executable, "-c", LAST_COLLECTIVE]
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=120, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("stuck", [False, True])
def test_a_group_whose_thread_is_stuck_is_left_to_it(stuck: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, gone, world = threading.Event(), threading.Event(), SimpleNamespace(pg_map={})
    world.pg_map[Group(ends, gone)] = "gloo"
    wrapped = [SimpleNamespace(process_group=next(iter(world.pg_map)), reducer=object(), module="kept")]
    kept = list(wrapped)
    monkeypatch.setattr(distributed_c10d, "_world", world)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", world.pg_map.clear)
    monkeypatch.setattr(module, "GRACE", 0.01 if stuck else 60.0)
    if not stuck:
        ends.set()
    drop_groups(wrapped)
    assert gone.is_set() != stuck
    assert (wrapped, vars(kept[0])) == ([], {"module": "kept"})
    ends.set()
    assert gone.wait(60)
    for thread in threading.enumerate():
        if thread.name == "lastgasp-drop-groups":
            thread.join(60)


def test_accelerate_makes_the_group_anew(restored_environ: None) -> None:
    """Its states belong to the process: a further Accelerator would take the group that is gone for granted."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    accelerate.Accelerator(cpu=True)
    assert accelerate.PartialState._shared_state
    module.forget_accelerate()
    assert not accelerate.PartialState._shared_state and not accelerate.state.GradientState._shared_state


def test_results_cached_with_an_old_mesh_are_forgotten_by_every_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.6 and 2.7 have no function for it: there the cache itself is cleared."""
    debug = importlib.import_module("torch.distributed.tensor.debug")
    from torch.distributed.tensor import DTensor

    monkeypatch.delattr(debug, "_clear_sharding_prop_cache")
    cleared = list[bool]()
    cache = SimpleNamespace(cache=SimpleNamespace(cache_clear=lambda: cleared.append(True)))
    dispatcher = SimpleNamespace(sharding_propagator=SimpleNamespace(propagate_op_sharding=cache))
    monkeypatch.setattr(DTensor, "_op_dispatcher", dispatcher)
    module._forget_meshes()
    assert cleared == [True]


def test_a_group_that_could_not_be_made_does_not_count() -> None:
    """Ranks find each other by the number of their group, and others have not begun to make this one."""
    world = distributed_c10d._world
    before, world.group_count = world.group_count, 3
    try:
        drop_groups([])
        assert world.group_count == 0
    finally:
        world.group_count = before
