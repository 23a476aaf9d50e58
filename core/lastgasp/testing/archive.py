"""Cause a fault in the middle of a `torch.save`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FaultyArchive:
    """torch.save's zip writer, calling `fire` after each tensor.

    Args:
        archive: torch's own writer.
        fire: causes the fault.
    """

    def __init__(self, archive: Any, fire: Callable[[], None]) -> None:
        self._archive, self._fire = archive, fire

    def __getattr__(self, name: str) -> Any:
        return getattr(self._archive, name)

    def write_record(self, name: str, *data: Any) -> None:
        """As torch's; then the fault, if this was a tensor."""
        self._archive.write_record(name, *data)
        if name.startswith("data/"):
            self._fire()
