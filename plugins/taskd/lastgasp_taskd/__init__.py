"""TaskD's Python interface on lastgasp's registry, launcher and marks; the package `taskd` holds its names alone.

What the real one answers and accepts: docs/facts/taskd.md. Imports neither torch nor MindSpore by itself.
"""

from __future__ import annotations

import logging

log = logging.getLogger("lastgasp.taskd")

FOLLOWS = "7.0.0"
"""The version whose interface this is."""
VERSION = f"{FOLLOWS}+lastgasp"
"""`taskd.__version__`."""
