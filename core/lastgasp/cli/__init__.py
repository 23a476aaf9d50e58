"""The command line. Each command is a module of its own, imported only when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

from lastgasp import exitcodes
from lastgasp._version import __version__
from lastgasp.errors import ConfigError, LastgaspError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("lastgasp.cli.run:run", "Start a job whose survivors save when a rank dies (torchrun's options)."),
    "verify": ("lastgasp.cli.verify:verify", "Check every checkpoint in a directory against its digests."),
    "manifest": ("lastgasp.cli.manifest:manifest", "Give checkpoints that were written without lastgasp a manifest."),
    "report": ("lastgasp.cli.report:report", "Show the time of steps, which ranks are slow, and why; also live."),
    "incident": ("lastgasp.cli.incident:incident", "Show the last incident and draw its timeline."),
    "ps": ("lastgasp.cli.ps:ps", "List the running jobs of this machine and their ranks."),
    "switch": ("lastgasp.cli.switch:switch", "Turn step marks on and off in a running job, rank by rank."),
    "manager": ("lastgasp.cli.manager:manager", "Run TaskD's manager for this job, on MindCluster."),
    "doctor": ("lastgasp.cli.doctor:doctor", "Find what is wrong with this machine before a job does."),
    "job": ("lastgasp.cli.job:job", "Check and patch AscendJob YAML, and switch its step marks on a cluster."),
    "demo": ("lastgasp.cli.demo:demo", "Kill a rank of a real training, lose nothing, end bit-equal."),
}

EPILOG = f"""
\b
Examples:
  lastgasp run --nproc-per-node 2 train.py --dir ckpts
  lastgasp verify ckpts
  lastgasp manifest old_ckpts
  lastgasp report ckpts --html report.html
  lastgasp incident ckpts --png timeline.png
  lastgasp ps
  lastgasp switch --ranks 0,3-5 step=on comm=off
  lastgasp doctor ckpts
  lastgasp job check job.yaml
  lastgasp demo --out out/demo

\b
Exit codes:
   0  all is well
   1  a check failed: a checkpoint cannot be trusted, a rank did not acknowledge, a demo step went wrong
   2  wrong usage, or nothing was found to look at
  {exitcodes.SAVED}  run: the step was saved; start the job again and it resumes from there
  {exitcodes.NOTHING_TO_SAVE}  run: no step since the newest checkpoint; start again, nothing is lost
  {exitcodes.GAVE_UP}  run: the step could not be saved; the incident says why
  {exitcodes.NO_PROGRESS}  run: stopped, as three restarts in a row completed no new step
  {exitcodes.REFUSED}  run: a rank refused to start; its message says why and what to do
"""


class WrongUse(click.ClickException):
    """Wrong usage, or nothing was found to look at."""

    exit_code = 2


class LazyGroup(click.Group):
    """A group whose listing needs no import, and that turns lastgasp's errors into one line and a code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None where there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The listing, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; an error that lastgasp raises on purpose is a message, not a traceback."""
        try:
            return super().invoke(ctx)
        except LastgaspError as error:
            from . import _console

            kind = WrongUse if isinstance(error, ConfigError) else click.ClickException
            raise kind(_console.printable(str(error))) from error


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lastgasp")
def main() -> None:
    """A training job loses no step.

    When a rank dies, hangs or is asked to stop, the survivors save the current step, and the job
    resumes from that very step. Every checkpoint is verified before it is trained on.
    """
