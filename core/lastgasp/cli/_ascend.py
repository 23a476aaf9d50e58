"""What `lastgasp run` does around a job on Ascend: the environment first, then TaskD's manager and proxy."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import click

from lastgasp.backends import choose_backend, in_taskd_job
from lastgasp.launch.ascend import PREPARED, Prepared, look, must_start_anew, prepare

log = logging.getLogger("lastgasp.launch")

STOP_LIMIT = 10.0
"""Seconds that a process beside the job gets to end."""


def prepared_here() -> Prepared:
    """What this machine and job need; nothing off Ascend.

    Raises:
        ConfigError: what is set contradicts what the job asks for, or `LASTGASP_BACKEND` cannot be had.
    """
    choice = choose_backend()
    taskd = in_taskd_job(choice, os.environ)
    prepared = prepare(os.environ, look(os.environ)) if taskd or choice.backend == "ascend" else Prepared()
    if choice.backend == "embedded" and choice.wanted != "embedded" and os.environ.get("MINDX_TASK_ID"):
        engine = f"a job of MindCluster's that lastgasp's own engine leads: {choice.describe()}"
        return replace(prepared, notes=(*prepared.notes, engine))
    return prepared


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
def helpers_running(prepared: Prepared) -> Iterator[None]:
    """TaskD's manager and proxy run beside the job, where they belong to this pod; afterwards they do not.

    Raises:
        ConfigError: the manager cannot run with what is set, and without it TaskD's agent starts no worker; or
            TaskD's log directory cannot be used.
    """
    with contextlib.ExitStack() as stack:
        if prepared.manager or prepared.proxy or prepared.taskd_msrun:
            _prepare(prepared)
        if prepared.manager:
            stack.enter_context(_beside("TaskD's manager", "lastgasp", "manager"))
        if prepared.proxy:
            stack.enter_context(_beside("TaskD's proxy", "lastgasp.backends.ascend.proxy"))
        yield


def _prepare(prepared: Prepared) -> None:
    from lastgasp.backends.ascend.logdir import prepare_log_directory
    from lastgasp.backends.ascend.manager import manager_config

    if prepared.manager and prepared.taskd_agent:  # it starts no worker without a manager
        manager_config(os.environ)
    prepare_log_directory(os.environ)


@contextlib.contextmanager
def _beside(name: str, *module: str) -> Iterator[None]:
    """A process that should live as long as the context; its end is reported at once."""
    process = subprocess.Popen([sys.executable, "-m", *module], stdin=subprocess.DEVNULL)
    over = threading.Event()

    def watch() -> None:
        code = process.wait()
        if not over.is_set():
            log.error("%s has ended with code %s before the job did; see above. The job continues without", name, code)

    watcher = threading.Thread(target=watch, name="lastgasp-beside", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        process.terminate()
        watcher.join(STOP_LIMIT)
        if watcher.is_alive():
            process.kill()
            watcher.join(STOP_LIMIT)
