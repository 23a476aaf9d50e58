"""`lastgasp job`: AscendJob files: what is wrong in them, what a strategy needs, and the switch for step marks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

from lastgasp import _fs
from lastgasp.errors import ConfigError, LastgaspError
from lastgasp.jobs.acjob.check import Diagnosis, Source, errors, read
from lastgasp.jobs.acjob.check import check as check_all
from lastgasp.jobs.acjob.patch import GOALS, Patched, goals_of
from lastgasp.jobs.acjob.patch import patch as patch_one
from lastgasp.jobs.acjob.switchmap import switch_configmap as make_configmap
from lastgasp.steps import bits

from ._console import console, counted, escape
from .switch import parse_settings

_CODES = """
\b
Exit codes:
  0  {good}
  1  {bad}
  2  wrong usage, or there is no AscendJob in the file
"""
_STYLE = {"error": "bold red", "warning": "yellow"}

GROUP_EPILOG = f"""
\b
Examples:
  lastgasp job check job.yaml
  lastgasp job patch job.yaml --strategy dump,recover --write
  lastgasp job switch-configmap --file job.yaml comm=on | kubectl apply -f -

Rules: docs/ascend-job-yaml.md
{_CODES.format(good="all is well", bad="a file has errors")}"""

CHECK_EPILOG = f"""
A dash is standard input. Documents other than AscendJobs are left alone; of the device plugin's DaemonSet hotReset is
looked at, of the ConfigMap data-trace-<job> whether it switches.

\b
Examples:
  lastgasp job check job.yaml
  lastgasp job check jobs/*.yaml device-plugin.yaml --json
  kubectl get acjob llama -o yaml | lastgasp job check -
{_CODES.format(good="no errors (there may be warnings)", bad="at least one error")}"""

PATCH_EPILOG = f"""
recover-strategy becomes exactly what is named. Comments, order and every other line stay as they are; a second run
changes nothing. Nothing is written when the file would still have an error.

\b
STRATEGY: {", ".join(GOALS[:4])},
          {", ".join(GOALS[4:])}

\b
Examples:
  lastgasp job patch job.yaml --strategy dump
  lastgasp job patch job.yaml --strategy recover,dump --write
  lastgasp job patch job.yaml --strategy pod-rescheduling --write
  lastgasp job patch job.yaml --marks
{_CODES.format(good="the file has what it needs, or would with --write", bad="an error is left: nothing written")}"""

SWITCH_EPILOG = f"""
What is not named is on, but for comm. The job must mount the file's directory (docs/ascend-job-yaml.md).

\b
Examples:
  lastgasp job switch-configmap --job llama --namespace team | kubectl apply -f -
  lastgasp job switch-configmap --file job.yaml comm=on
  lastgasp job switch-configmap --file job.yaml step=off forward=off dataloader=off save=off comm=off
{_CODES.format(good="printed", bad="the file has errors that hide the job")}"""


class FileReport(msgspec.Struct, frozen=True):
    """One file of a check."""

    file: str
    diagnoses: list[Diagnosis]


class Report(msgspec.Struct, frozen=True):
    """What `check --json` prints."""

    files: list[FileReport]
    errors: int
    warnings: int
    version: int = 1


@click.group(epilog=GROUP_EPILOG)
def job() -> None:
    """Check and patch AscendJob YAML files for recovery, and switch step marks of a job on a cluster."""


@job.command(epilog=CHECK_EPILOG)
@click.argument("files", nargs=-1, required=True, metavar="FILE...",
                type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of lines.")
def check(files: tuple[Path, ...], as_json: bool) -> None:
    """Look for what MindCluster rejects, ignores or silently does otherwise, each with line and fix."""
    found = check_all([read(path) for path in dict.fromkeys(files)])
    count = Counter(one.severity for diagnoses in found.values() for one in diagnoses)
    if as_json:
        rows = [FileReport(str(path), diagnoses) for path, diagnoses in found.items()]
        _print_json(Report(rows, count["error"], count["warning"]))
    else:
        for path, diagnoses in found.items():
            _print(path, diagnoses)
    sys.exit(int(count["error"] > 0))


@job.command(epilog=PATCH_EPILOG)
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--strategy", metavar="STRATEGY,...", help="What the job shall do after a fault.")
@click.option("--marks", is_flag=True, help="Mount what step marks and their switch need, with or without a strategy.")
@click.option("--job", "name", metavar="NAME", help="Only the AscendJob of that name [all of the file].")
@click.option("--write", is_flag=True, help="Write the file; without it the difference is only shown.")
def patch(file: Path, strategy: str | None, marks: bool, name: str | None, write: bool) -> None:
    """Give a job what its recovery strategy or step marks need: labels, annotations, variables, ports, mounts."""
    if strategy is None and not marks:
        raise click.UsageError("say what for: --strategy STRATEGY,... or --marks")
    goals = goals_of(strategy) if strategy is not None else ()
    source = read(file)
    patched = patch_one(source, goals, name, marks)
    click.echo(patched.diff(str(file)), nl=False)
    for note in patched.notes if patched.before != patched.after else ():
        click.echo(f"note: {note}", err=True)
    for one in patched.diagnoses:
        click.echo(_line(file, one), err=True)
    if errors(patched.diagnoses):
        raise click.ClickException(f"nothing was written: {file} would still have the errors above")
    _write(file, source, patched, write)


def _write(file: Path, source: Source, patched: Patched, write: bool) -> None:
    if patched.before == patched.after:
        click.echo(f"{file}: nothing to change", err=True)
    elif not write:
        click.echo("nothing was written: give --write to do so", err=True)
    else:
        replace(file, source, patched.after)
        click.echo(f"{file}: written", err=True)


def replace(file: Path, source: Source, text: str) -> None:
    """Put `text` into the file that `source` was read from, atomically; symlinks, the file's mode and its owner stay.

    Raises:
        ConfigError: the file was changed meanwhile, or cannot be written; it is left unchanged.
    """
    real = file.resolve()
    mark = b"\xef\xbb\xbf" if source.bom else b""
    try:
        if real.read_bytes() != mark + source.text.encode():
            raise ConfigError("FILE", str(file), "the file as it was read", "Somebody changed it: run this again.")
        was = real.stat()
        _fs.write_atomically(real, mark + text.encode(), mode=was.st_mode & 0o7777)
        with contextlib.suppress(PermissionError):  # only root may give files away
            os.chown(real, was.st_uid, was.st_gid)
    except OSError as error:
        raise ConfigError("FILE", str(file), "a file that can be written", f"{error.strerror}.") from error


@job.command("switch-configmap", epilog=SWITCH_EPILOG)
@click.argument("settings", nargs=-1, metavar="[NAME=on|off]...")
@click.option("--file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Take the job from it.")
@click.option("--job", "name", metavar="NAME", help="The job's name.")
@click.option("--namespace", metavar="NS", help="The job's namespace [of the file, else default].")
def switch_configmap(settings: tuple[str, ...], file: Path | None, name: str | None, namespace: str | None) -> None:
    """Print the ConfigMap data-trace-<job>, by which a cluster switches step marks of a running job.

    NAME is one of step, forward, dataloader, save and comm.
    """
    try:
        on, off = parse_settings(settings)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if file is not None:
        name, namespace = _job_of(file, name, namespace)
    if name is None:
        raise click.UsageError("name the job: --job NAME, or --file FILE")
    click.echo(make_configmap(name, namespace or "default", (bits.DEFAULT_ON | on) & ~off), nl=False)


def _job_of(file: Path, name: str | None, namespace: str | None) -> tuple[str, str]:
    source = read(file)
    if source.problem is not None:
        raise LastgaspError(_line(file, source.problem))
    found = [one for one in source.jobs if name in (None, one.name)]
    if len(found) != 1:
        names = ", ".join(one.name for one in source.jobs) or "none"
        raise click.UsageError(f"--job must name one AscendJob of {file}: {names}")
    return found[0].name, namespace or found[0].namespace


def _print(path: Path, diagnoses: list[Diagnosis]) -> None:
    out = console()
    if not diagnoses:
        out.print(f"[green]{escape(str(path))}: nothing found[/]", soft_wrap=True)
        return
    table = Table(
        "line", "", "job", "what is wrong, and what to do", "rule", title=escape(str(path)), title_justify="left"
    )
    for one in diagnoses:
        text = f"{escape(one.what)}\n[dim]{escape(one.fix)}[/]"
        table.add_row(str(one.line), f"[{_STYLE[one.severity]}]{one.severity}[/]", escape(one.job), text, one.rule)
    bad = len(errors(diagnoses))
    table.caption, table.caption_justify = counted(bad, len(diagnoses) - bad), "left"
    out.print(table)


def _line(path: Path, one: Diagnosis) -> str:
    return f"{path}:{one.line}: {one.severity}: {one.what}. {one.fix} [{one.rule}]"


def _print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))
