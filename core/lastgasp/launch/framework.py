"""`lastgasp run --framework NAME`: the plugin is installed in each rank before the user's script runs. Pure."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass

from lastgasp.errors import ConfigError

STARTERS = {"megatron": "lastgasp_megatron.start", "mindspore": "lastgasp_mindformers.start"}
"""Module to run instead of the script; it installs the plugin and then runs the script as `__main__`."""
EXTRAS = {"megatron": "megatron", "mindspore": "mindformers"}
"""What `pip install lastgasp[...]` brings each with."""
OPTION = "--framework"


@dataclass(frozen=True)
class Split:
    """A command line of `lastgasp run`.

    Args:
        framework: what `--framework` named, or None.
        arguments: torchrun's command line.
    """

    framework: str | None
    arguments: list[str]


def split_framework(arguments: list[str], parser: ArgumentParser) -> Split:
    """Take `--framework NAME` out of the launcher's options, and let the framework's starter run the script.

    Args:
        arguments: options of torchrun and ours, the script, the script's arguments.
        parser: torchrun's; a fresh one, as it is changed.

    Raises:
        ConfigError: an unknown framework, or a program that is not a Python script.
        SystemExit: torchrun's parser does not understand the rest.
    """
    parser.add_argument(OPTION)
    parsed = parser.parse_args(arguments)
    if parsed.framework is None:
        return Split(None, arguments)
    if parsed.framework not in STARTERS:
        raise ConfigError(OPTION, parsed.framework, f"one of {sorted(STARTERS)}", "Fix it or leave it out.")
    if parsed.framework == "mindspore":
        allowed = "in front, or among options of msrun: this job is started by msrun and not by torchrun"
        raise ConfigError(OPTION, parsed.framework, allowed, "See `msrun --help` for its options.")
    if parsed.no_python:
        raise ConfigError(
            "--no-python", True, f"a Python script with {OPTION}", "Call lastgasp_megatron.install() in the program."
        )
    behind = len(parsed.training_script_args) + 1
    options = _without(arguments[:-behind], ("-m", "--module"))
    script = ["-m", *arguments[-behind:]] if parsed.module else arguments[-behind:]
    return Split(parsed.framework, [*options, "-m", STARTERS[parsed.framework], *script])


def _without(options: list[str], flags: tuple[str, ...]) -> list[str]:
    """`options` less the flags and `--framework` with its value."""
    left, skip = [], False
    for option in options:
        if skip or option in flags or option.startswith(f"{OPTION}="):
            skip = False
        elif option == OPTION:
            skip = True
        else:
            left.append(option)
    return left
