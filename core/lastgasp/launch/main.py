"""torchrun's main function with lastgasp's agent."""

from __future__ import annotations

import torch.distributed.launcher.api as api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import determine_local_world_size, get_args_parser
from torch.distributed.run import run as torch_run

from lastgasp import exitcodes, user_signals
from lastgasp.gasp.secret import Secret
from lastgasp.launch import agent
from lastgasp.launch.numbers import require_numbers
from lastgasp.launch.torchrun_hook import swap_agent


def launch(arguments: list[str], taskd: bool = False) -> None:
    """Run one job to its end.

    Args:
        arguments: torchrun's command line.
        taskd: TaskD's agent runs the workers instead of lastgasp's.

    Raises:
        ConfigError: the job spans several nodes that share no secret, or numbers of nodes or processes are wrong.
        ChildFailedError: ranks failed and no restart was left.
        SystemExit: the job made no progress (86), or the launcher was asked to stop (83, 84 or 85).
    """
    if taskd:
        from lastgasp.backends.ascend.agent import use_taskd_agent

        use_taskd_agent()
    swap_agent(api)
    user_signals.outlive()
    try:
        options = get_args_parser().parse_args(arguments)
        require_numbers(str(options.nnodes), str(options.nproc_per_node), determine_local_world_size)
        require_secret(str(options.nnodes))
        torch_run(options)  # type: ignore[no-untyped-call]
    except SignalException as stop:
        raise SystemExit(last_ending() or 128 + stop.sigval) from stop


def require_secret(nnodes: str) -> None:
    """Require a secret or TLS in a job that may span several nodes.

    Args:
        nnodes: torchrun's: `N` or `MIN:MAX`.

    Raises:
        ConfigError: there is neither, or it cannot be used.
    """
    if nnodes.split(":")[-1] != "1":
        Secret.from_environment().require(f"this job may span several nodes (--nnodes {nnodes})")


def last_ending() -> int | None:
    """The exit code for how the last recovery of this launcher ended; None when there was none."""
    return exitcodes.of_ending(agent.last_ending)
