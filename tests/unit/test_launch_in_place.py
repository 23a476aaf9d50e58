"""The launcher's part of a recovery in place, without processes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

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
