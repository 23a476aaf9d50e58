"""`lastgasp doctor`: what is wrong with this machine, each with its fix."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import msgspec
from rich.table import Table

from lastgasp.arena import SHARE, available, in_use
from lastgasp.backends import choose_backend
from lastgasp.doctor.checks import Diagnosis, every_check, examine, printable
from lastgasp.doctor.look import look
from lastgasp.doctor.machine import JobFacts, Machine
from lastgasp.doctor.software import frameworks
from lastgasp.errors import ConfigError
from lastgasp.launch.warm import SWITCH, enabled
from lastgasp.launch.warm_process import in_use as warm_processes

from ._console import console, counted, escape

_STYLE = {"error": "bold red", "warning": "yellow"}

EPILOG = """
Run it where the job runs: in its container, with its user, environment and Python. What it looks for stands in
docs/doctor.md. No framework is imported, and nothing is changed but for a probe file in DIR.

\b
Examples:
  lastgasp doctor ckpts
  lastgasp doctor ckpts --dp-size 16 --replicas 2 --save-seconds 240
  lastgasp doctor --json | jq '.diagnoses[] | select(.severity == "error")'

\b
Exit codes:
  0  no errors (there may be warnings)
  1  at least one error: the job would not start, not recover, or lose data
  2  wrong usage
"""


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    backend: str
    """Which one a job would get here, and why."""
    frameworks: dict[str, str]
    """What is installed, with versions."""
    restarts: str
    """How torchrun's ranks are started again after a fault, and what that takes."""
    arenas: str
    """How much memory of this host the copies of sharded state may take, and how much they take now."""
    diagnoses: list[Diagnosis]
    errors: int
    warnings: int
    version: int = 1


@click.command(epilog=EPILOG)
@click.argument("directory", metavar="[DIR]", default="", type=click.Path())
@click.option("--dp-size", type=click.IntRange(min=1), metavar="N", help="Ranks of the data-parallel group.")
@click.option("--replicas", type=click.IntRange(min=1), metavar="N", help="Copies of each shard of the optimizer.")
@click.option("--save-seconds", type=click.FloatRange(min=0, max=86_400), metavar="S",
              help="How long a save takes [from the incidents in DIR].")  # fmt: skip
@click.option("--tls-info", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A file with MindIO's tls_info string.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of a table.")
def doctor(
    directory: str,
    dp_size: int | None,
    replicas: int | None,
    save_seconds: float | None,
    tls_info: Path | None,
    as_json: bool,
) -> None:
    """Find what is wrong with this machine before a job does, each with what to do.

    DIR is where checkpoints go [LASTGASP_DIR]; it is tried for writing and fsync.
    """
    info = tls_info.read_text(errors="replace").strip() if tls_info is not None else ""
    job = JobFacts(dp_size=dp_size, replicas=replicas, save_s=save_seconds, tls_info=info)
    report = report_of(look(directory or os.environ.get("LASTGASP_DIR", ""), job))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        _print(report)
    sys.exit(int(report.errors > 0))


def report_of(machine: Machine) -> Report:
    """Everything about a machine."""
    diagnoses = examine(machine)
    errors = sum(one.severity == "error" for one in diagnoses)
    about = _backend(machine), frameworks(machine), _restarts(machine), _arenas(machine)
    return Report(*about, diagnoses, errors, len(diagnoses) - errors)


def _backend(machine: Machine) -> str:
    try:
        return printable(choose_backend(machine.env, machine.places.get).describe())
    except ConfigError as error:
        return printable(f"none: {error}")


def _restarts(machine: Machine) -> str:
    try:
        warm = enabled(machine.env)
    except ConfigError as error:
        return printable(f"none: {error}")
    if not warm:
        return f"ranks start anew ({SWITCH}=off)"
    taken, count = warm_processes(machine.root / "proc")
    now = f"{count} of running jobs take {taken / 1e6:.0f} MB now" if count else "no running job has one"
    return ("ranks are forked from a warm process, which takes the memory of their imports once per node "
            f"({SWITCH}=auto): 235 MB with torch, 330 MB with Lightning; {now}")  # fmt: skip


def _arenas(machine: Machine) -> str:
    has = available(machine.root / "proc/meminfo", machine.root / "sys/fs/cgroup")
    taken, count = in_use(machine.root / "proc")
    now = f"{count} arenas of running jobs take {taken / 1e9:.1f} GB now" if count else "no running job has any"
    if has is None:
        return f"this host does not say how much memory there is for them; {now}"
    return f"those of a host may take {SHARE * has / 1e9:.1f} GB ({SHARE:.0%} of what is available); {now}"


def _print(report: Report) -> None:
    out = console()
    found = ", ".join(f"{name} {version}" for name, version in report.frameworks.items()) or "none"
    out.print(f"{escape(report.backend)}\nframeworks: {escape(found)}\nrestarts: {escape(report.restarts)}")
    out.print(f"arenas: {escape(report.arenas)}")
    if report.diagnoses:
        table = Table("", "what is wrong, and what to do", "check", title_justify="left")
        for one in report.diagnoses:
            text = f"{escape(one.what)}\n[dim]{escape(one.fix)}[/]"
            table.add_row(f"[{_STYLE[one.severity]}]{one.severity}[/]", text, one.check)
        out.print(table)
    out.print(f"{len(every_check())} checks made: {counted(report.errors, report.warnings)}")
