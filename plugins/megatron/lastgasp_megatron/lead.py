"""Who leads the recoveries of MindSpeed-LLM's jobs with a recover-strategy: lastgasp, or its own adapter of MindIO."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping, Sequence
from typing import Any

log = logging.getLogger("lastgasp")

FROM_OPERATOR, KEPT_AS = "HIGH_AVAILABILITY", "HIGH_AVAILABILITY_STRATEGY"
_FLAG = "--enable-high-availability"


def take_the_lead(env: MutableMapping[str, str], arguments: Sequence[str]) -> bool:
    """Keep the operator's strategies from MindSpeed-LLM, which would turn them into `--enable-high-availability`.

    They stay readable for lastgasp under MindIO's own name. Where the user gave the flag, nothing is changed: then
    MindSpeed-LLM's adapter leads (`leads_itself`).

    Returns:
        Whether something was changed.
    """
    if FROM_OPERATOR not in env or _FLAG in arguments:
        return False
    env.setdefault(KEPT_AS, env[FROM_OPERATOR])
    del env[FROM_OPERATOR]
    return True


def leads_itself(args: Any) -> bool:
    """Whether MindSpeed-LLM's own adapter of MindIO leads this training; said once, by rank 0.

    Then lastgasp takes no part in it: two leaders would save in each other's way, and the job must run.
    """
    if not getattr(args, "enable_high_availability", False):
        return False
    if os.environ.get("RANK", "0") == "0":
        log.warning(
            "MindSpeed-LLM's own adapter of MindIO leads this training (enable_high_availability): lastgasp adds "
            "nothing to it. To have lastgasp lead, leave %s out and start with `lastgasp run --framework megatron`, or "
            "import lastgasp_megatron before MindSpeed",
            _FLAG,
        )
    return True
