"""What torch does with a process one of whose collectives of NCCL has failed, and how it is left to lastgasp.

Source: docs/facts/nccl.md.
"""

from __future__ import annotations

from collections.abc import Mapping

WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""1, as torchrun sets it, and 3, the default: the process is ended a minute after NCCL has failed. 0: it is left."""
QUIET = {WATCHDOG: "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
"""Read when a process group is made. Without the latter two a process is ended minutes later all the same, or its
next collective waits for a minute."""


def left_alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for ranks that are to be recovered in place; none where that is not asked for, or they are set.

    Without lastgasp a collective that hangs would then be ended by nobody, so it is not done for all jobs.
    """
    asked = environ.get("LASTGASP_RECOVERY", "").strip().lower() in ("auto", "retry", "replace")
    return {name: value for name, value in QUIET.items() if asked and name not in environ}
