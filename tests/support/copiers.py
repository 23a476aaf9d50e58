"""Who copies and compares at each boundary, for tests that both must pass: the extension in C, and Python."""

from __future__ import annotations

import pytest

from lastgasp.pytorch import compiled
from lastgasp.steps.writer import SWITCH

COPIERS = ("c", "python")


def use(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have it be this one, or skip the test."""
    if kind == "python":
        monkeypatch.setenv(SWITCH, "1")
    elif compiled.compiled() is None:
        pytest.skip("the extension lastgasp.pytorch._copies is not built: pip install -e . where there is a compiler")
    return kind
