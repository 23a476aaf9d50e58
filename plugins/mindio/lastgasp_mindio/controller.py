"""`mindio_ttp.controller_ttp`: where lastgasp has its controller is lastgasp's business; MindX is not driven.

Imports no framework, so that an agent's process can import it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from lastgasp.adapter import ConfigError
from lastgasp_mindio import checks
from lastgasp_mindio.notices import say

log = logging.getLogger("lastgasp")

ACTIONS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
_NO_MINDX = "MindX (TaskD, ClusterD) is not driven by lastgasp-mindio: {} has no effect, and 1 is returned"
_initialised = False


def _pop(name: str) -> Any:
    """The processor of this process, if it is a rank."""
    module = sys.modules.get("lastgasp_mindio.processor")
    return getattr(module, name, None)


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Check the arguments. A second call is accepted and ignored, as by MindIO.

    Raises:
        TypeError, ConfigError: what MindIO would not accept.
    """
    global _initialised
    checks.strict(
        rank=(rank, int), world_size=(world_size, int), enable_local_copy=(enable_local_copy, bool),
        enable_arf=(enable_arf, bool), enable_zit=(enable_zit, bool),
    )  # fmt: skip
    checks.within("world_size", world_size, 1, checks.MOST_RANKS)
    checks.within("rank", rank, -1, world_size - 1)
    say_refused(rank, enable_local_copy)
    _initialised = True


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """Check the arguments; nothing is bound. lastgasp's controller runs in the launcher, or is started with training.

    Raises:
        SystemExit: 2 for an address that MindIO could not bind, or without `tft_init_controller`; as there.
    """
    checks.strict(bind_ip=(bind_ip, str), port=(port, int), enable_tls=(enable_tls, bool), tls_info=(tls_info, str))
    try:
        checks.address(bind_ip, port)
        if not _initialised:
            raise ConfigError("tft_start_controller", bind_ip, "a call after tft_init_controller", "Call that first.")
    except ConfigError as error:
        log.error("%s", error)
        raise SystemExit(2) from error
    say_address(bind_ip, port)
    if enable_tls:
        say_tls()


def tft_destroy_controller() -> None:
    """Nothing to do: lastgasp's controller ends after the last rank."""
    global _initialised
    _initialised = False


def tft_query_high_availability_switch() -> bool:
    """Whether this process is a rank whose training is protected."""
    processor = _pop("PROCESSOR")
    return processor is not None and processor.protection is not None


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """1: refused, since nobody would call it."""
    checks.strict(action=(action, str))
    checks.callable_or_raise(func)
    if action not in ACTIONS:
        log.error("tft_register_mindx_callback: %r is none of %s", action, ", ".join(ACTIONS))
        return 1
    return _refused("tft_register_mindx_callback")


def tft_notify_controller_stop_train(
    fault_ranks: dict[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """1: refused."""
    return _refused("tft_notify_controller_stop_train")


def tft_notify_controller_on_global_rank(fault_ranks: dict[int, int], time: int = 1) -> int:
    """1: refused."""
    return _refused("tft_notify_controller_on_global_rank")


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """1: refused."""
    return _refused("tft_notify_controller_change_strategy")


def tft_notify_controller_prepare_action(action: str, fault_ranks: dict[int, int] | None = None) -> int:
    """1: refused."""
    return _refused("tft_notify_controller_prepare_action")


def tft_notify_controller_dump() -> int:
    """Have the healthy job saved, then end it: 0 where that begins. 1 in a process that is no protected rank."""
    processor = _pop("PROCESSOR")
    return 0 if processor is not None and processor.dump() else 1


def _refused(name: str) -> int:
    say(_NO_MINDX.format(name))
    return 1


def say_refused(rank: int, local_copy: bool) -> None:
    """Say what is asked for and not done."""
    if local_copy:
        say("local copies are not used: a rank inside its update is waited for (LASTGASP_FINISH_TIMEOUT)", rank)


def say_address(host: str, port: int) -> None:
    """Say that an address is not used."""
    where = "the launcher's" if os.environ.get("LASTGASP_CONTROLLER") else "one that rank 0 starts with the training"
    say(f"recoveries are led by lastgasp's controller ({where}); nothing listens at {host}:{port}", 0, logging.INFO)


def say_tls() -> None:
    """Say that MindIO's TLS settings are not used."""
    say("enable_tls and tls_info are not used: each job has a token, and LASTGASP_TLS_* set up TLS (docs/security.md)")
