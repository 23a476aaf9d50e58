"""What torch does with a process one of whose collectives of NCCL has failed, and how it is left to lastgasp.

Source: docs/facts/nccl.md.
"""

from __future__ import annotations

from collections.abc import Mapping

WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""1, as torchrun sets it, and 3, the default: the process is ended a minute after NCCL has failed. 0: it is left.

With 1 the communicator is aborted before, so that for a moment what waits for a collective goes on with anything.
"""
QUIET = {WATCHDOG: "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
"""Read when a process group is made. Without the latter two a process is ended minutes later all the same, or its
next collective waits for a minute."""


def left_alone(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for ranks: all where they are to be recovered in place, torch's own default under `lastgasp run`.

    What is set stays. Where ranks are not recovered in place a collective that hangs may be one of a script without
    lastgasp, and is left to torch.
    """
    asked = environ.get("LASTGASP_RECOVERY", "").strip().lower() in ("auto", "retry", "replace")
    own = {WATCHDOG: "3"} if environ.get("LASTGASP_LAUNCHER") == "run" else {}
    return {name: value for name, value in (QUIET if asked else own).items() if name not in environ}
