"""Parts of a Lightning checkpoint, brought to the form that they have at a boundary."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

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


def saves(trainer: Any) -> dict[str, Any]:
    """What each ModelCheckpoint knows of its saves and has in no state of its own: step and path of the last one, and
    whether one waits for the end of a validation.
    """
    found = [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]
    return {
        "saved_steps": {one.state_key: one._last_global_step_saved for one in found},
        "saved_paths": {one.state_key: str(one._last_checkpoint_saved) for one in found},
        "deferred_saves": [one.state_key for one in found if getattr(one, "_defer_save_until_validation", False)],
    }
