"""What the environment says about lastgasp itself: values that a job refuses, and names that nothing reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from lastgasp.config import GaspConfig, arena_of, asked_recovery, buddy_of, env_flag
from lastgasp.errors import ConfigError
from lastgasp.gasp.secret import FILE, TOKEN, Secret
from lastgasp.launch import fewer, warm
from lastgasp.options import Options, switched
from lastgasp.steps.settings import MarksConfig
from lastgasp.steps.writer import SWITCH as PURE_PYTHON
from lastgasp.testing.faults import kit_from_env
from lastgasp.variables import unknown

from .checks import Match, Severity, check
from .machine import Machine

NODES_ONLY = (FILE, TOKEN)
"""What jobs on one node do without."""


def refused(directory: str = "") -> list[ConfigError]:
    """What a job refuses that is started here and now; each setting is read by the code that a job has for it.

    Args:
        directory: of the checkpoints; empty where none is known.
    """
    readers: tuple[Callable[[], object], ...] = (
        lambda: GaspConfig.resolve(directory or "."),
        MarksConfig.resolve,
        lambda: Options.resolve(directory or "."),
        lambda: asked_recovery(None),
        lambda: arena_of(None),
        buddy_of,
        switched,
        lambda: warm.enabled(os.environ),
        fewer.asked,
        Secret.from_environment,
        kit_from_env,
        *(partial(env_flag, name) for name in ("LASTGASP_DISABLE", PURE_PYTHON)),
    )
    found: dict[str, ConfigError] = {}
    for read in readers:
        try:
            read()
        except ConfigError as error:
            found.setdefault(str(error), error)
    return list(found.values())


@check("settings", "error", "how-it-works.md §1", "A LASTGASP_ variable with a value that a job refuses")
def settings(machine: Machine) -> Iterator[Match]:
    """The secret is asked for in jobs on several nodes alone."""
    for error in machine.refused:
        severity: Severity | None = "warning" if error.field in NODES_ONLY else None
        where = " (a job on several nodes does not start)" if severity else ""
        yield Match(f"{error.field}={error.value!r}{where}: expected {error.allowed}", error.remedy, severity)


@check("unknown-variable", "warning", "how-it-works.md §1", "A LASTGASP_ variable that nothing reads")
def unknown_variable(machine: Machine) -> Iterator[Match]:
    """Misspelt, or of another version."""
    for text in unknown(machine.env):
        yield Match(text, "Correct or unset it.")
