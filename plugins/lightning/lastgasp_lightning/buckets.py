"""DDP's gradient buckets in a Lightning run: a resumed one is built with the layout that was saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lastgasp.adapter.torch import Buckets, fits, with_assignment
from lastgasp_lightning.compat import Undo, replace_method


def restore_layout(trainer: Any, layout: Buckets | None) -> Undo:
    """Build DDP with this layout instead of the first one; call before `strategy.setup`."""
    if not layout or not hasattr(trainer.strategy, "_setup_model"):
        return lambda: None

    def make(setup_model: Callable[..., Any]) -> Callable[..., Any]:
        def with_layout(model: Any) -> Any:
            if not fits(layout, model):
                return setup_model(model)  # another model than the one that was saved
            return with_assignment(layout, lambda: setup_model(model))

        return with_layout

    return replace_method(trainer.strategy, "_setup_model", make)
