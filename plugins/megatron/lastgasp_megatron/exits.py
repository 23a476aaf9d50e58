"""What an exception that ended training says about its origin, and the exits with code 0 that are failures."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch.distributed

from lastgasp.errors import CheckpointError
from lastgasp.events import FaultKind

# How collectives fail when another rank is gone: gloo (facts/megatron.md §3), NCCL, HCCL, and the store.
_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Timed out waiting|gloo/transport|NCCL|HCCL"
    r"|Socket closed|recvValue failed|Broken pipe|DistNetworkError|DistStoreError"
)


class NotLoaded(CheckpointError):
    """Megatron gave up loading a checkpoint and would have ended with exit code 0, as if all were well."""


def kind_of(exception: BaseException) -> FaultKind:
    """exit and interrupt by type; peer where a collective says that another rank is gone."""
    if isinstance(exception, SystemExit):
        return "exit"
    if isinstance(exception, KeyboardInterrupt):
        return "interrupt"
    if isinstance(exception, torch.distributed.DistError):
        return "peer"
    if isinstance(exception, RuntimeError) and _PEER.search(str(exception)):
        return "peer"
    return "exception"


def cause_of(exception: BaseException) -> str:
    """One line: type and the first line of the text."""
    text = str(exception).strip().splitlines()
    return f"{type(exception).__name__}: {text[0][:300]}" if text else type(exception).__name__


def is_success(exception: BaseException) -> bool:
    """Whether it is an exit with code 0: --exit-interval and its kin end training like that."""
    return isinstance(exception, SystemExit) and exception.code in (None, 0)


def around_load(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """load_checkpoint, whose bare `sys.exit()` becomes an error (facts/megatron.md §2: six of its branches).

    Raises:
        NotLoaded: Megatron gave up; says what it gave up over.
    """
    try:
        return call(*args, **kwargs)
    except SystemExit as stop:
        if not is_success(stop):
            raise
        why = cause_of(stop.__context__) if stop.__context__ is not None else "its message is in the output above"
        raise NotLoaded(
            f"Megatron could not load the checkpoint and wanted to exit with code 0: {why}. Look at "
            "`lastgasp verify DIR`, and give --ckpt-step or --lastgasp-resume to load one that you trust."
        ) from stop
