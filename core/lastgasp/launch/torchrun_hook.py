"""Entry point of the group `torchrun.handlers`: loaded in every torchrun agent, with no flag given.

torch calls `factory` while it imports torch.distributed.elastic.rendezvous (facts/torchrun.md); the agent
class is swapped once torch.distributed.launcher.api has been imported. A job whose ranks do not use
lastgasp sees no difference.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import wrapt


def factory() -> Any:
    """Register the swap; returns what torch expects, a creator of rendezvous handlers."""
    if os.environ.get("LASTGASP_DISABLE") != "1":
        wrapt.register_post_import_hook(_swap_agent, "torch.distributed.launcher.api")
    return _no_handler


def _swap_agent(api: ModuleType) -> None:
    from lastgasp.launch.agent import GaspAgent

    api.LocalElasticAgent = GaspAgent  # type: ignore[attr-defined]


def _no_handler(params: object) -> Any:
    raise ValueError("--rdzv-backend lastgasp is no rendezvous backend; leave the flag out, or use c10d")
