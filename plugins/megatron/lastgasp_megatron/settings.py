"""Settings of Megatron's that are refused or overruled."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

import torch

from lastgasp.errors import ConfigError

log = logging.getLogger("lastgasp")


def users_handler(args: Any) -> Callable[..., Any] | None:
    """The user's SIGTERM handler; not that of --exit-signal-handler, which waits for all ranks in a collective."""
    found = signal.getsignal(signal.SIGTERM)
    if getattr(args, "exit_signal_handler", False):
        log.warning("--exit-signal-handler is not needed: lastgasp answers SIGTERM, also when a rank is dead")
        return None
    return found if callable(found) else None


def refuse(args: Any) -> None:
    """Refuse settings under which a step could be lost without a word.

    Raises:
        ConfigError: with the option that is in the way.
    """
    if getattr(args, "enable_high_availability", False):
        raise ConfigError("--enable-high-availability", True, "lastgasp or mindio_ttp, not both", "Leave one out.")
    if getattr(args, "non_persistent_ckpt_type", None) is not None:
        kind = args.non_persistent_ckpt_type
        raise ConfigError(
            "--non-persistent-ckpt-type", kind, "none: Megatron loads these without a check", "Leave it out."
        )
    if getattr(args, "ckpt_format", "torch") not in ("torch", "torch_dist"):
        raise ConfigError("--ckpt-format", args.ckpt_format, "torch or torch_dist", "Use one of them.")
    if getattr(args, "async_save", False) and getattr(args, "ckpt_format", "torch") == "torch":
        remedy = "Use --ckpt-format torch_dist, or leave --async-save out: Megatron would stop at its first save."
        raise ConfigError("--async-save", True, "only with --ckpt-format torch_dist", remedy)
    if not torch.distributed.is_initialized():
        raise ConfigError("torch.distributed", "not initialized", "initialize_megatron before the model", "Call it.")
