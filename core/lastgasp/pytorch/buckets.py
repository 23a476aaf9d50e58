"""DDP's gradient buckets: part of what decides the last bit of a sum over three ranks or more.

DDP lays its buckets out anew after the first step, in the order in which gradients arrived. A resumed run
would start with the first layout again, gloo's ring would add up in another order, and weights would differ
in the last bit from the uninterrupted run's. So the layout is kept in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Layout = list[list[int]]
"""Parameter numbers of each bucket, first bucket first."""
T = TypeVar("T")
_RESTORED = "_lastgasp_restored_buckets"
"""Attribute of a DDP model: the layout that it was given, which it has from its first step on."""


class BucketLayout:
    """Reads the layout once, on the training thread between two steps.

    Not at the gasp: DDP's logger waits for a lock that the training thread holds while it is stuck in backward.

    Args:
        model: returns the model, which may be wrapped late.

    Attributes:
        layout: as DDP has rebuilt it, or until then as it was restored; None where neither is so.
    """

    LOOKS = 8
    """DDP rebuilds in the second forward pass that synchronises, or never (find_unused_parameters)."""

    def __init__(self, model: Callable[[], object]) -> None:
        self._model, self._looks = model, self.LOOKS
        self.layout: Layout | None = None

    def look(self) -> None:
        """Call at every boundary; after the first few it does nothing."""
        if self._looks > 0:
            self._looks -= 1
            model = self._model()
            if (found := layout_of(model)) is not None:
                self.layout, self._looks = found, 0
            else:
                self.layout = getattr(model, _RESTORED, None)


def layout_of(model: object) -> Layout | None:
    """The rebuilt layout; None for a single process or before DDP has rebuilt. On the training thread only."""
    if not isinstance(model, DistributedDataParallel):
        return None
    model.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
    data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    text = str(data.get("rebuilt_per_bucket_param_indices", ""))
    return [[int(number) for number in bucket.split()] for bucket in text.split(",")] if text else None


def fits(layout: Layout, model: Any) -> bool:
    """Whether it is a layout of this model's trained parameters."""
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    return sorted(number for bucket in layout for number in bucket) == list(range(trained))


def with_assignment(layout: Layout, build: Callable[[], T]) -> T:
    """Call `build`, which makes a DDP reducer, and let it have this layout instead of the first one."""
    original = vars(dist)["_compute_bucket_assignment_by_size"]

    def assignment(*args: Any, **options: Any) -> tuple[Layout, list[int]]:
        _, limits = original(*args, **options)
        # DDP reverses what it gets here, because it expects the order of the forward pass.
        return list(reversed(layout)), [max(limits)] * len(layout)

    vars(dist)["_compute_bucket_assignment_by_size"] = assignment
    try:
        built = build()
        if isinstance(built, DistributedDataParallel):
            vars(built)[_RESTORED] = layout
        return built
    finally:
        vars(dist)["_compute_bucket_assignment_by_size"] = original


def rebuild(model: DistributedDataParallel, layout: Layout) -> bool:
    """Give a DDP model that exists already this layout, before its first forward pass: its reducer is made anew.

    Enters no collective. The way is that of `DistributedDataParallel.__setstate__`, which unpickles a DDP model.

    Returns:
        False where this torch has no such way, the model is another one, or a hook on its communication would be lost.
    """
    model_any: Any = model
    needed = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")
    if not fits(layout, model.module) or not all(hasattr(model, name) for name in needed):
        return False
    if getattr(model, "_comm_hooks", None) or getattr(model, "mixed_precision", None) is not None:
        return False

    def build() -> None:
        parameters, sparse = model_any._build_params_for_reducer()
        names = model_any._build_debug_param_to_name_mapping(parameters)
        model_any._ddp_init_helper(parameters, sparse, names, model_any.static_graph)
        if model_any.static_graph:
            model_any.reducer._set_static_graph()
            model_any.logger._set_static_graph()

    with_assignment(layout, build)
    vars(model)[_RESTORED] = layout
    return True
