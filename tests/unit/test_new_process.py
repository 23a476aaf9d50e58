"""A new process for a dead rank ends with its launcher, until it has joined the others."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from lastgasp.gasp.again import LAUNCHER, ORDER, Again

AGAIN = Again(incarnation=1, step=8, source=1, takers=(0,), lost=(0,), port=7)
CHILD = """
import signal
from lastgasp.gasp import new_process
new_process.LOOK = 0.01
assert new_process.order_of_this_process().step == 8 and new_process.order_of_this_process() is None
if {joins}:
    new_process.joined()
print("ready", flush=True)
signal.pause()
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=os.environ | {{{launcher!r}: str(os.getpid())}})
print(child.pid, flush=True)
child.wait()
"""


@contextmanager
def begun(joins: bool) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """The launcher, and the new process with a descriptor of it, once that knows its order."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(launcher=LAUNCHER), CHILD.format(joins=joins)],
        env=os.environ | {ORDER: msgspec.json.encode(AGAIN).decode()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    new = os.pidfd_open(pid)
    try:
        assert launcher.stdout.readline() == "ready\n"
        yield launcher, pid, new
    finally:
        launcher.kill()
        if not ended(new, 0):
            os.kill(pid, signal.SIGKILL)
        os.close(new)
        launcher.communicate(timeout=60)


def ended(pidfd: int, seconds: float) -> bool:
    """Whether the process ends within that time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def test_it_ends_when_its_launcher_is_killed() -> None:
    with begun(joins=False) as (launcher, _, new):
        assert not ended(new, 0.2)
        launcher.kill()
        assert ended(new, 60)
        assert launcher.stderr is not None
        assert "is gone before this process had taken a rank's place" in launcher.stderr.read()


def test_once_it_has_joined_it_goes_on_without_a_launcher() -> None:
    with begun(joins=True) as (launcher, _, new):
        launcher.kill()
        launcher.wait(60)
        assert not ended(new, 0.2)
