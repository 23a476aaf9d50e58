"""Faults for tests and drills of an adapter (`LASTGASP_FAULT`)."""

from __future__ import annotations

from lastgasp.testing import faults
from lastgasp.testing.archive import FaultyArchive
from lastgasp.testing.faults import FaultKit, install, kit_from_env

__all__ = [
    "FaultKit",
    "FaultyArchive",
    "faults",
    "install",
    "kit_from_env",
]
