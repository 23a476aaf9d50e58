"""Saves of ModelCheckpoint: those that a fault prevented or cut short are made up, and none is made twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from lastgasp_lightning.checkpoint_io import UNKNOWN, named, saved_by
from lastgasp_lightning.compat import replace_method
from lastgasp_lightning.saves import model_checkpoints

Saved = set[tuple[str, int]]
"""The job and the step of which a checkpoint may be, to be what this run has saved at its boundary."""

_NOT_THERE = ("ModelCheckpoint goes on with the best checkpoints of rank {}, whose metric was another than that of "
              "rank 0: {} is not there, and files that are stay. Log what it monitors with sync_dist=True")  # fmt: skip


def not_there(trainer: Any, record: dict[str, Any]) -> str:
    """What to note where another rank than the first has saved, and names files that are not there."""
    if not trainer.is_global_zero or record.get("results_rank") in (0, None):
        return ""
    names = (path for one in model_checkpoints(trainer) for path in {*one.best_k_models, one.best_model_path}
             if path and Path(path).is_relative_to(one.dirpath or "") and not one._fs.exists(path))  # fmt: skip
    found = sorted(Path(name).name for name in names)
    return _NOT_THERE.format(record["results_rank"], ", ".join(found[:3])) if found else ""


def skip_second_save(trainer: Any, record: dict[str, Any], here: Saved) -> None:
    """Checkpoints that were already saved at this step must not be saved again by the replay; what waits is saved.

    As rank 0 knows them: of ranks that were entered again, some may have returned from the save and others not.
    """
    found, loaded = model_checkpoints(trainer), str(trainer.ckpt_path or "")
    known = trainer.strategy.broadcast([_known_to(one, record, loaded, here) for one in found]) if found else ()
    for callback, (state, step, saved, waits, lacks_last) in zip(found, known, strict=True):
        callback.load_state_dict(state)
        callback.current_score = state.get("current_score")  # Lightning saves it, and does not load it
        callback._last_global_step_saved = step
        if saved:  # else at its end it saves last.ckpt anew
            callback._last_checkpoint_saved = saved
        callback._defer_save_until_validation = waits
        if lacks_last:
            _save_last_alone(callback, step)


def _known_to(callback: Any, record: dict[str, Any], loaded: str, here: Saved) -> tuple[Any, ...]:
    key, state = callback.state_key, callback.state_dict()
    if str(callback.dirpath) == record.get("saved_in", {}).get(key):
        state["current_score"] = record["scores"][key]
    step, saved = record["saved_steps"].get(key, 0), record.get("saved_paths", {}).get(key, "")
    known = {*callback.best_k_models, callback.best_model_path, callback.last_model_path}
    if loaded and any(path and Path(path) == Path(loaded) for path in known):
        step = record["step"]
        saved = str(named(Path(loaded))) if callback.save_last == "link" else saved
    saved = saved if saved and Path(saved).is_relative_to(callback.dirpath or "") else ""
    waits, done = key in record.get("deferred_saves", ()), 0 < step == record["step"]
    return state, step, saved, waits and not done, done and callback.save_last and _lacks_last(callback, here)


def _lacks_last(callback: ModelCheckpoint, here: Saved) -> bool:
    """Whether the fault came between the save of its best ones, and of its last.ckpt at the same step."""
    path = callback.last_model_path
    return not path or not callback._fs.exists(path) or saved_by(path) not in (*here, UNKNOWN)


def _save_last_alone(callback: Any, step: int) -> None:
    """Have its next save, which is of this step, leave out what is there."""
    callback._last_global_step_saved = 0

    def make(save: Callable[..., None]) -> Callable[..., None]:
        def save_topk(trainer: Any, candidates: Any) -> None:
            undo()
            if trainer.global_step == step:
                callback._last_global_step_saved = step
            else:
                save(trainer, candidates)

        return save_topk

    undo = replace_method(callback, "_save_topk_checkpoint", make)


def make_up_saves(trainer: Any, record: dict[str, Any], here: Saved) -> None:
    """Saves of `every_n_train_steps` that were due at this boundary, and that the fault prevented or cut short.

    A file that is `here`, by rank 0's disk, is written once more, not beside itself.
    """
    step = trainer.global_step
    found = [one for one in trainer.callbacks if _saves_at(one, step) and one.state_key in record["saved_steps"]]
    found = [one for one in found if one._last_global_step_saved != step]
    if not found:
        return
    files = [one.format_checkpoint_name(one._monitor_candidates(trainer)) for one in found]
    batches = trainer.fit_loop.epoch_loop.batch_progress
    written = trainer.strategy.broadcast([saved_by(one) in here for one in files])
    for callback, there in zip(found, written, strict=True):
        versions = callback._enable_version_counter
        callback._enable_version_counter = versions and not there
        for counts in (batches.total, batches.current):  # as in the hook: the batch is processed, and not completed
            counts.completed -= 1
        try:
            callback.on_train_batch_end(trainer, trainer.lightning_module, None, None, batches.current.ready - 1)
        finally:
            callback._enable_version_counter = versions
            for counts in (batches.total, batches.current):
                counts.completed += 1


def _saves_at(callback: Any, step: int) -> bool:
    """Whether it is a ModelCheckpoint that saves behind `step`, by Lightning's own hook."""
    own = isinstance(callback, ModelCheckpoint)
    own = own and type(callback).on_train_batch_end is ModelCheckpoint.on_train_batch_end
    every = callback._every_n_train_steps if own else 0
    return bool(every > 0 and step > 0 and step % every == 0)
