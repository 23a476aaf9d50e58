"""Lightning's internals that this plugin relies on, checked once, so that a change is an error."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import lightning
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import callbacks

from lastgasp.adapter import LastgaspError, Undo, replace_attribute

__all__ = [
    "TAKES_WEIGHTS_ONLY",
    "LightningChanged",
    "Undo",
    "WeightAveraging",
    "check",
    "given_on",
    "own_dict",
    "replace_method",
    "require",
]

_OLDEST = (2, 5)
"""Loops of older releases keep their place in another way: what resumed there was not what had stopped."""


class _Nobody(callbacks.Callback):
    """A class of a callback that this Lightning does not have."""


WeightAveraging: type[callbacks.Callback] = getattr(callbacks, "WeightAveraging", _Nobody)  # Lightning 2.6


class LightningChanged(LastgaspError):
    """This Lightning is none that the plugin knows."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"Lightning {lightning.__version__} {what}; this version of lastgasp is for Lightning 2.5 and 2.6. "
            "Install lightning>=2.5,<2.7, or a newer lastgasp."
        )


TAKES_WEIGHTS_ONLY = "weights_only" in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters
"""Whether `weights_only` goes from `Trainer.fit` to what loads the file: since Lightning 2.6. Before, it was False."""


def given_on(weights_only: bool | None) -> tuple[bool | None, ...]:
    """As the last positional argument of what loads a checkpoint, where it takes one."""
    return (weights_only,) if TAKES_WEIGHTS_ONLY else ()


def require(owner: object, *names: str) -> None:
    """Check that `owner` has all attributes.

    Raises:
        LightningChanged: one is missing.
    """
    for name in names:
        if not hasattr(owner, name):
            raise LightningChanged(f"has no {type(owner).__name__}.{name}")


def check(trainer: Any) -> None:
    """Check every private attribute of `trainer` and its loops that this plugin reads or replaces.

    Raises:
        LightningChanged: one is missing, or Lightning is too old.
    """
    if tuple(map(int, lightning.__version__.split(".")[:2])) < _OLDEST:
        raise LightningChanged("is too old")
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    require(trainer, "_checkpoint_connector", "_logger_connector", "strategy", "lr_scheduler_configs")
    require(trainer._checkpoint_connector, "dump_checkpoint")
    require(trainer._logger_connector, "_callback_metrics", "_first_loop_iter", "_current_fx", "on_batch_end")
    require(fit, "epoch_progress", "_load_combined_loader_states", "_last_train_dl_reload_epoch", "_restarting")
    require(fit, "setup_data", "run", "on_advance_end", "_can_stop_early", "_data_fetcher", "_combined_loader")
    require(fit, "_data_source")
    require(epoch, "batch_progress", "scheduler_progress", "automatic_optimization", "manual_optimization")
    require(epoch, "_batches_that_stepped", "_results", "advance", "update_lr_schedulers", "max_steps", "val_loop")
    require(epoch, "_should_accumulate", "_num_ready_batches_reached")
    require(epoch.val_loop, "batch_progress", "run", "_has_run", "_last_val_dl_reload_epoch", "_restarting",
            "_seen_batches_per_dataloader")  # fmt: skip
    require(epoch.automatic_optimization.optim_progress.optimizer, "step", "zero_grad")
    require(epoch.manual_optimization, "optim_step_progress")


def replace_method(owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Undo:
    """Replace a method on this one object by `make(original)`; the returned undo is idempotent.

    Raises:
        LightningChanged: there is none.
    """
    require(owner, name)
    return replace_attribute(owner, name, make)


def own_dict(owner: Any) -> dict[str, Any]:
    """`vars(owner)`, in a table of its own.

    CPython 3.11 and 3.12 cache where the attributes of an instance stand until somebody asks for `vars`: with the
    table that it then shares with other instances, each access costs six times as much for as long as it lives.
    """
    own: dict[str, Any] = {**vars(owner)}
    owner.__dict__ = own
    return own
