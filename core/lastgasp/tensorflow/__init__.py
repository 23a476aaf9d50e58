"""TensorFlow's checkpoints: a manifest for each, and a state file that names a good one. Needs no TensorFlow."""

from __future__ import annotations

from .layout import TensorFlowLayout
from .prefixes import newest_good, seal

__all__ = ["TensorFlowLayout", "newest_good", "seal"]
