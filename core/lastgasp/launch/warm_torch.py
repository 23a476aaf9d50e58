"""Puts the warm process where torch's launcher starts a rank: its handler keeps log files, signals and waiting.

Built on private names of torch 2.6 to 2.13 (docs/facts/torchrun.md); where they differ, ranks are started as ever.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from lastgasp.launch.warm import Ranks, Warm
from lastgasp.launch.warm_process import NoFork

_NAME = "get_subprocess_handler"
_EARLIER = ("entrypoint", "args", "env", "stdout", "stderr", "local_rank_id")
_MAKERS = (_EARLIER, (*_EARLIER, "numa_options"))
"""Its parameters: of 2.6 and 2.7, and of later ones."""


def differs() -> str:
    """In what torch's way to start a rank is not as we know it; empty where it is."""
    maker, popen = vars(api).get(_NAME), getattr(SubprocessHandler, "_popen", None)
    if maker is None or popen is None:
        return "this torch starts its ranks in another way"
    if tuple(inspect.signature(maker).parameters) not in _MAKERS:
        return f"{_NAME} of this torch takes other arguments"
    if tuple(inspect.signature(popen).parameters) != ("self", "args", "env"):
        return "SubprocessHandler._popen of this torch takes other arguments"
    return ""


@contextmanager
def forking(warm: Warm) -> Iterator[None]:
    """Inside, torch's launcher gets its ranks from `warm` where that has any."""
    if differs():
        yield
        return

    class Handler(SubprocessHandler):
        """torch's, for a rank that may be forked."""

        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            files = (None, self._stdout, self._stderr)
            streams = [number if file is None else file.fileno() for number, file in enumerate(files)]
            return warm.fork(args, env, streams) or super()._popen(args, env)

    original = vars(api)[_NAME]
    vars(api)[_NAME] = Handler
    try:
        yield
    finally:
        vars(api)[_NAME] = original


def ranks_of(context: PContext | None) -> Ranks | None:
    """How the ranks of this host were started; None where that was not by a command line."""
    if not isinstance(context, SubprocessContext):
        return None
    command = (str(context.entrypoint), *map(str, context.args[0]))
    return Ranks(command, tuple(context.envs.values()))


def replacement(
    warm: Warm, context: SubprocessContext, local: int, more: dict[str, str], cold: bool = False
) -> SubprocessHandler:
    """A new process for a dead rank of this host; its log files go on.

    Args:
        local: its number on this host; more: what its environment gets, or has another value of.
        cold: start one where none can be forked.

    Raises:
        NoFork: none can be forked.
        OSError: its log files cannot be opened, or it cannot be started.
    """
    handler = SubprocessHandler.__new__(SubprocessHandler)
    handler.local_rank_id = local
    handler._stdout, handler._stderr = (_appended(files[local]) for files in (context.stdouts, context.stderrs))
    command = (str(context.entrypoint), *map(str, context.args[local]))
    streams = [number if file is None else file.fileno() for number, file in
               enumerate((None, handler._stdout, handler._stderr))]  # fmt: skip
    environment = {**os.environ, **context.envs[local], **more}
    forked = warm.fork(command, environment, streams)
    if forked is None and not cold:
        raise NoFork(warm.refused)
    vars(handler)["proc"] = forked or handler._popen(command, environment)
    return handler


def _appended(path: str | None) -> Any:
    return open(path, "a") if path else None
