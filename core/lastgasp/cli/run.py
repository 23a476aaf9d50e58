"""`lastgasp run`: torchrun's command line, with restarts and meaningful exit codes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator

import click

from lastgasp import exitcodes
from lastgasp.cli._ascend import helpers_running, prepared_here, start_anew_if_needed
from lastgasp.errors import MissingExtra
from lastgasp.launch.ascend import Prepared, render
from lastgasp.launch.framework import EXTRAS, STARTERS, split_framework
from lastgasp.launch.msrun import FRAMEWORK, msrun_arguments, taskds_msrun, with_join
from lastgasp.launch.msrun import launch as msrun
from lastgasp.output import keep_open, write_error

_DEFAULTS = {"--max-restarts": "32767", "--monitor-interval": "0.01"}
_RENDEZVOUS = ("--nnodes", "--rdzv", "--master", "--node-rank", "--standalone")

EPILOG = """
\b
Examples:
  lastgasp run --nproc-per-node 2 train.py --epochs 3
  lastgasp run --nproc-per-node 8 --framework megatron pretrain_gpt.py --save ckpts --load ckpts ...
  lastgasp run --framework mindspore --worker_num 8 --local_worker_num 8 run_mindformer.py --config llama.yaml
"""


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=EPILOG,
)
@click.option("--dry-run", is_flag=True, help="Given first: print the environment and the commands, and end.")
@click.option("--min-ranks", type=click.IntRange(1), help="Given first: go on with fewer ranks, down to this number, "
              "where one is lost and nobody can take its place.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[TORCHRUN OPTIONS] SCRIPT [ARGS]...")
def run(dry_run: bool, min_ranks: int | None, arguments: tuple[str, ...]) -> None:
    """Start a job as torchrun does; after a fault its survivors save, and it restarts automatically.

    Takes all of torchrun's options. Defaults that differ: --max-restarts 32767 (it stops automatically after three
    restarts in a row without a new step), --monitor-interval 0.01, and --standalone for a job on one node.
    With --framework megatron the script needs no line of lastgasp.

    With --framework mindspore in front it takes msrun's options in place of torchrun's; --join is True unless given.
    The logs of an attempt that failed are kept as worker_0.attempt0.log.

    On Ascend with MindCluster it also does what a start script does otherwise: preloads libmspti.so and libtaskd.so,
    sets the variables that the job's strategies need, starts TaskD's manager on the first pod and its proxy where no
    agent of TaskD's does, and says so.

    Exit codes: 0 done, 83 stopped and saved, 84 stopped with nothing to save, 85 stopped and could not save,
    86 no progress, 87 a rank refused to start, 128 and more stopped before any rank had joined, 1 anything else.
    """
    keep_open()
    if min_ranks is not None:
        os.environ["LASTGASP_MIN_RANKS"] = str(min_ranks)
    prepared = prepared_here()
    under_msrun = msrun_arguments(arguments)
    if dry_run:
        _check_settings()
        with _hinting(arguments):
            click.echo(render(prepared, _command(list(arguments), under_msrun, prepared)))
        return
    start_anew_if_needed(prepared, arguments)
    os.environ["LASTGASP_LAUNCHER"] = "run"
    with helpers_running(prepared):
        if under_msrun is None:
            with _hinting(arguments):
                _under_torchrun(list(arguments), prepared)
        else:
            _require(FRAMEWORK)
            sys.exit(taskds_msrun(under_msrun) if prepared.taskd_msrun else msrun(under_msrun))


@contextlib.contextmanager
def _hinting(arguments: tuple[str, ...]) -> Iterator[None]:
    """Say what torchrun's parser, which refuses our own options among its own, cannot know."""
    try:
        yield
    except SystemExit as stop:
        if stop.code == 2 and {word.partition("=")[0] for word in arguments} & {"--dry-run", "--min-ranks"}:
            write_error("lastgasp: --dry-run and --min-ranks come first, before torchrun's options.")
        raise


def _command(arguments: list[str], under_msrun: list[str] | None, prepared: Prepared) -> list[str]:
    """What runs in the end, as a user would type it."""
    if under_msrun is not None:
        return ["msrun", *with_join(under_msrun)]
    from torch.distributed.run import get_args_parser

    from lastgasp.launch.main import require_secret

    complete = _complete(split_framework(arguments, get_args_parser()).arguments, get_args_parser(), prepared)
    require_secret(str(get_args_parser().parse_args(complete).nnodes))
    return ["torchrun", *complete]


def _check_settings() -> None:
    """Refuse what the launcher or its ranks would, and name variables that nothing reads.

    Raises:
        ConfigError: the first that is refused.
    """
    from lastgasp.doctor.settings import NODES_ONLY, refused
    from lastgasp.variables import unknown

    for error in refused(os.environ.get("LASTGASP_DIR", "")):
        if error.field not in NODES_ONLY:
            raise error
    for text in unknown(os.environ):
        write_error(f"lastgasp: {text}")


def _under_torchrun(arguments: list[str], prepared: Prepared) -> None:
    try:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import get_args_parser

        from lastgasp.launch.main import last_ending, launch
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "torch", "lightning") from error
    try:
        split = split_framework(arguments, get_args_parser())
        _require(split.framework)
        complete = _complete(split.arguments, get_args_parser(), prepared)
        if prepared.taskd_agent:  # its agent hands these to the workers, and does not look at the command line
            from lastgasp.backends.ascend.agent import master_of

            os.environ |= master_of(vars(get_args_parser().parse_args(complete)))
        launch(complete, prepared.taskd_agent)
    except ChildFailedError as error:
        write_error(str(error))
        sys.exit(last_ending() or 1)


def _require(framework: str | None) -> None:
    if framework is not None and importlib.util.find_spec(STARTERS[framework].partition(".")[0]) is None:
        raise MissingExtra(STARTERS[framework].partition(".")[0], EXTRAS[framework])


def _complete(arguments: list[str], parser: ArgumentParser, prepared: Prepared) -> list[str]:
    if not prepared.taskd_agent:
        return with_defaults(arguments, parser)
    from lastgasp.backends.ascend.agent import static_rendezvous

    given = _given(arguments, parser)
    names = frozenset(name.removeprefix("--").replace("-", "_") for name in given)
    static = static_rendezvous(vars(parser.parse_args(arguments)), names, os.environ)
    return with_defaults([text for pair in static.items() for text in pair] + arguments, parser)


def with_defaults(arguments: list[str], parser: ArgumentParser) -> list[str]:
    """Put our defaults in front of what was given neither here nor in torchrun's environment (`PET_*`).

    Args:
        arguments: the command line: torchrun's options, the script, the script's arguments.
        parser: torchrun's own, which knows where its options end.
    """
    given = _given(arguments, parser)
    extra = [text for name, value in _DEFAULTS.items() if name not in given for text in (name, value)]
    if not any(name.startswith(_RENDEZVOUS) for name in given):
        extra.append("--standalone")
    return extra + arguments


def _given(arguments: list[str], parser: ArgumentParser) -> list[str]:
    """Long names of the given options."""
    return [_long(option) for option in _options(arguments, parser)] + [_long(name) for name in _environment()]


def _options(arguments: list[str], parser: ArgumentParser) -> list[str]:
    """The launcher's own options: everything before the script."""
    behind = len(parser.parse_args(arguments).training_script_args) + 1
    return [argument for argument in arguments[:-behind] if argument.startswith("-")]


def _environment() -> list[str]:
    return [f"--{name[4:].lower()}" for name, value in os.environ.items() if name.startswith("PET_") and value]


def _long(option: str) -> str:
    return option.split("=")[0].replace("_", "-")


__all__ = ["exitcodes", "run", "with_defaults"]
