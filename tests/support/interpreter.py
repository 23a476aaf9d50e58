"""What an interpreter looks like from inside and outside; run as a script it prints that.

    interpreter.py [WHAT [ARGUMENT]]

WHAT: `exit N`, `die N` (os._exit), `raise TEXT`, `signal N`, `interrupt`, or `wait PATH` until that file exists.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def interpreter() -> dict[str, Any]:
    """Equal in a fresh interpreter and in a forked rank of the same command, but for `pid`, `parent` and `draws`."""
    status = Path("/proc/self/status").read_text().splitlines()
    main = sys.modules["__main__"]
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "draws": [random.getrandbits(64), multiprocessing.current_process().authkey.hex()],
        "argv": sys.argv,
        "original": sys.orig_argv,
        "folder": sys.path[0],
        "path": sys.path,
        "main": {name: re.sub("0x[0-9a-f]+", "", repr(value)) for name, value in sorted(vars(main).items())
                 if name.startswith("__") and name not in ("__annotations__", "__builtins__", "__loader__")},
        "descriptors": sorted(name for number in os.listdir("/proc/self/fd") if int(number) > 2
                              and not (name := _target(number)).startswith("/proc/") and "libffi.so" not in name),
        "masks": [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt", "Umask", "CapEff"))],
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0"),
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "nice": os.nice(0),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "working": os.getcwd(),
        "threads": threading.active_count(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "flags": str(sys.flags),
        "children": multiprocessing.parent_process() is not None,
    }  # fmt: skip


def _target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return "/proc/"


def fail(text: str) -> None:
    """For a traceback of two frames."""
    raise ValueError(text)


def main() -> None:
    """Print, then end as requested."""
    print(json.dumps(interpreter() | {"environment": dict(os.environ)}))
    atexit.register(print, "atexit")
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    argument = sys.argv[2] if len(sys.argv) > 2 else ""
    if what == "exit":
        sys.exit(int(argument))
    if what == "die":
        os._exit(int(argument))
    if what == "raise":
        fail(argument)
    if what == "signal":
        os.kill(os.getpid(), int(argument))
    if what == "interrupt":
        signal.raise_signal(signal.SIGINT)
    while what == "wait" and not os.path.exists(argument):
        time.sleep(0.01)


if __name__ == "__main__":
    main()
