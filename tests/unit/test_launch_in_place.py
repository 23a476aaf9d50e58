"""The launcher's part of a recovery in place, without processes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from lastgasp.gasp.again import Again
from lastgasp.launch import in_place
from lastgasp.launch.in_place import InPlace
from lastgasp.launch.warm_checks import changed_since, times


@pytest.mark.parametrize("edited", [False, True])
def test_a_script_that_has_changed_on_disk_gets_no_new_process(
    edited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be another program, beside ranks that run the old one."""
    script, started = tmp_path / "train.py", list[int]()
    script.touch()
    known = {str(script): times({"__main__": str(script)})[str(script)]}
    if edited:
        os.utime(script, ns=(0, 0))
    attempt: Any = MagicMock(number=0)
    attempt.controller.again.return_value = Again(incarnation=1, step=4, source=0, takers=(1,), lost=(1,), port=1)
    warm: Any = SimpleNamespace(changed=changed_since(known))
    monkeypatch.setattr(InPlace, "_replace", lambda self, rank, again: started.append(rank))
    group: Any = SimpleNamespace(workers=[SimpleNamespace(global_rank=rank) for rank in (0, 1)], group_world_size=1)
    assert InPlace(attempt, group, MagicMock(), warm).replaced({1: "SIGKILL"}) != edited
    assert started == ([] if edited else [1])
    reports = [call.args for call in attempt.report_exit.call_args_list]
    assert reports == ([(1, f"could not be replaced: {script} has changed since it was imported")] if edited else [])


def test_a_rank_that_does_not_leave_its_training_gets_its_new_process_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same incarnation as the one that was killed, which has its own by then."""
    started = list[int]()
    monkeypatch.setattr(InPlace, "_replace", lambda self, rank, again: started.append(rank))
    attempt: Any = MagicMock(number=0)
    workers = [SimpleNamespace(global_rank=rank) for rank in range(3)]
    context: Any = MagicMock()
    context.subprocess_handlers = {rank: SimpleNamespace(proc=SimpleNamespace(pid=rank)) for rank in range(3)}
    group: Any = SimpleNamespace(workers=workers, group_world_size=1)
    launcher = InPlace(attempt, group, context, SimpleNamespace(changed=""))  # type: ignore[arg-type]
    order = Again(incarnation=1, step=4, source=-1, takers=(0, 1, 2), lost=(1,), port=1, pids=(0, 1, 2))
    attempt.controller.again.return_value = order
    assert launcher.replaced({1: "SIGKILL"}) and started == [1]
    assert not launcher.replaced({1: "exit code 1"}), "the new process has ended"
    assert not launcher.replaced({2: "SIGKILL"}), "of which nothing is agreed"
    attempt.controller.again.return_value = msgspec.structs.replace(order, lost=(1, 2))
    assert launcher.replaced({2: "SIGKILL"}) and started == [1, 2]
    assert not launcher.replaced({2: "exit code 1"}) and started == [1, 2]


def test_each_training_of_the_script_gets_the_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in another directory is another attempt to the controller, of the same number and incarnation."""
    monkeypatch.setattr(in_place, "TCPStore", lambda *args, **more: SimpleNamespace(port=7))
    attempt: Any = MagicMock(number=0)
    controller = attempt.controller
    controller.again.return_value = None
    controller.may_enter_again.return_value = 1
    controller.no_process.return_value = ""
    controller.awaits_offer.return_value = False
    group: Any = SimpleNamespace(
        workers=[SimpleNamespace(global_rank=rank, world_size=2) for rank in (0, 1)], group_world_size=1, master_addr=""
    )
    warm: Any = SimpleNamespace(cannot_fork="")
    launcher = InPlace(attempt, group, MagicMock(spec=SubprocessContext), warm)
    launcher.look()
    launcher.look()
    assert controller.offer.call_count == 1
    controller.awaits_offer.return_value = True
    launcher.look()
    assert controller.offer.call_count == 2
    launcher.offer_in_time()
    assert controller.offer.call_count == 3
    assert len({call.args[0] for call in controller.offer.call_args_list}) == 1


def test_a_rank_that_the_controller_does_not_see_is_killed_to_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in its training still, and has not joined the others. Its end is no fault of the next incarnation."""
    started = list[int]()
    monkeypatch.setattr(InPlace, "_replace", lambda self, rank, again: started.append(rank))
    monkeypatch.setattr(InPlace, "_offer", lambda self, controller: None)
    attempt: Any = MagicMock(number=0)
    attempt.controller.again.return_value = Again(
        incarnation=2, step=4, source=0, takers=(1, 2), lost=(1, 2), port=1, pids=(10, 11)
    )
    context: Any = MagicMock(spec=SubprocessContext)
    processes = [SimpleNamespace(pid=10 + rank, poll=lambda: None, kill=MagicMock()) for rank in range(3)]
    context.subprocess_handlers = {rank: SimpleNamespace(proc=one) for rank, one in enumerate(processes)}
    group: Any = SimpleNamespace(workers=[SimpleNamespace(global_rank=rank) for rank in range(3)], group_world_size=1)
    warm: Any = SimpleNamespace(changed="")
    launcher = InPlace(attempt, group, context, warm)
    launcher.look()
    launcher.look()
    assert [one.kill.call_count for one in processes] == [0, 0, 1]
    for rank in (1, 2):
        launcher.report_exit(rank, "killed by SIGKILL", 10 + rank)
    assert [call.args for call in attempt.report_exit.call_args_list] == [(1, "killed by SIGKILL", 11)]
    assert launcher.replaced({1: "killed by SIGKILL", 2: "killed by SIGKILL"})
    assert started == [1, 2]
