"""What `lastgasp run` does around a job on Ascend: the environment first, then TaskD's manager on the first pod."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import click

from lastgasp.backends import choose_backend, in_taskd_job
from lastgasp.launch.ascend import PREPARED, Prepared, look, must_start_anew, prepare

log = logging.getLogger("lastgasp.launch")

STOP_LIMIT = 10.0
"""Seconds that the manager gets to end."""


def prepared_here() -> Prepared:
    """What this machine and job need; nothing off Ascend.

    Raises:
        ConfigError: what is set contradicts what the job asks for, or `LASTGASP_BACKEND` cannot be had.
    """
    choice = choose_backend()
    if choice.backend == "embedded" and not in_taskd_job(choice, os.environ):
        return Prepared()
    return prepare(os.environ, look(os.environ))


def start_anew_if_needed(prepared: Prepared, arguments: Sequence[str]) -> None:
    """Say what is set, and start this command once more with it: libraries are preloaded, and TaskD's Go half reads
    its environment, when a process begins. Does not return where that is needed."""
    if not must_start_anew(prepared, os.environ):
        return
    for setting in prepared.settings:
        click.echo(f"lastgasp: {setting.name}={setting.value} ({setting.why})", err=True)
    for note in prepared.notes:
        click.echo(f"lastgasp: {note}", err=True)
    env = prepared.environment(os.environ) | {PREPARED: str(os.getpid())}
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "lastgasp", "run", *arguments], env)


@contextlib.contextmanager
def manager_running(prepared: Prepared) -> Iterator[None]:
    """TaskD's manager runs beside the job, where it belongs to this pod; afterwards it does not."""
    if not prepared.manager:
        yield
        return
    manager = subprocess.Popen([sys.executable, "-m", "lastgasp", "manager"], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        if manager.poll() is not None:
            log.error("TaskD's manager had ended with code %s before the job did; see above", manager.returncode)
        manager.terminate()
        try:
            manager.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            manager.kill()
            manager.wait()
