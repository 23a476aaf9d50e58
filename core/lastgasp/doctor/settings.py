"""What the environment says about lastgasp itself: values that a job refuses, and names that nothing reads."""

from __future__ import annotations

import difflib
import importlib.util
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path

from lastgasp.config import GaspConfig, arena_of, asked_recovery, buddy_of, env_flag
from lastgasp.errors import ConfigError
from lastgasp.gasp.secret import FILE, TOKEN, Secret
from lastgasp.launch import fewer, warm
from lastgasp.options import NAMES, Options, switched
from lastgasp.steps.settings import MarksConfig
from lastgasp.steps.writer import SWITCH as PURE_PYTHON
from lastgasp.testing.faults import kit_from_env

from .checks import Match, Severity, check
from .machine import Machine

PREFIX = "LASTGASP_"
NODES_ONLY = (FILE, TOKEN)
"""What jobs on one node do without."""
_NAME = re.compile(rf"{PREFIX}[A-Z0-9_]*[A-Z0-9]")


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


def unknown(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that nothing of lastgasp's reads, each with the one that was probably meant, or empty."""
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in known():
            yield name, next(iter(difflib.get_close_matches(name, known(), 1, 0.8)), "")


@cache
def known() -> frozenset[str]:
    """Every name in the source of lastgasp and its plugins, and those that are made of a setting's."""
    names = {f"{PREFIX}{name.upper()}" for name in NAMES}
    for package in ("lastgasp", *(one.name for one in pkgutil.iter_modules() if one.name.startswith("lastgasp_"))):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in Path(folder).rglob("*.py"):
                names.update(_NAME.findall(path.read_text(errors="replace")))
    return frozenset(names)


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
    for name, meant in unknown(machine.env):
        yield Match(f"{name} is set, and nothing reads it", f"Did you mean {meant}?" if meant else "Unset it.")
