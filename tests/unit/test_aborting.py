"""Communicators of NCCL are aborted side by side, within bounded time, and never those of a later process group."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lastgasp.nccl import QUIET, WATCHDOG, left_alone
from lastgasp.pytorch import aborting


class ProcessGroupNCCL:
    """Of torch's what is used. `both`: an abort waits for that of the other one."""

    def __init__(self, both: threading.Barrier | None = None) -> None:
        self._both, self.aborted, self.error = both, threading.Event(), "SUCCESS"

    def abort(self) -> None:
        """Ends once the other one is aborted, too."""
        if self._both is not None:
            self._both.wait(60.0)
        self.aborted.set()

    def get_error(self) -> Any:
        """As torch's."""
        return SimpleNamespace(name=self.error)


class Group:
    """torch's, with a backend for CUDA or none."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def _get_backend(self, device: Any) -> Any:
        if self._backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self._backend


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the process groups of this process."""

    def groups(*backends: Any) -> None:
        world = SimpleNamespace(pg_map={Group(one): "" for one in backends})
        monkeypatch.setattr(distributed_c10d, "_world", world)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)

    yield groups
    aborting.dropped()


def test_all_are_aborted_at_once(made: Any) -> None:
    both = threading.Barrier(2)
    first, second = ProcessGroupNCCL(both), ProcessGroupNCCL(both)
    made(first, SimpleNamespace(wrapped_pg=second), None)
    assert aborting.failure() == ""
    assert aborting.abort_groups()
    assert first.aborted.is_set() and second.aborted.is_set()
    assert "aborted" in aborting.failure()
    aborting.dropped()
    assert aborting.failure() == ""


def test_one_that_does_not_end_is_not_waited_for_without_end(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aborting, "LIMIT", 0.05)
    both = threading.Barrier(2)
    made(ProcessGroupNCCL(both))
    assert aborting.abort_groups()
    assert "could not be aborted within" in caplog.text
    with pytest.raises(RuntimeError, match="cannot train again"):
        aborting.require_aborted()
    both.abort()
    monkeypatch.setattr(aborting, "LIMIT", 60.0)
    assert aborting.abort_groups(), "the same abort is waited for"
    aborting.require_aborted()


def test_those_of_a_later_process_group_are_left_alone(made: Any) -> None:
    before = aborting.groups_number()
    aborting.dropped()
    made(later := ProcessGroupNCCL())
    assert not aborting.abort_groups(before)
    assert not later.aborted.is_set() and aborting.failure() == ""


def test_an_error_that_torch_knows_of_is_told(made: Any) -> None:
    made(ProcessGroupNCCL(), failed := ProcessGroupNCCL())
    failed.error = "COMM_ERROR"
    assert aborting.failure() == "torch says COMM_ERROR"


@pytest.mark.parametrize(
    ("missing", "value"), [(None, ""), (WATCHDOG, "1"), (WATCHDOG, ""), ("TORCH_NCCL_DUMP_ON_TIMEOUT", "")]
)
def test_a_process_that_torch_would_end_is_not_entered_again(
    missing: str | None, value: str, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, quiet in QUIET.items():
        monkeypatch.setenv(name, quiet)
    if missing is not None and value:
        monkeypatch.setenv(missing, value)
    elif missing is not None:
        monkeypatch.delenv(missing)
    made(None)
    assert aborting.why_not_again() == ""
    made(ProcessGroupNCCL())
    assert (WATCHDOG in aborting.why_not_again()) == (missing is not None)


@pytest.mark.parametrize(
    ("mode", "told"), [("0", ""), ("3", ""), ("1", "torch says COMM_ERROR"), ("2", "torch says COMM_ERROR")]
)
def test_what_has_ended_is_whole_unless_it_was_aborted(
    mode: str, told: str, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In modes 1 and 2 torch may have aborted it."""
    monkeypatch.setenv(WATCHDOG, mode)
    made(failed := ProcessGroupNCCL())
    failed.error = "COMM_ERROR"
    assert aborting.let_go() == told
    aborting.abort_groups()
    assert "aborted" in aborting.let_go()


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {}),
        ({"LASTGASP_LAUNCHER": "run"}, {WATCHDOG: "3"}),
        ({"LASTGASP_LAUNCHER": "run", WATCHDOG: "1"}, {}),
        ({"LASTGASP_RECOVERY": "auto"}, QUIET),
        ({"LASTGASP_RECOVERY": "restart"}, {}),
    ],
)
def test_what_a_launcher_sets_for_its_ranks(given: dict[str, str], left: dict[str, str]) -> None:
    assert left_alone(given) == left


def test_without_nccl_there_is_nothing_to_abort(made: Any) -> None:
    made(None)
    assert not aborting.abort_groups() and aborting.failure() == ""
