"""What a micro-batch exchanges with other ranks besides what DDP does: where ranks are missing that cannot be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lastgasp.adapter.torch import exchanged


class Exchanges:
    """Of one call of `Trainer.train`.

    Attributes:
        found: called when a micro-batch has exchanged something.
    """

    def __init__(self) -> None:
        self.found: Callable[[], object] = lambda: None
        self._within, self._before = False, exchanged()

    def micro_batch(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Around `Trainer.training_step`."""
        self._within, self._before = True, exchanged()
        try:
            result = original(*args, **options)
            self._look()
        finally:
            self._within = False
        return result

    def by_ddp(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Around what DDP may exchange something in: before its forward pass, and where it sums gradients."""
        self._look()
        result = original(*args, **options)
        self._before = exchanged()
        return result

    def _look(self) -> None:
        if self._within and exchanged() != self._before:
            self.found()
