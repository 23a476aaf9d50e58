"""What a rank has imported, for the launcher of its host, which prepares a process from which it can be forked again.

Written once, when the first step is completed: by then everything that a step needs has been imported, torch's
compiler included, which the first step of an optimizer brings in.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

VARIABLE = "LASTGASP_IMPORTED"
"""Set by the launcher for its ranks: the file that the first of them writes to."""
LIBRARIES = ("site-packages", "dist-packages")
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
TEMPLATES = "torch.distributed.nn.jit.instantiator"
"""In torch 2.7 it writes modules to a temporary folder of this process (`launch.warm_templates`)."""
_NOT = ("torch._inductor", "triton")
"""Importing these may start torch's compile workers."""


class Imported(msgspec.Struct, frozen=True):
    """What one rank reports.

    Attributes:
        modules: all, in the order in which they were imported, with the file that each came from (`origin`); of
            `__main__` the script.
        environment: variables that the rank has set or changed itself; None: it has deleted one.
    """

    modules: dict[str, str]
    environment: dict[str, str | None] = {}

    def encoded(self) -> bytes:
        """For the launcher; paths and values may be no UTF-8, which msgspec does not write."""
        return json.dumps(msgspec.structs.asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Imported:
        """Of what `encoded` has made. Raises ValueError: it is something else."""
        try:
            return msgspec.convert(json.loads(data), cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None


def report() -> None:
    """On a rank: tell the launcher, where it asks for that. The first rank of a host does. Never raises."""
    path = os.environ.get(VARIABLE)
    if not path or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    modules = {name: origin(module) for name, module in list(sys.modules.items())}
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    modules["__main__"] = os.path.abspath(script) if script else ""
    with contextlib.suppress(OSError, ValueError):  # the launcher is gone
        line = Imported(modules, changed(at_start(), os.environ)).encoded() + b"\n"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(file, line)
        finally:
            os.close(file)


def libraries(modules: Mapping[str, str]) -> Iterator[str]:
    """The names of modules that lie in the standard library, in site-packages, or are lastgasp's own.

    Args:
        modules: names with origins.
    """
    for name, path in modules.items():
        if not path or name == "__main__" or name.endswith(".__main__"):
            continue
        if any(name == one or name.startswith(f"{one}.") for one in _NOT):
            continue
        if is_installed(path) or name.partition(".")[0].startswith("lastgasp"):
            yield name


def is_installed(path: str) -> bool:
    """Whether a file lies in the standard library or in a folder of packages."""
    return path.startswith(_STANDARD) or any(f"{os.sep}{folder}{os.sep}" in path for folder in LIBRARIES)


def origin(module: Any) -> str:
    """Where it was loaded from; empty for what cannot be imported from a file, or from one of this process alone."""
    try:
        spec = vars(module).get("__spec__")
        path = str(spec.origin or "") if spec is not None and spec.name == module.__name__ else ""
        return "" if path and os.path.dirname(path) == templates_in(sys.modules) else path
    except Exception:  # a stand-in that somebody has put into sys.modules
        return ""


def templates_in(modules: Mapping[str, Any]) -> str:
    """The folder that torch has written modules to; empty where it has none."""
    module = modules.get(TEMPLATES)
    if module is None or not hasattr(module, "_TEMP_DIR"):
        return ""
    return str(module.INSTANTIATED_TEMPLATE_DIR_PATH)


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Variables that differ."""
    names = {*before, *now}
    return {name: now.get(name) for name in sorted(names) if before.get(name) != now.get(name)}


def at_start() -> dict[str, str]:
    """The environment that this process was started with."""
    with open("/proc/self/environ", "rb") as file:
        lines = os.fsdecode(file.read()).split("\0")
    return {name: value for name, _, value in (line.partition("=") for line in lines) if name}
