"""What Lightning's entry point needs to know of recovery in place; imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lastgasp.adapter.again import Recovery

RECOVERY = "LASTGASP_RECOVERY"
DEFAULT: Recovery = "restart"
"""Of `recovery`, where neither the script nor the environment says it."""


class Enters:
    """A callback that protects its trainer's fits; `recovery` as `LastGasp` says it.

    Attributes:
        asked: the script or the environment says it, not the default.
        looked_at: when a fit began, it was known that this callback is there.
    """

    recovery: Recovery = DEFAULT
    asked = False
    looked_at = False
