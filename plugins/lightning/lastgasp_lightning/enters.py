"""What Lightning's entry point needs to know of recovery in place; imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lastgasp.adapter.again import Recovery


class Enters:
    """A callback that protects its trainer's fits.

    Attributes:
        asked: `recovery`, where the script or the environment says it.
        recovery: what it is for the fit in progress.
        looked_at: when a fit began, it was known that this callback is there.
    """

    asked: Recovery | None = None
    recovery: Recovery = "restart"
    looked_at = False
