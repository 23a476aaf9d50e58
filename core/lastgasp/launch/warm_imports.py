"""What the warm process imports, without being in the way of who trains, and whether it may then be forked."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lastgasp.gasp.imported import libraries
from lastgasp.launch import warm_checks
from lastgasp.launch.warm_folders import put_away, watching_folders
from lastgasp.launch.warm_templates import without_templates

SLICE, PAUSE = 0.02, 0.04
"""Seconds of processor time after which the process looks whether it had to wait for a processor, and how long it then
rests. Its priority stays as it is: a nicer one could not be undone in the ranks without a privilege."""
WAITED = 2_000_000
"""Nanoseconds of waiting in one slice that mean a busy machine."""


def prepare(plan: Mapping[str, Any], own: set[int]) -> str:
    """Import; why ranks must not be forked from this process, or empty.

    Args:
        plan: modules, environment: as `gasp.imported.Imported` has them. own: names of variables that each rank has
            its own value of.
    """
    watching = warm_checks.watching_environment({*plan["own"], *plan["environment"]})
    unseen = warm_checks.watching_seeds(), warm_checks.watching_temporary(), watching_folders()
    with unseen[0], unseen[1], unseen[2], watching as readers, without_templates(plan["modules"]), _uncollected():
        for name in libraries(plan["modules"]):
            try:
                importlib.import_module(name)
            except Exception:  # the rank imported it under other circumstances, and will again
                continue
    warm_checks.close_nvml()
    put_away()
    why = (
        _misread(readers, plan["own"], plan["environment"])
        or warm_checks.differing(plan["modules"])
        or warm_checks.fork_once()
        or warm_checks.unsafe(own)
    )
    gc.collect()
    gc.freeze()  # the garbage collector of a rank leaves these pages shared
    return why


@contextmanager
def _uncollected() -> Iterator[None]:
    """Imports make hardly any garbage: searching for it takes a sixth of their time. What they set themselves stays."""
    before = gc.get_threshold()
    gc.set_threshold(0, *before[1:])
    try:
        yield
    finally:
        if not gc.get_threshold()[0]:
            gc.set_threshold(*before)


def _misread(readers: list[tuple[str, str]], own: Sequence[str], ranks: Mapping[str, str | None]) -> str:
    """Which variable an import has read that has another value in the ranks, in words; or empty."""
    differ = {name for name, value in ranks.items() if os.environ.get(name) != value}
    for module, name in readers:
        if name in own and module not in warm_checks.READ_AGAIN:
            return f"{module} reads {name} when it is imported"
        if name in differ and name not in own:
            return f"the script sets {name} itself, which {module} reads when it is imported"
    at_loading = sorted(name for name in differ if name.startswith(warm_checks.AT_LOADING))
    return f"the script sets {at_loading[0]} itself, which libraries read when they are loaded" if at_loading else ""


def memory_of(process: str = "/proc/self") -> int:
    """Bytes that would be free without this process."""
    with open(f"{process}/smaps_rollup") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))


@contextmanager
def resting() -> Iterator[None]:
    """Rest whenever others need the processor."""
    waited = _waited()

    def look(number: int, frame: object) -> None:
        nonlocal waited
        if (now := _waited()) - waited > WAITED:
            time.sleep(PAUSE)
        waited = now

    signal.signal(signal.SIGPROF, look)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, SLICE, SLICE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _waited() -> int:
    """Nanoseconds that this process was ready to run and did not get a processor."""
    with open("/proc/self/schedstat") as file:
        return int(file.read().split()[1])
