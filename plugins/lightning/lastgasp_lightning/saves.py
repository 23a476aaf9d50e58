"""What ModelCheckpoints have saved, and what they are saving when a fault comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lastgasp_lightning.compat import Undo, replace_method
from lastgasp_lightning.metrics import logged_alone


class Saves:
    """What each ModelCheckpoint has saved. It names files before they are there: its state before a save is kept.

    Args:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._callbacks = trainer, model_checkpoints(trainer)
        self._before: dict[str, dict[str, Any]] = {}

    def install(self) -> Undo:
        """Follow the saves."""
        undo = [replace_method(one, "_save_topk_checkpoint", partial(partial, self._around, one))
                for one in self._callbacks]  # fmt: skip

        def all_undone() -> None:
            for one in undo:
                one()

        return all_undone

    def _around(self, callback: ModelCheckpoint, save: Callable[..., None], trainer: Any, candidates: Any) -> None:
        state = callback.state_dict()
        self._before[callback.state_key] = state | {"best_k_models": dict(state["best_k_models"])}
        save(trainer, candidates)
        del self._before[callback.state_key]

    def put(self, checkpoint: dict[str, Any], step: int) -> None:
        """Into a checkpoint of this step: a save that is not done will be made up from there."""
        for callback in self._callbacks:
            key = callback.state_key
            if key in self._before and callback._last_global_step_saved != step:
                checkpoint["callbacks"][key] = self._before[key]

    def known(self) -> dict[str, Any]:
        """What their states lack or do not load: step, path and score of the last save; who waits for a validation."""
        found = self._callbacks
        return {
            "saved_steps": {one.state_key: one._last_global_step_saved for one in found},
            "saved_paths": {one.state_key: str(one._last_checkpoint_saved) for one in found},
            "saved_in": {one.state_key: str(one.dirpath) for one in found},
            "scores": {one.state_key: one.current_score for one in found},
            "deferred_saves": [one.state_key for one in found if getattr(one, "_defer_save_until_validation", False)],
            "watched_alone": watched_alone(self._trainer),
        }


def model_checkpoints(trainer: Any) -> list[Any]:
    """All of them."""
    return [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]


def watched_alone(trainer: Any) -> list[tuple[str, str]]:
    """What is watched for the best value, and by whom, although each rank logs a value of its own.

    Each rank has a state of such a callback then, and Lightning saves or stops by what all of them say. Checkpoints
    have one of these states.
    """
    if trainer.world_size == 1:
        return []
    alone, found = logged_alone(trainer), []
    for one in trainer.callbacks:
        seen = bool(one.best_k_models) if isinstance(one, ModelCheckpoint) else isinstance(one, EarlyStopping)
        if seen and one.monitor in alone:
            found.append((one.monitor, type(one).__name__))
    return found
