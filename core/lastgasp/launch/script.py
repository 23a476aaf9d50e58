"""Runs a user's script as the main program after installing a plugin: what `lastgasp run --framework` starts."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lastgasp.errors import ConfigError


def run_script(arguments: Sequence[str], install: Callable[[], object]) -> None:
    """Run `SCRIPT [ARGS]` or `-m MODULE [ARGS]` after `install`; exceptions pass.

    Nothing is imported through `sitecustomize`, where an exception would be printed and ignored (megatron.md §4).

    Raises:
        ConfigError: there is no script.
    """
    if not arguments or arguments == ["-m"]:
        raise ConfigError("script", None, "SCRIPT [ARGS] or -m MODULE [ARGS]", "Name it.")
    install()
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")
