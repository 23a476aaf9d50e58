"""Process groups are dropped, and one that does not end is not waited for."""

from __future__ import annotations

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
