"""Stand-in for megatron.training of core_v0.12.1: its signatures (docs/facts/megatron.md §1), and a log of calls."""

import megatron.core

from .initialize import initialize_megatron
from .training import pretrain

__all__ = ["initialize_megatron", "megatron", "pretrain"]
