"""The contracts of the worker, mark and switch ports: the same for the embedded engine and for MindCluster's packages.

`pytest -m ascend` runs them on the real `taskd` and `torch_npu` where those are installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lastgasp.backends.ascend import mstx
from lastgasp.backends.ascend.evidence import Evidence, evidence
from lastgasp.backends.ascend.logdir import prepare_log_directory
from lastgasp.backends.ascend.taskd import TaskdRegistry, import_taskd
from lastgasp.errors import ConfigError
from lastgasp.jobs.registry import EmbeddedRegistry, WorkerRegistry, card_of_this_process
from lastgasp.steps import bits
from lastgasp.steps import format as layout
from lastgasp.steps.marks import Marks
from support.switch_job import job_here
from support.waiting import PATIENCE, until

STANDINS = Path(__file__).parent / "ascend_standins"


def _real(name: str) -> list[pytest.MarkDecorator]:
    missing = pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    return [pytest.mark.ascend, missing]


def _forget(*packages: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


# -- workers --------------------------------------------------------------------------------------


@dataclass
class Workers:
    """One registry, and what the control plane knows of the worker."""

    registry: WorkerRegistry
    shown: Callable[[], bool]
    gone: Callable[[], bool] | None
    """None where this is invisible: TaskD's manager reports nothing about a worker that has left."""
    end: Callable[[], object] = bool
    """What the end of the process does."""


def _embedded_workers(stack: ExitStack) -> Workers:
    job = stack.enter_context(job_here(1))
    rank = job.ranks[0]
    return Workers(
        EmbeddedRegistry(rank.processor),
        lambda: job.table().rows[0].card is not None,
        lambda: job.table().rows[0].state == "left",
    )


def _taskd_workers(stack: ExitStack, patch: pytest.MonkeyPatch, folder: Path, real: bool) -> Workers:
    patch.chdir(folder)
    for name in ("RANK", "LOCAL_WORLD_SIZE"):
        patch.setenv(name, "1")
    if not real:
        proxy = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        patch.syspath_prepend(STANDINS)
        patch.setenv("STANDIN_PROXY_PORT", str(proxy.getsockname()[1]))
        stack.callback(_forget, "taskd")
        _forget("taskd")
    prepare_log_directory(os.environ)
    api = import_taskd()
    at_exit: list[Callable[[], object]] = []
    patch.setattr("atexit.register", at_exit.append)  # what the end of the process will do
    if not real:
        stack.callback(api._close)
    port = getattr(api, "PROXY_PORT", 9602)

    def look() -> Evidence:
        found = evidence(port=port)
        return found if real else Evidence(True, found.proxy, True, found.connected)

    registry = TaskdRegistry(api, "pt", look=look)

    def end() -> None:
        for hook in at_exit:
            hook()

    return Workers(registry, lambda: look().registered, None if real else lambda: not look().connected, end)


@pytest.fixture(
    params=[
        pytest.param("embedded", id="embedded"),
        pytest.param("taskd", id="taskd"),
        pytest.param("real", id="taskd-real", marks=_real("taskd")),
    ]
)
def workers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, restored_environ: None
) -> Iterator[Workers]:
    """Each backend's."""
    with ExitStack() as stack:
        if request.param == "embedded":
            yield _embedded_workers(stack)
            return
        found = _taskd_workers(stack, monkeypatch, tmp_path, real=request.param == "real")
        yield found
        found.registry.deregister()
        assert getattr(sys.modules["taskd"], "violations", []) == []


def test_a_worker_that_registers_is_shown(workers: Workers) -> None:
    workers.registry.register(card_of_this_process(0, "cpu"))
    until(workers.shown, "the control plane shows the worker")


def test_registering_again_changes_nothing(workers: Workers) -> None:
    for _ in range(2):
        workers.registry.register(card_of_this_process(0, "cpu"))
    until(workers.shown, "the control plane shows the worker")


def test_a_worker_that_deregisters_is_gone(workers: Workers) -> None:
    workers.registry.register(card_of_this_process(0, "cpu"))
    until(workers.shown, "the control plane shows the worker")
    workers.registry.deregister()
    if workers.gone is None:
        return
    workers.end()
    until(workers.gone, "the control plane has let go of the worker")


def test_deregistering_without_having_registered_raises_nothing(workers: Workers) -> None:
    workers.registry.deregister()


# -- marks and their switch ------------------------------------------------------------------------


@dataclass
class Marked:
    """The marks of one backend.

    Attributes:
        ranges: those that were completed; None where nobody can see them.
        own: the kinds that it switches; on Ascend TaskD switches the others.
    """

    marks: Any
    ranges: Callable[[], list[str]] | None
    own: int = bits.ALL & ~mstx.LEFT_TO_TASKD

    def check(self, *expected: str) -> None:
        """These were completed, in whatever order they ended."""
        if self.ranges is not None:
            assert sorted(self.ranges()) == sorted(expected)


def _recorded(marks: Marks) -> list[str]:
    names = marks.names()
    found = layout.RECORD.iter_unpack(marks.records(1000))
    return [names[row[6]].text.replace("{}", str(row[3])) for row in found]


@pytest.fixture(
    params=[
        pytest.param("embedded", id="embedded"),
        pytest.param("mstx", id="mstx"),
        pytest.param("real", id="mstx-real", marks=_real("torch_npu")),
    ]
)
def marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Marked]:
    """Each backend's."""
    if request.param == "embedded":
        own = Marks.open(rank=0, world_size=1, mask=bits.ALL)
        yield Marked(own, lambda: _recorded(own), bits.ALL)
        own.close(remove=True)
    elif request.param == "mstx":
        monkeypatch.syspath_prepend(STANDINS)
        npu = importlib.import_module("torch_npu")
        yield Marked(
            mstx.MstxMarks(*mstx.torch_mstx(), mask=bits.ALL), lambda: [r[2] for r in npu.rows if r[0] == "end"]
        )
        assert npu.open_ranges == {}, "a range was never ended"
        _forget("torch_npu")
    else:
        yield Marked(mstx.MstxMarks(*mstx.torch_mstx(), mask=bits.ALL), None)


def test_a_range_has_its_name(marked: Marked) -> None:
    with marked.marks.mark("forward"):
        pass
    marked.check("forward")


def test_a_name_is_always_the_same_mark(marked: Marked) -> None:
    assert marked.marks.mark("forward") is marked.marks.mark("forward")


def test_steps_follow_each_other(marked: Marked) -> None:
    for number in (7, 8, 9):
        marked.marks.step(number)
    marked.marks.step_end()
    marked.check("step 7", "step 8", "step 9")


def test_ranges_nest_and_each_thread_ends_its_own(marked: Marked) -> None:
    forward, entered, leave = marked.marks.mark("forward"), threading.Event(), threading.Event()

    def other() -> None:
        with forward:
            entered.set()
            leave.wait(PATIENCE)

    thread = threading.Thread(target=other)
    with forward, marked.marks.mark("backward"):
        thread.start()
        assert entered.wait(PATIENCE)
        with forward:
            pass
    marked.check("forward", "forward", "backward")
    leave.set()
    thread.join(PATIENCE)
    marked.check("forward", "forward", "forward", "backward")


def test_an_end_without_a_begin_does_nothing(marked: Marked) -> None:
    marked.marks.mark("forward").end()
    marked.marks.step_end()
    assert not marked.marks.mark("forward").cancel()
    marked.check()


def test_an_exception_ends_its_range(marked: Marked) -> None:
    with pytest.raises(ValueError), marked.marks.mark("forward"):
        raise ValueError
    marked.check("forward")


def test_what_is_switched_off_is_not_marked(marked: Marked) -> None:
    assert marked.marks.switch(0, bits.FORWARD) == marked.own & ~bits.FORWARD
    for name in ("forward", "backward", "mine"):
        with marked.marks.mark(name):
            pass
    marked.check("mine")
    assert marked.marks.switch(bits.FORWARD, bits.STEP) == marked.own & ~bits.STEP
    for name in ("forward", "mine"):
        with marked.marks.mark(name):
            pass
    marked.check("mine", "forward")


def test_a_switch_in_the_middle_of_a_range(marked: Marked) -> None:
    """Begun while on, it is recorded; begun while off, it is not."""
    with marked.marks.mark("forward"):
        marked.marks.switch(0, marked.own)
    with marked.marks.mark("backward"):
        marked.marks.switch(marked.own, 0)
    marked.check("forward")


def test_a_switch_from_another_thread_counts_at_once(marked: Marked) -> None:
    thread = threading.Thread(target=marked.marks.switch, args=(0, marked.own))
    thread.start()
    thread.join(PATIENCE)
    assert marked.marks.mask & marked.own == 0


@pytest.mark.parametrize("mask", [-1, bits.ALL + 1, 1 << 40])
def test_what_is_no_set_of_bits_is_refused_and_changes_nothing(marked: Marked, mask: int) -> None:
    for on, off in ((mask, 0), (0, mask)):
        with pytest.raises(ConfigError):
            marked.marks.switch(on, off)
    with pytest.raises(ConfigError):
        marked.marks.mask = mask
    assert marked.marks.mask == bits.ALL
