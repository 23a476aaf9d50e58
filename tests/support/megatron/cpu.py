"""The shim of examples/megatron_gpt, under the name that the tests' own script imports."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples/megatron_gpt"))

from megatron_on_cpu import apply

__all__ = ["apply"]
