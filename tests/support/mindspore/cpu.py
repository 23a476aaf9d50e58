"""The bridge of examples/mindformers_llama, under the name that the tests' own script imports."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples/mindformers_llama"))

from mindformers_on_cpu import apply

__all__ = ["apply"]
