"""`lastgasp demo`: the promise, shown on a real training."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import click
import msgspec
from rich.table import Table

from lastgasp import _clock
from lastgasp.errors import ConfigError, MissingExtra

from ._console import console, escape
from ._demo import Demo, Summary, find_script
from ._timeline import headline

EPILOG = """
\b
Examples:
  lastgasp demo
  lastgasp demo --out /tmp/demo && xdg-open /tmp/demo/timeline.png

\b
Exit codes:
  0  every check holds
  1  a check failed, or a library is missing
  2  wrong usage, or OUT cannot be written
"""

NEEDS = {"torch": "demo", "lightning": "demo", "sklearn": "demo", "matplotlib": "demo"}


@click.command(epilog=EPILOG)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("lastgasp-demo"), show_default=True,
    help="Where checkpoints, logs, timeline.png and demo.json go.",
)  # fmt: skip
def demo(out: Path) -> None:
    """Train a small ResNet on real digits, kill a rank inside backward, and compare every bit.

    Two CPU ranks, four short jobs, under two minutes. Needs the extra demo: pip install -e '.[demo]'.
    """
    for module, extra in NEEDS.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(module, extra)
    screen, begun = console(), _clock.monotonic()
    out = _prepared(out)
    summary = Demo(out, find_script(), lambda line: screen.print(escape(line))).play()
    _write(summary, out)
    screen.print(_table(summary))
    if summary.incident:
        screen.print(f"incident: {escape(headline(summary.incident))}")
    if summary.kill_to_first_byte_ms is not None:
        screen.print(f"from the kill to the first byte of the save: {summary.kill_to_first_byte_ms:g} ms")
    screen.print(f"{_clock.monotonic() - begun:.0f} s; files in {escape(str(out))}: timeline.png, demo.json, logs")
    sys.exit(0 if summary.ok else 1)


def _prepared(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", str(out), "a directory that can be written", f"{error.strerror}.") from error
    return out.resolve()


def _write(summary: Summary, out: Path) -> None:
    from ._picture import draw

    (out / "demo.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    if summary.incident:
        draw(summary.incident, out / "timeline.png")


def _table(summary: Summary) -> Table:
    table = Table("check", "expected", "got", "", title="lastgasp demo")
    for check in summary.checks:
        mark = "[green]ok[/]" if check.ok else "[bold red]FAILED[/]"
        table.add_row(escape(check.what), escape(check.expected), escape(check.got), mark)
    return table
