"""The Trainer of `mindformers.pynative`: what happens around `train`, what its callbacks report (mindformers.md §8).

It has neither `Model.train` nor BaseTrainer, its callbacks see no exceptions, and its steps are not marked. The state
is read as in graph mode: by another thread, with the optimizer's two counters (gate.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lastgasp.adapter import ConfigError, Options, Released
from lastgasp.adapter.mindspore import ITERATIONS
from lastgasp_mindformers import loads
from lastgasp_mindformers.aux_state import Numbers, decode, restore_random
from lastgasp_mindformers.monitors import Saved
from lastgasp_mindformers.pynative_writer import PynativeWriter
from lastgasp_mindformers.run import ONLY_FIRST, OWN_DIRECTORY, Run, begins, trained_before
from lastgasp_mindformers.settings import options_of_config

log = logging.getLogger("lastgasp")


def asked(trainer: Any) -> Options | None:
    """What the trainer's configuration or the environment asks for; None where lastgasp is off.

    Raises:
        ConfigError: a key or a value that is not allowed.
    """
    config = trainer.config
    section = getattr(config, "lastgasp", None)
    told = {
        "lastgasp": section if section is None or isinstance(section, dict) else section.to_dict(),
        "output_dir": config.checkpoint.save_path,
    }
    return options_of_config(told)


def protected(call: Any, trainer: Any, arguments: dict[str, Any], options: Options) -> Any:
    """Call `train` of a trainer that asked for lastgasp.

    Args:
        arguments: of the call, by name.
    """
    if trained_before():
        log.warning(ONLY_FIRST + OWN_DIRECTORY)
        return call(**arguments)
    run = PynativeRun(options, trainer)
    try:
        with run.callbacks(), loads.method_watched(run.selector, trainer, "_load_checkpoint"):
            result = call(**run.steered(arguments))
    except BaseException as error:
        end = run.end_with if run.begun else run.end_early
        end(_origin(error))
        raise
    run.close(goodbye=True)
    return result


def _origin(error: BaseException) -> BaseException:
    """What the trainer of 1.9.0 wraps into a RuntimeError of its own ("Error in training step")."""
    cause = error.__cause__
    wrapped = isinstance(cause, Released) or str(error).startswith("Error in training step")
    return cause if wrapped and cause is not None else error


class _At(NamedTuple):
    """The step under way or just completed; as much of `Model.train`'s parameters as Run uses."""

    step: int
    epoch: int
    within: int
    net_outputs: Any = None


class _Both:
    """Model and optimizer as one network, as far as the state needs it."""

    def __init__(self, trainer: Any) -> None:
        self._parts = [*_models(trainer), trainer.optimizer]

    def cells_and_names(self) -> Iterator[tuple[str, Any]]:
        """Every cell."""
        for part in self._parts:
            yield from part.cells_and_names()

    def parameters_and_names(self) -> Iterator[tuple[str, Any]]:
        """Every parameter, under its own name."""
        for part in self._parts:
            yield from ((param.name, param) for param in part.get_parameters())


def _models(trainer: Any) -> list[Any]:
    """2.x has a list of them, for pipelines."""
    return list(trainer.model) if isinstance(trainer.model, list | tuple) else [trainer.model]


class PynativeRun(Run):
    """One training of the pynative Trainer.

    Args:
        options: what was asked for; trainer: MindFormers'.

    Attributes:
        begun: whether training has; before that there is nothing to save.

    Raises (constructor):
        ConfigError: more than one process or model part, no optimizer, a directory that cannot be written.
    """

    def __init__(self, options: Options, trainer: Any) -> None:
        _refuse(trainer)
        super().__init__(options)
        self._trainer, self._checkpoint = trainer, trainer.config.checkpoint
        saves = self._checkpoint.save_path if self._checkpoint.enable_save else ""
        self._directory = Path(saves or options.gasp.directory).absolute()
        self._weights_only = bool(self._checkpoint.no_load_optim)
        self._waiting: list[Saved] = []
        self.begun = False
        self._skipped = 0
        self._bind_pynative()

    def _bind_pynative(self) -> None:
        self._network = _Both(self._trainer)
        self._hold(self._network, PynativeWriter(self._trainer, self._directory))

    def callbacks(self) -> _Callbacks:
        """While its context lasts, the trainer calls this run."""
        return _Callbacks(self, self._trainer.callback_handler.callbacks)

    # -- start ------------------------------------------------------------------------------------

    def steered(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `train` with the checkpoint to resume from, where there is one.

        Raises:
            NoGoodCheckpoint, DamagedCheckpoint, ConfigError: as `MindFormersSelector.choose_newer`.
        """
        own = [self._directory, self.options.gasp.directory.absolute()]
        elsewhere = arguments.get("checkpoint_path") or self._checkpoint.load_path
        told = Path(elsewhere).absolute() if elsewhere else None
        searched = [told] if told is not None and told.is_dir() and ITERATIONS.step(told) is None else []
        chosen = self.selector.choose_newer(dict.fromkeys([*own, *searched]))
        if chosen is None and told is not None and not told.exists():
            log.warning("%s does not exist: training starts from scratch", told)
            self._checkpoint.load_path = ""
            return arguments | {"checkpoint_path": None}
        if chosen is None:
            return arguments
        if chosen.parent in own:
            self._checkpoint.no_load_optim = False  # the job's own: it resumes, whatever it once started from
        self._aux = b"" if self._checkpoint.no_load_optim else self.selector.aux
        return arguments | {"checkpoint_path": str(chosen)}

    def began(self, state: Any) -> None:
        """`on_train_begin`: everything is loaded."""
        assert self.state is not None
        begins(self.options.gasp.directory)
        self._checkpoint.no_load_optim = self._weights_only
        if self._aux:
            restore_random(decode(self._aux))
        self._marks.begin([])
        done = int(state.global_step)
        if done:
            self._skip(done)
        self.state.begin(self._numbers(self.at(done)) if done else Numbers(step=0, epoch=1, within=0))
        self._seen = done
        self._start(done)
        self.begun = True

    def _skip(self, done: int) -> None:
        """Let the data begin after `done` steps.

        The trainer has asked for that itself, and fails where it is more than an iterator gives: it makes a new one
        then, each of `train_num_epochs` epochs (observed with 1.9.0).
        """
        given = self._per_epoch * max(1, int(self._trainer.train_num_epochs))
        self._trainer.train_dataset.set_init_step(done % given)
        self._skipped = done

    # -- steps ------------------------------------------------------------------------------------

    @property
    def _per_epoch(self) -> int:
        return max(1, int(self._trainer.train_epoch_step))

    def _epoch(self, step: int) -> int:
        return max(1, -(-step // self._per_epoch))

    def at(self, step: int) -> _At:
        """The step that makes `step` completed ones."""
        return _At(step, self._epoch(step), (step - 1) % self._per_epoch + 1)

    def _numbers(self, params: Any, outputs: Any = None) -> Numbers:
        return Numbers(params.step, params.epoch, params.within)

    def first_batch(self, trainer_state: Any) -> None:
        """The iterator has been made and skipped what was trained; the one of the next epoch must not skip again."""
        if self._skipped and int(trainer_state.global_step) == self._skipped:
            self._trainer.train_dataset.set_init_step(0)

    def saved(self, step: int) -> None:
        """The trainer's own callback may have saved this step: a manifest for it, and for those of before."""
        assert self.state is not None
        self.state.stop_if_taken(True)
        every = int(self._checkpoint.save_interleaved_steps)
        path = self._directory / f"iteration_{step:08d}"
        if self._checkpoint.enable_save and path.is_dir() and (step % every == 0 or step >= self._last):
            self._waiting.append(Saved(path, ITERATIONS, step))
        ready = [one for one in self._waiting if one.there]
        self._waiting = [one for one in self._waiting if one not in ready]
        for one in ready:
            self.manifests.commit(one)

    @property
    def _last(self) -> int:
        return int(self._trainer.config.training.steps)


class _Callbacks:
    """Two callbacks among the trainer's: one before all others, one after them.

    Args:
        run: gets the events; callbacks: the trainer's own list.
    """

    def __init__(self, run: PynativeRun, callbacks: list[Any]) -> None:
        self._callbacks = callbacks
        self._front, self._back = _made(run)

    def __enter__(self) -> None:
        self._callbacks.insert(0, self._front)
        self._callbacks.append(self._back)

    def __exit__(self, *error: Any) -> None:
        for ours in (self._front, self._back):
            if ours in self._callbacks:
                self._callbacks.remove(ours)


def _made(run: PynativeRun) -> tuple[Any, Any]:
    from mindformers.pynative.callback import TrainerCallback

    class Front(TrainerCallback):  # type: ignore[misc]
        """The step has ended, and no other callback has run since."""

        def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
            run.step_end(run.at(int(state.global_step)))

    class Back(TrainerCallback):  # type: ignore[misc]
        """After all others: the last check before a step, and what they have saved."""

        def on_train_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
            run.began(state)

        def on_step_begin(self, args: Any, state: Any, **kwargs: Any) -> None:
            run.first_batch(state)
            run.step_begin(run.at(int(state.global_step) + 1))

        def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
            run.callbacks_end()

        def on_train_end(self, args: Any, state: Any, **kwargs: Any) -> None:
            run.saved(int(state.global_step))

    return Front(), Back()


def _refuse(trainer: Any) -> None:
    """What cannot be protected, with what to do."""
    remedy = "Use the Trainer of graph mode (`mindformers.Trainer`), or set LASTGASP=0 to run without lastgasp."
    size = int(os.environ.get("MS_WORKER_NUM") or 1)
    if size > 1 or getattr(trainer, "world_size", 1) > 1:
        raise ConfigError("mindformers.pynative Trainer", f"{size} processes", "one process", remedy)
    if len(_models(trainer)) > 1:
        raise ConfigError("mindformers.pynative Trainer", f"{len(_models(trainer))} model parts", "one", remedy)
    if trainer.optimizer is None:
        raise ConfigError("optimizer", None, "an optimizer of MindSpore", "Give the Trainer one, or configure it.")
