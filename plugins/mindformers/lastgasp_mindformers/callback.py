"""The callback that protects a MindSpore training, and a small one in front of the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mindspore.train.callback import Callback

from lastgasp.adapter import Options, switched
from lastgasp_mindformers.installation import turn_on

if TYPE_CHECKING:
    from lastgasp_mindformers.run import Run

log = logging.getLogger("lastgasp")

_UNSEEN = (
    "this training is NOT protected: lastgasp did not see its Model.train begin. Write "
    "`from lastgasp_mindformers import LastGasp` at the top of the script; a child of multiprocessing is not protected"
)


class LastGasp(Callback):  # type: ignore[misc]
    """No step is lost: what survives a fault saves the current step, and the next start resumes from it.

    Give it to `Model.train(..., callbacks=[LastGasp("ckpts")])`, or write `callbacks: - type: LastGasp` into the YAML
    of MindFormers. Import it before `model.train` is looked up. With `LASTGASP=0` it does nothing.

    Args:
        dir: where checkpoints and incidents are kept; the same path on every rank. Default: `LASTGASP_DIR`.
        options: keep, resume, hang_timeout, save_timeout, finish_timeout, sha256 (`lastgasp.config.GaspConfig`), marks,
            profiling_dir, profiling_limit_mb, require_manifest, attempts, recovery.

    Raises:
        ConfigError: a value that is not allowed, or no directory.
    """

    def __init__(self, dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__()
        self.options = Options.resolve(dir, **options)
        self.run: Run | None = None
        turn_on()

    def on_train_begin(self, run_context: Any) -> None:
        """Training starts, or resumes from what was loaded."""
        if self.run is not None:
            self.run.others_loaded()
            self.run.begin(run_context.original_args())
        elif switched() is not False:
            log.error("%s", _UNSEEN)

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """All other callbacks have seen an epoch begin."""
        if self.run is not None:
            self.run.epoch_begin()

    def on_train_epoch_end(self, run_context: Any) -> None:
        """And its end."""
        if self.run is not None:
            self.run.epoch_end()

    def on_train_step_begin(self, run_context: Any) -> None:
        """The last check before the graph, which does not run during a recovery."""
        if self.run is not None:
            self.run.step_begin(run_context.original_args())

    def on_train_step_end(self, run_context: Any) -> None:
        """All other callbacks have seen the end of the step."""
        if self.run is not None:
            self.run.callbacks_end(run_context.original_args())

    def on_eval_begin(self, run_context: Any) -> None:
        """One by `Model.fit`."""
        if self.run is not None:
            self.run.others_loaded()

    def on_eval_step_begin(self, run_context: Any) -> None:
        """A batch of an evaluation by `Model.fit` is progress."""
        if self.run is not None:
            self.run.evaluates()

    def on_eval_end(self, run_context: Any) -> None:
        """Back to training."""
        if self.run is not None:
            self.run.evaluated()

    def on_train_end(self, run_context: Any) -> None:
        """The last step is done; others may save it once more."""
        if self.run is not None:
            self.run.trained()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Out of the loop; with an exception the step is saved first."""
        if self.run is not None and error is not None:
            self.run.end_with(error)


def made(options: Options) -> LastGasp:
    """One that is added to a job without."""
    callback = LastGasp.__new__(LastGasp)
    super(LastGasp, callback).__init__()
    callback.options, callback.run = options, None
    return callback


class Boundary(Callback):  # type: ignore[misc]
    """In front of all other callbacks: the graph has returned, and its step counts."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def on_train_begin(self, run_context: Any) -> None:
        """Others may load."""
        self._run.others_load(run_context.original_args())

    def on_eval_begin(self, run_context: Any) -> None:
        """Others may load, in an evaluation by `Model.fit`, too."""
        self._run.others_load(run_context.original_args(), evaluation=True)

    def on_train_step_end(self, run_context: Any) -> None:
        """No other callback has run since."""
        self._run.step_end(run_context.original_args())

    def on_train_end(self, run_context: Any) -> None:
        """Others may save the last step now."""
        self._run.others_begin()


class Later(Callback):  # type: ignore[misc]
    """In a training that is not protected, behind all other callbacks: where it saves is recorded.

    Args:
        record: gets its callbacks.
    """

    def __init__(self, record: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self._record = record

    def on_train_begin(self, run_context: Any) -> None:
        """All prefixes are settled."""
        self._record(run_context.original_args().list_callback)


class Evaluation(Callback):  # type: ignore[misc]
    """In an evaluation that another callback makes: each batch is progress."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def on_eval_step_begin(self, run_context: Any) -> None:
        """The next one."""
        self._run.evaluates()
