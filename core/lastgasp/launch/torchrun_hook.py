"""Entry point of the group `torchrun.handlers`: loaded in every torchrun agent, with no flag given.

torch calls `factory` while it imports torch.distributed.elastic.rendezvous (facts/torchrun.md); the agent
class is swapped once torch.distributed.launcher.api has been imported. A job whose ranks do not use
lastgasp sees no difference.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import wrapt

TASKD_PATCH = "taskd.python.adaptor.patch"
"""Once imported, TaskD's agent runs the workers: its manager restarts them (facts/taskd.md §2)."""


def factory() -> Any:
    """Register the swap; returns what torch expects, a creator of rendezvous handlers."""
    if os.environ.get("LASTGASP_DISABLE") != "1":
        wrapt.register_post_import_hook(swap_agent, "torch.distributed.launcher.api")
    return _no_handler


def swap_agent(api: ModuleType) -> None:
    """Put our agent where torch.distributed.launcher.api takes its class from; TaskD's own stays where it is."""
    if TASKD_PATCH in sys.modules:
        return
    from lastgasp.launch.agent import GaspAgent

    vars(api)["LocalElasticAgent"] = GaspAgent


def _no_handler(params: object) -> Any:
    raise ValueError("--rdzv-backend lastgasp is no rendezvous backend; leave the flag out, or use c10d")
