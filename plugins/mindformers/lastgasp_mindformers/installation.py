"""`install()`: wait for MindFormers, and wrap what it takes as soon as somebody turns lastgasp on (mindformers.md §10).

Two stages. Waiting: `Trainer.train` and `Trainer.finetune` look at the configuration that they are called with; where
that asks for nothing, even they are as MindFormers has them while training runs. On: `Model.train` and
`training_process` as well. Plain MindSpore is on through `LASTGASP=1` or by importing `LastGasp`.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NoReturn

import wrapt

from lastgasp.adapter import Hook, Hooks, launched, switched, tell_launcher
from lastgasp_mindformers.hooks import Training
from lastgasp_mindformers.unused import UNUSED

log = logging.getLogger("lastgasp")

_TRAINER = "mindformers.trainer.trainer"
_BASE = "mindformers.trainer.base_trainer"
_GENERATION = "mindformers.generation.text_generator"
_PYNATIVE = "mindformers.pynative.trainer.trainer"
_MODEL = "mindspore.train.model"
_ARGUMENTS = ("train_dataset", "callbacks", "dataset_sink_mode", "sink_size", "initial_epoch")
_RESUME = ("resume_from_checkpoint", "resume_training")

_installed: Installation | None = None


def install() -> bool:
    """Protect the MindSpore training of this process where it is asked for. Idempotent; before or after imports.

    Returns:
        Whether it is installed: not in a child that multiprocessing has spawned, not in msrun's scheduler, not with
        `LASTGASP=0`.

    Raises:
        ConfigError: `LASTGASP` is neither 1 nor 0.
        HookNotPlaced: what is imported already is not what it has to be.
    """
    global _installed
    tell_launcher()
    wanted = switched()
    if multiprocessing.parent_process() is not None:
        return False
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        if wanted is not False and launched():
            wrapt.register_post_import_hook(lambda module: _SCHEDULER.place(), _MODEL)
        return False
    if wanted is False:
        log.info("lastgasp is off: LASTGASP=0")
        return False
    if _installed is None:
        _installed = Installation()
        _installed.begin()
    if wanted or launched():
        UNUSED.watch()
    if wanted:
        _installed.turn_on()
    return True


def turn_on() -> bool:
    """`place()`, and say so if no training is protected: somebody has made a LastGasp.

    Returns:
        Whether it is on.

    Raises:
        ConfigError, HookNotPlaced: as `install`.
    """
    if not place():
        return False
    UNUSED.watch()
    return True


def place() -> bool:
    """`install()`, and wrap `Model.train` whatever `LASTGASP` says, unless it says 0: somebody may make a LastGasp.

    Returns:
        Whether it is wrapped.

    Raises:
        ConfigError, HookNotPlaced: as `install`.
    """
    if not install() or _installed is None:
        return False
    _installed.turn_on()
    return True


def uninstall() -> None:
    """Restore everything that is still wrapped by lastgasp. Idempotent."""
    global _installed
    installed, _installed = _installed, None
    if installed is not None:
        installed.undo()


class Installation:
    """The hooks of one process."""

    def __init__(self) -> None:
        training = self.training = Training(self.turn_on, self.absent)
        around = training.around_trainer
        self._trigger = _hooks(
            [
                Hook(_TRAINER, "Trainer.train", around, _RESUME),
                Hook(_TRAINER, "Trainer.finetune", around, _RESUME),
            ]
        )
        self._pynative = _hooks([Hook(_PYNATIVE, "Trainer.train", training.around_pynative, ("checkpoint_path",))])
        self._model = _hooks(
            [
                Hook(_MODEL, "Model.train", training.around_model, ("epoch", *_ARGUMENTS)),
                Hook(_MODEL, "Model.fit", training.around_model, ("epoch", "train_dataset", "callbacks")),
                Hook(_MODEL, "Model.eval", training.around_eval, ("callbacks",)),
            ]
        )
        self._process = _hooks(
            [
                Hook(_BASE, "BaseTrainer.training_process", training.around_process, ("config",)),
                Hook(_GENERATION, "GenerationMixin.generate", training.around_generate, required=False),
            ]
        )
        self._active = self._on = False

    def begin(self) -> None:
        """Wrap the triggers, now or when they are imported."""
        self._active = True
        wrapt.register_post_import_hook(self._imported, _TRAINER)
        wrapt.register_post_import_hook(self._pynative_imported, _PYNATIVE)

    def turn_on(self) -> None:
        """Wrap what protects a training. Idempotent.

        Raises:
            HookNotPlaced: it is not what it has to be.
        """
        if self._on or not self._active:
            return
        self._on = True
        wrapt.register_post_import_hook(self._model_imported, _MODEL)
        if _BASE in sys.modules:
            self._process.place()

    def undo(self) -> None:
        """Take everything back. Idempotent."""
        self._active = self._on = False
        UNUSED.stop()
        for patches in (self._process, self._model, self._trigger, self._pynative):
            patches.undo()

    @contextlib.contextmanager
    def absent(self) -> Iterator[None]:
        """For a training that does not ask for lastgasp: nothing is wrapped, and afterwards the triggers are again."""
        was_on, self._on = self._on, False
        for patches in (self._process, self._model, self._trigger, self._pynative):
            patches.undo()
        try:
            yield
        finally:
            if self._active:
                for patches in (self._trigger, self._pynative):
                    if patches.hooks[0].module in sys.modules:
                        patches.place()
            if self._active and was_on:
                self.turn_on()

    def _imported(self, module: ModuleType) -> None:
        if not self._active:
            return
        self._trigger.place()
        if self._on and _BASE in sys.modules:
            self._process.place()

    def _pynative_imported(self, module: ModuleType) -> None:
        if self._active:
            self._pynative.place()

    def _model_imported(self, module: ModuleType) -> None:
        if self._active and self._on:
            self._model.place()


def _hooks(hooks: list[Hook]) -> Hooks:
    return Hooks(hooks, remedy=_remedy)


def _end_scheduler(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """msrun's scheduler runs the script, too, and gets here where that does not call `init()`, which never returns."""
    log.warning("this is msrun's scheduler, which does not train: a worker does")
    raise SystemExit(0)


def _remedy() -> str:
    versions = ", ".join(f"{name} {_version(name)}" for name in ("mindformers", "mindspore"))
    return (
        f"This is {versions}; lastgasp was written for mindformers 1.6.0 to 1.9.0 with mindspore 2.7.0 to 2.9.0. "
        "Install one of these or a newer lastgasp, or set LASTGASP=0 to run without it."
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version" if name in sys.modules else "not installed"


_SCHEDULER = _hooks([Hook(_MODEL, f"Model.{name}", _end_scheduler) for name in ("train", "fit")])
