"""Which job a command is about: one of this user's on this machine, or one that is named by address and token."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import click

from lastgasp.gasp.operator import OperatorLink
from lastgasp.gasp.rundir import JobFile, running_jobs
from lastgasp.gasp.secret import FILE, TOKEN, token_from_environment

F = TypeVar("F", bound=Callable[..., None])
ONE_RANK = "A job of one rank that no launcher started has no controller: only the switch file reaches it."


@dataclass(frozen=True)
class Target:
    """A controller and how to reach it; what is empty or None is not known."""

    address: str
    token: str
    job: str = ""
    directory: str = ""
    pid: int | None = None

    def link(self) -> OperatorLink:
        """Connect; raises as `OperatorLink` does."""
        return OperatorLink(self.address, self.token)

    def __str__(self) -> str:
        job = self.job or ("(no rank yet)" if self.pid is not None else f"controller {self.address}")
        pid = f", controller {self.pid}" if self.pid is not None else ""
        return f"{job}{pid}{', ' if self.directory else ''}{self.directory}"


def job_options(command: F) -> F:
    """--job and --controller, which exclude each other."""
    for decorate in (
        click.option(
            "--controller",
            metavar="HOST:PORT",
            help="The job's controller on another machine, as `ps --json` names it there; token from LASTGASP_TOKEN or "
            "LASTGASP_TOKEN_FILE.",
        ),
        click.option("--job", metavar="ID", help="The job: its id, or the process id of its controller (lastgasp ps)."),
    ):
        command = decorate(command)
    return command


def targets(job: str | None, controller: str | None) -> list[Target]:
    """The jobs that the options name; all of this user's on this machine where they name none.

    Raises:
        UsageError: `job` is not among them, or the options cannot be used so.
        ConfigError: the runtime directory cannot be trusted.
    """
    if controller is not None:
        return [_remote(job, controller)]
    found = [_target(file) for file in running_jobs()]
    if job is None:
        return found
    chosen = [target for target in found if job in (target.job, str(target.pid))]
    if not chosen:
        raise click.UsageError(f"--job {job!r} is not among the jobs of this user on this machine: {_listing(found)}")
    return chosen


def one_target(job: str | None, controller: str | None) -> Target:
    """The one job that the options name.

    Raises:
        UsageError: there is none, or more than one; lists them.
        ConfigError: the runtime directory cannot be trusted.
    """
    found = targets(job, controller)
    if not found:
        more = f"Jobs on other machines: --controller HOST:PORT. {ONE_RANK}"
        raise click.UsageError(f"this user runs no job with a controller on this machine. {more}")
    if len(found) > 1:
        how = "--job must name one by its controller's process id" if job is not None else "--job must name one"
        raise click.UsageError(f"{how} of these: {_listing(found)}")
    return found[0]


def _target(file: JobFile) -> Target:
    return Target(file.address, file.token, file.job, file.directory, file.pid)


def _remote(job: str | None, controller: str) -> Target:
    host, _, port = controller.rpartition(":")
    if job is not None:
        raise click.UsageError("--job and --controller exclude each other: a controller has one job")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise click.BadParameter(
            f"{controller!r}: expected HOST:PORT, a port from 1 to 65535", param_hint="--controller"
        )
    token = os.environ.get(TOKEN) or token_from_environment()
    if not token:
        raise click.UsageError(f"--controller needs the job's token in {TOKEN}, or a file with it in {FILE}")
    return Target(controller, token)


def _listing(found: list[Target]) -> str:
    return "".join(f"\n  {target}" for target in found) or "there is none"
