"""Parts of a Lightning checkpoint, brought to the form that they have at a boundary."""

from __future__ import annotations

from typing import Any

from lastgasp.adapter.torch import patch_group


def set_batch_progress(batches: dict[str, Any], pending: int) -> None:
    """Make the counters agree: `pending` batches (0 or 1) are processed but not completed.

    1 is Lightning's form in on_train_batch_end, 0 the one after it. They may disagree in a live run that
    skipped a batch; Lightning then recognises neither.
    """
    for counts in (batches["total"], batches["current"]):
        ready = counts["ready"]
        counts.update(started=ready, processed=ready, completed=ready - pending)


def patch_groups(optimizer_states: list[dict[str, Any]], groups: list[list[dict[str, Any]]]) -> None:
    """Put the hyperparameters of `groups` into the states; parameters' own state is left alone."""
    for state, saved in zip(optimizer_states, groups, strict=True):
        for group, values in zip(state["param_groups"], saved, strict=True):
            patch_group(group, values)
