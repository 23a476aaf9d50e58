"""The exits with code 0 that are failures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lastgasp.adapter import CheckpointError, Verdict, cause_of, is_success
from lastgasp.adapter.torch import exception_origin


class NotLoaded(CheckpointError):
    """Megatron gave up loading a checkpoint and would have ended with exit code 0, as if all were well."""


_VERDICTS = {
    "EXIT_CODE_RESUME_TO_DISAMBIGUATE": "Megatron's rerun machine got an unexpected result (NaN, infinite or a spike) "
    "twice, and asks for a start on other devices, which shows whether data or hardware is to blame",
    "EXIT_CODE_FAILED_ON_RESULT_VALIDATION": "Megatron's rerun machine rejects a result (NaN, infinite or a spike)",
}
_CODES = {"EXIT_CODE_RESUME_TO_DISAMBIGUATE": 16, "EXIT_CODE_FAILED_ON_RESULT_VALIDATION": 17}


def verdict_of(exception: BaseException) -> Verdict | None:
    """What Megatron says by ending `train` with one of its rerun machine's exit codes; None otherwise."""
    if not isinstance(exception, SystemExit):
        return None
    machine = sys.modules.get("megatron.core.rerun_state_machine")
    for name, code in _CODES.items():
        code = int(getattr(machine, name, code))
        if exception.code == code:
            return Verdict(code, f"{_VERDICTS[name]}; its own lines above name rank, device and loss")
    return None


def is_about_content(error: BaseException) -> bool:
    """Whether an error of `load_checkpoint`, or the reason that Megatron gave up, is about the checkpoint."""
    stop = error.__cause__ if isinstance(error, NotLoaded) else None
    if stop is not None and stop.__context__ is not None:
        error = stop.__context__
    return exception_origin.is_about_content(error)


def around_load(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """load_checkpoint, whose bare `sys.exit()` becomes an error (docs/facts/megatron.md §2: six of its branches).

    Raises:
        NotLoaded: Megatron gave up; with the reason.
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


def ends_at(args: Any, step: int) -> str:
    """The option by which Megatron's loop ends behind that iteration; empty where it goes on."""
    if (every := getattr(args, "exit_interval", None)) and step % int(every) == 0:
        return "--exit-interval"
    return "--phase-transition-iterations" if step in (getattr(args, "phase_transition_iterations", None) or ()) else ""
