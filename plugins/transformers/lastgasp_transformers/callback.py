"""`LastGasp`, the one object that a user of Trainer adds. `Trainer.train` looks for it among the callbacks."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from lastgasp import adapter
from lastgasp.adapter import torch as shared
from lastgasp.adapter.again import Recovery
from lastgasp_transformers.again import TrainAgain
from lastgasp_transformers.newcomer import stand_alone
from lastgasp_transformers.run import Run
from lastgasp_transformers.supported import versions_known

log = logging.getLogger("lastgasp")

class LastGasp(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Saves the current step when a rank dies, raises, hangs or is told to stop; resumes from it.

    Checkpoints go where Trainer's own go, into `TrainingArguments.output_dir`, and look like them.

    Args:
        keep: how many of the checkpoints that LastGasp itself wrote to keep; default 3. Those of Trainer are
            rotated by `save_total_limit` alone.
        resume: "auto" (default) resumes from the newest checkpoint that verifies on all ranks; "never" ignores what
            existed before this job; a path starts from it, as does `train(resume_from_checkpoint=path)`.
        hang_timeout: seconds without any progress after which ranks count as hung; "auto" (default) learns it
            from the run, 60 s at least.
        save_timeout: seconds that a save after a fault may take before another rank is tried; default 600.
        finish_timeout: seconds that a rank inside its optimizer update gets to finish it; default 10.
        sha256: also write SHA-256 digests into the manifests; default False.
        marks: what is marked in each step, for `lastgasp report`: True (default) for all but the collectives, False
            for nothing, or names out of step, forward, dataloader, save, comm ("all", "none").
        profiling_dir: where the marks' files go; default MindCluster's directory where there is one, else
            `profiling` beside the checkpoints.
        profiling_limit_mb: MB that the marks' files may take; beyond it the oldest go; default 5000.
        recovery: how a fault may be answered: "auto" goes on in the same processes where that is possible
            (docs/in-place.md), "retry" without replacing any, "replace" only where one is replaced; "restart" saves the
            step and restarts the job, "save" saves it and ends the job. Default: "auto" for ranks on CPUs with gloo
            under a launcher, "restart" elsewhere.

    Each has an environment variable (`LASTGASP_KEEP`, ...), which counts where the argument is left out.

    Raises:
        ConfigError: a value that is not allowed; names field, value, what is allowed, and what to do.
        HookNotPlaced: this version of transformers has another `Trainer.train`.
    """

    def __init__(
        self,
        *,
        keep: int | None = None,
        resume: str | os.PathLike[str] | None = None,
        hang_timeout: Any = None,
        save_timeout: float | None = None,
        finish_timeout: float | None = None,
        sha256: bool | None = None,
        marks: bool | str | None = None,
        profiling_dir: str | os.PathLike[str] | None = None,
        profiling_limit_mb: int | None = None,
        recovery: Recovery | None = None,
        **unknown: Any,
    ) -> None:
        adapter.tell_launcher()
        adapter.refuse_unknown(unknown, LastGasp.__init__)
        self._given = {"keep": keep, "resume": resume, "hang_timeout": hang_timeout, "save_timeout": save_timeout,
                       "finish_timeout": finish_timeout, "sha256": sha256}  # fmt: skip
        self.config(".")
        self.marks = adapter.MarksConfig.resolve(marks, profiling_dir, profiling_limit_mb)
        self.recovery = adapter.asked_recovery(recovery)
        self.run: Run | None = None
        _HOOKS.place()

    def config(self, directory: str | Path, **more: Any) -> adapter.GaspConfig:
        """What was given, for checkpoints in that directory."""
        return adapter.GaspConfig.resolve(directory, **(self._given | more))

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Everything is loaded: from here on a fault is answered."""
        if self.run is None:
            allowed = "a Trainer whose train() calls transformers.Trainer.train"
            raise adapter.ConfigError("callbacks", "LastGasp", allowed, "Call super().train() in your own Trainer's.")
        self.run.begin()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The update is done, also where one optimizer wraps another."""
        if self.run is not None:
            self.run.training.updated()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A batch of an evaluation is progress. With DDP it goes past the wrapped model, which is the one followed."""
        if self.run is not None:
            self.run.evaluated()


def _around_train(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Protect one call of `Trainer.train`, where a LastGasp is among the callbacks."""
    trainer = call.__self__
    found = [one for one in trainer.callback_handler.callbacks if isinstance(one, LastGasp)]
    if not found:
        return call(*args, **kwargs)
    if len(found) > 1:
        raise adapter.ConfigError("callbacks", "several LastGasp", "one LastGasp", "Leave one of them in the list.")
    given = adapter.arguments_of(call, args, kwargs)
    if given.get("trial") is not None:
        log.warning("a trial of hyperparameter_search() is not protected: after a fault it begins anew")
        return _without(found, trainer.callback_handler, call, args, kwargs)
    if trainer.model is None:  # after a search; `train` seeds, and makes it anew
        trainer.model = trainer.call_model_init()
    (gasp,) = found
    path = given.get("resume_from_checkpoint")
    named = {"resume": os.fspath(path)} if isinstance(path, str | os.PathLike) else {}
    given_config, again = gasp.config(trainer.args.output_dir, **named), TrainAgain(trainer, gasp.recovery)
    again.meet()

    def begin(checkpoint: str | None) -> Any:
        return call(**(given | {"resume_from_checkpoint": checkpoint}))

    while True:
        config = _in_common(given_config, trainer.args)
        run = gasp.run = Run(trainer, config, gasp.marks, again.offer, again.set_before)
        try:
            result = run.train(begin, wanted=path is True)
        except BaseException as error:
            run.core.failed(error)
            del run
            gasp.run = None
            if not again.goes_on(error):
                raise
        else:
            gasp.run = None
            run.core.close(completed=True)
            return result


def _without(found: list[LastGasp], handler: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call it as if these were none of the callbacks."""
    handler.callbacks = [one for one in handler.callbacks if one not in found]
    try:
        return call(*args, **kwargs)
    finally:
        handler.callbacks += found


def _in_common(config: adapter.GaspConfig, args: Any) -> adapter.GaspConfig:
    """Trainer would write to rank 0's `output_dir`, and each other rank its random state to its own."""
    if (common := shared.common_directory(config.directory)) != config.directory:
        args.output_dir = str(common)
    return replace(config, directory=common)


stand_alone()
_TRAIN = adapter.Hook("transformers.trainer", "Trainer.train", _around_train, ("resume_from_checkpoint", "trial"))
_HOOKS = adapter.Hooks([_TRAIN], remedy=versions_known)
