"""How many processes and nodes torchrun is asked for, checked before it ends in a traceback."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

from lastgasp.errors import ConfigError

_NUMBER = re.compile(r"\s*\+?[0-9]+\s*")


def require_numbers(nnodes: str, nproc_per_node: str, counted: Callable[[str], int]) -> None:
    """Refuse what torchrun cannot start.

    Args:
        nnodes, nproc_per_node: options of torchrun's, as they were given.
        counted: how many processes torchrun takes a word like `gpu` for; raises ValueError where there are none.

    Raises:
        ConfigError: names the option, what it was, and what is allowed.
    """
    least, _, most = nnodes.partition(":")
    if not (_positive(least) and (_positive(most) or ":" not in nnodes)) or int(least) > int(most or least):
        allowed = "a number of nodes from 1 on, or MIN:MAX with MIN not above MAX"
        raise ConfigError("--nnodes", nnodes, allowed, "Change it, or leave it out for a job on one node.")
    if _NUMBER.fullmatch(nproc_per_node) or nproc_per_node.startswith("-"):
        why = "" if _positive(nproc_per_node) else "Each process is one rank."
    else:
        why = _why_none(nproc_per_node, counted)
    if why:
        allowed = "a number of processes from 1 on, or 'auto', 'cpu', or a kind of device that this machine has ('gpu')"
        raise ConfigError("--nproc-per-node", nproc_per_node, allowed, why)


def _positive(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None and int(text) > 0


def _why_none(word: str, counted: Callable[[str], int]) -> str:
    try:
        return "" if counted(word) > 0 else "There is none here."
    except ValueError as error:
        return f"torchrun: {error}"


def max_restarts_given() -> bool:
    """Whether torchrun is told how many restarts there may be."""
    names = ("--max-restarts", "--max_restarts")
    return "PET_MAX_RESTARTS" in os.environ or any(arg.split("=")[0] in names for arg in sys.argv[1:])
