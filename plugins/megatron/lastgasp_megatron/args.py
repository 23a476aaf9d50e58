"""Options: a group `--lastgasp-*` in Megatron's own parser, and `LASTGASP_*`. An option beats the environment."""

from __future__ import annotations

import inspect
import logging
import os
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastgasp.adapter import OPTION_NAMES, ConfigError, Options

log = logging.getLogger("lastgasp")

Provider = Callable[[ArgumentParser], ArgumentParser]

_HELP = {
    "dir": "where gasps and incidents go, the same on all ranks; default: LASTGASP_DIR, else --save",
    "keep": "how many gasps to keep; default 3. Megatron's own checkpoints are never removed",
    "resume": "auto (default): the newest iteration that verifies on all ranks; the path of an iter_* directory; or "
    "never: only what this job saved, and until there is any what the tracker in --load names, unverified",
    "hang_timeout": "seconds without progress after which ranks count as hung; auto (default) learns it",
    "save_timeout": "seconds that a save after a fault may take; default 600",
    "finish_timeout": "seconds that a rank inside its update gets to finish it; default 10",
    "recovery": "which faults are answered without a restart: auto (default on CPUs with gloo, under a launcher), "
    "retry, replace; restart (default elsewhere): none; save: the job ends after the save",
    "arena": "which steps' shards that only one rank holds are copied into memory that outlives it: auto (default), "
    "every N, off",
    "marks": "what is marked in each step, for `lastgasp report`: 1 (default) for all but the collectives, 0 for "
    "nothing, all, none (until `lastgasp switch`), or names out of step, forward, dataloader, save, comm, with commas",
    "profiling_dir": "where the marks' files go; default: MindCluster's directory where there is one, else "
    "`profiling` in that of the gasps",
    "profiling_limit_mb": "MB that the marks' files may take; beyond it the oldest go; default 5000",
}
_FLAGS = {
    "sha256": "also write SHA-256 digests into manifests",
    "require_manifest": "never load a checkpoint that has no manifest; default: accept it with a warning",
}


def add_options(parser: ArgumentParser) -> ArgumentParser:
    """Add the group, unless it exists already."""
    if "--lastgasp-dir" in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(title="lastgasp")
    for name, text in _HELP.items():
        group.add_argument(f"--lastgasp-{name.replace('_', '-')}", default=None, help=text.replace("%", "%%"))
    for name, text in _FLAGS.items():
        option = f"--lastgasp-{name.replace('_', '-')}"
        group.add_argument(option, action="store_const", const=True, default=None, help=text)
    return parser


def around_parse_args(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Megatron's parse_args, with lastgasp's group if this version has `extra_args_provider`."""
    signature = inspect.signature(call)
    if "extra_args_provider" not in signature.parameters:
        return call(*args, **kwargs)
    bound = signature.bind(*args, **kwargs)
    bound.arguments["extra_args_provider"] = _with_options(bound.arguments.get("extra_args_provider"))
    return call(*bound.args, **bound.kwargs)


def _with_options(theirs: Provider | None) -> Provider:
    def provider(parser: ArgumentParser) -> ArgumentParser:
        return add_options(parser if theirs is None else theirs(parser))

    return provider


def options_of(args: Any) -> Options:
    """The options in Megatron's namespace `args`, the environment and the defaults.

    Raises:
        ConfigError: a value that is not allowed, or no directory at all.
    """
    directory = _directory(args)
    if directory is None:
        raise ConfigError(
            "--lastgasp-dir", None, "a directory for the gasps", "Give --save, --lastgasp-dir or LASTGASP_DIR."
        )
    return Options.resolve(Path(directory), **{name: getattr(args, f"lastgasp_{name}", None) for name in OPTION_NAMES})


def saves(args: Any) -> bool:
    """Whether there is a directory to save in; where not, that is said once, by rank 0.

    Without --save Megatron writes nothing (a trial, a profile). What it loads from may belong to others.
    """
    if _directory(args) is not None:
        return True
    if os.environ.get("RANK", "0") == "0":
        log.warning("without --save nothing is saved after a fault: lastgasp takes no part in this training. Give "
                    "--save, --lastgasp-dir or LASTGASP_DIR to have it protected")  # fmt: skip
    return False


def _directory(args: Any) -> str | Path | None:
    given = getattr(args, "lastgasp_dir", None), os.environ.get("LASTGASP_DIR"), getattr(args, "save", None)
    return next((value for value in given if value), None)
