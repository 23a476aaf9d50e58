"""--use-checkpoint-args: the model's settings from a checkpoint, which the script asks for before training begins."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from lastgasp.adapter import argument, cause_of
from lastgasp.adapter.checkpoint import Candidate, candidates
from lastgasp_megatron.exits import around_load
from lastgasp_megatron.steps import wrap
from lastgasp_megatron.tracker import LAYOUT, read_tracker, tracker_saying

log = logging.getLogger("lastgasp")

_REFUSED = (Exception, CheckpointException)  # torch's own is no Exception


def around_load_args(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """load_args_from_checkpoint; where it cannot read what the tracker in --load names, of the newest that it can.

    Each rank finds it alone, since there are no process groups yet; all see the same files. Which checkpoint is loaded
    is agreed on later. Over a damaged one, or a damaged tracker, Megatron alone exits with code 0.

    Raises:
        NotLoaded: there is no other, or the user named this one.
        Exception, CheckpointException: the same, as Megatron raised it.
    """
    given = argument(call, "args", args, kwargs)
    load = getattr(given, "load", None) if argument(call, "load_arg", args, kwargs, "load") == "load" else None
    if not load or getattr(given, "ckpt_step", None):
        return around_load(call, args, kwargs)
    refused: BaseException | None = None
    if read_tracker(Path(load)).state != "missing":
        try:
            return around_load(call, args, kwargs)
        except _REFUSED as error:
            refused = error
    why = "there is no tracker" if refused is None else cause_of(refused)
    for one in candidates([Path(load).absolute()], LAYOUT):
        with suppress(*_REFUSED):
            result = _of(one, call, args, kwargs)
            if os.environ.get("RANK", "0") == "0":
                log.warning("--use-checkpoint-args: the model's settings are taken from %s (%s)", one.path, why)
            return result
    if refused is not None:
        raise refused
    return call(*args, **kwargs)


def _of(one: Candidate, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from megatron.training import checkpointing

    with tracker_saying(one.step or 0) as path:
        undo = wrap(checkpointing, "get_checkpoint_tracker_filename", lambda *_: path)
        try:
            return around_load(call, args, kwargs)
        finally:
            undo()
