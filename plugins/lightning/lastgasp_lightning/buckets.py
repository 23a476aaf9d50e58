"""DDP's gradient buckets: part of what decides the last bit of a sum over three ranks or more.

DDP lays its buckets out anew after the first step, in the order in which gradients arrived. A resumed run
would start with the first layout again, gloo's ring would add up in another order, and weights would differ
in the last bit from the uninterrupted run's. So the layout is kept in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lastgasp_lightning.compat import Undo, replace_method

Layout = list[list[int]]
"""Parameter numbers of each bucket, first bucket first."""


class BucketLayout:
    """Reads the layout once, on the training thread between two steps.

    Not at the gasp: DDP's logger waits for a lock that the training thread holds while it is stuck in backward.
    """

    LOOKS = 8
    """DDP rebuilds in the second forward pass that synchronises, or never (find_unused_parameters)."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._looks = trainer, self.LOOKS
        self.layout: Layout | None = None

    def look(self) -> None:
        """Call at every boundary; after the first few it does nothing."""
        if self._looks > 0:
            self._looks -= 1
            self.layout = layout_of(self._trainer)
            if self.layout is not None:
                self._looks = 0


def layout_of(trainer: Any) -> Layout | None:
    """The rebuilt layout; None for a single process or before DDP has rebuilt. On the training thread only."""
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return None
    model.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
    data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    text = str(data.get("rebuilt_per_bucket_param_indices", ""))
    return [[int(number) for number in bucket.split()] for bucket in text.split(",")] if text else None


def restore_layout(trainer: Any, layout: Layout | None) -> Undo:
    """Build DDP with this layout instead of the first one; call before `strategy.setup`."""
    if not layout or not hasattr(trainer.strategy, "_setup_model"):
        return lambda: None

    def make(setup_model: Callable[..., Any]) -> Callable[..., Any]:
        def with_layout(model: Any) -> Any:
            trained = sum(parameter.requires_grad for parameter in model.parameters())
            if sorted(number for bucket in layout for number in bucket) != list(range(trained)):
                return setup_model(model)  # another model than the one that was saved
            return _with_assignment(layout, lambda: setup_model(model))

        return with_layout

    return replace_method(trainer.strategy, "_setup_model", make)


def _with_assignment(layout: Layout, build: Callable[[], Any]) -> Any:
    original = vars(dist)["_compute_bucket_assignment_by_size"]

    def assignment(*args: Any, **options: Any) -> tuple[Layout, list[int]]:
        _, limits = original(*args, **options)
        # DDP reverses what it gets here, because it expects the order of the forward pass.
        return list(reversed(layout)), [max(limits)] * len(layout)

    vars(dist)["_compute_bucket_assignment_by_size"] = assignment
    try:
        return build()
    finally:
        vars(dist)["_compute_bucket_assignment_by_size"] = original
