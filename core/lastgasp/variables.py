"""The names of lastgasp's environment variables."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Mapping

PREFIX = "LASTGASP_"
_NAMES = (
    "AGAIN", "ARENA", "ATTEMPT", "ATTEMPTS", "BACKEND", "BIND", "BUDDY", "CODE", "CONTROLLER",
    "CONTROLLER_PROCESS", "DIR", "DISABLE", "FAULT", "FAULT_LOG", "FINISH_TIMEOUT", "HANG_TIMEOUT", "IMPORTED",
    "INCARNATION", "INSECURE", "JOB", "JOB_MARK", "JOINS", "KEEP", "LAUNCHER", "LED", "LOG", "MARKS",
    "MINDIO_LAYOUT", "MIN_RANKS", "NO_CONTROLLER", "PARENT", "PREPARED", "PROFILING_DIR", "PROFILING_LIMIT_MB",
    "PURE_PYTHON", "RECOVERY", "REQUIRE_MANIFEST", "RESET_FILE", "RESUME", "RING_DIR", "ROUND", "RUNTIME_DIR",
    "SAVE_TIMEOUT", "SHA256", "SIGN_IN", "SINCE", "SWITCH_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN",
    "TOKEN_FILE", "WARM",
)  # fmt: skip
KNOWN = frozenset(PREFIX + name for name in _NAMES)
"""All that anything of lastgasp's or its plugins' reads, whether users or its own processes set them."""


def unknown(env: Mapping[str, str]) -> Iterator[str]:
    """A sentence about each variable of lastgasp's that nothing reads: misspelt, or of another version."""
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in KNOWN:
            meant = difflib.get_close_matches(name, KNOWN, 1, 0.8)
            yield f"{name} is set, and nothing reads it.{f' Did you mean {meant[0]}?' if meant else ''}"


def warn_of_unknown() -> None:
    """Log a warning about each such variable of this process."""
    for text in unknown(os.environ):
        logging.getLogger("lastgasp").warning("%s", text)
