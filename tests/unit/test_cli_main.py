"""The command group: help, version, lazy loading, errors as one line with a code."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from lastgasp import __version__, cli, exitcodes


def test_help_lists_every_command_with_examples_and_exit_codes() -> None:
    done = CliRunner().invoke(cli.main, ["--help"])
    assert done.exit_code == 0
    for name in cli.COMMANDS:
        assert f"\n  {name} " in done.output
    codes = (exitcodes.SAVED, exitcodes.NOTHING_TO_SAVE, exitcodes.GAVE_UP, exitcodes.NO_PROGRESS, exitcodes.REFUSED)
    for code in codes:
        assert f"\n    {code}  " in done.output
    assert "lastgasp verify ckpts" in done.output


def test_version() -> None:
    done = CliRunner().invoke(cli.main, ["--version"])
    assert (done.exit_code, done.output) == (0, f"lastgasp, version {__version__}\n")


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(cli.main, ["vanish"]).exit_code == 2


def test_help_imports_no_command() -> None:
    code = "import sys, lastgasp.cli as c; c.main(['--help'], standalone_mode=False);"
    code += "print([m for m in sys.modules if m.startswith('lastgasp.cli.') or m.startswith('rich')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_runs_as_the_script_does() -> None:
    command = [sys.executable, "-m", "lastgasp", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == f"lastgasp, version {__version__}\n"


@pytest.mark.parametrize("command", ["verify", "incident", "ps", "switch", "doctor", "job", "demo"])
def test_each_command_has_help_with_examples_and_codes(command: str) -> None:
    done = CliRunner().invoke(cli.main, [command, "--help"])
    assert done.exit_code == 0
    assert "Examples:" in done.output
    assert "Exit codes:" in done.output
