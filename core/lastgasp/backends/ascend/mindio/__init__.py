"""The recovery backend on MindCluster's MindIO TFT (`mindio_ttp`): its controller decides, our StateSource saves.

Importing this imports nothing of MindCluster; that happens when training begins (docs/facts/mindio_tft.md §15).
"""

from __future__ import annotations

from .backend import Control, MindioBackend

__all__ = ["Control", "MindioBackend"]
