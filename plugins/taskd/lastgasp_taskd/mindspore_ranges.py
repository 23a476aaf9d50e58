"""`mindspore.profiler.mstx` off Ascend, where MindSpore's own records nothing."""

from __future__ import annotations

import importlib
import os

from lastgasp.adapter.worker import session_here

from .ranges import Ranges
from .worker import Here

PRELOADED = "libmspti.so"


def serve(worker: Here) -> None:
    """Put it in place, unless the profiler's library is loaded, which then gets MindSpore's own ranges."""
    if PRELOADED in os.environ.get("LD_PRELOAD", "") and os.path.exists("/dev/davinci0"):
        return
    try:
        profiler = importlib.import_module("mindspore.profiler")
    except ImportError:
        return
    vars(profiler)["mstx"] = Ranges(worker, session_here)
