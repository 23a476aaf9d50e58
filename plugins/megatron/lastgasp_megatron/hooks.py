"""What happens at each of Megatron's functions: translates them into calls of one `Run`; decides nothing."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lastgasp.adapter import Hook, argument
from lastgasp.adapter.torch import EnteredFromFiles
from lastgasp_megatron.again import Pretrain
from lastgasp_megatron.args import saves
from lastgasp_megatron.exits import around_load
from lastgasp_megatron.lead import leads_itself
from lastgasp_megatron.own_part import without_gloo
from lastgasp_megatron.trainings import Trainings

if TYPE_CHECKING:
    from lastgasp_megatron.run import Run

_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"
_ASYNC = "megatron.training.async_utils"
_OUTSIDE = (
    "the script calls train_step() in its own loop, outside of Megatron's train(): after a fault nothing is saved, "
    "and the job goes on from its newest checkpoint. Call pretrain() or train() to have its steps saved"
)
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class Training:
    """The one training of this process.

    Args:
        check: restores hooks that were replaced, or raises.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._run: Run | None = None
        self._again: EnteredFromFiles | None = None
        self._trained = self._outside = self._parsed = False
        self._told: BaseException | None = None
        self._trainings = Trainings()

    def hooks(self) -> list[Hook]:
        """Everything that is wrapped (docs/facts/megatron.md §1)."""
        return [
            Hook(_TRAINING, "setup_model_and_optimizer", self._around_setup, ("checkpointing_context",)),
            Hook(_TRAINING, "train", self._around_train, ("model", "optimizer", "opt_param_scheduler")),
            Hook(_TRAINING, "train_step", self._around_step, ("model", "optimizer", "opt_param_scheduler")),
            Hook(_CHECKPOINTING, "save_checkpoint", self._around_save, ("iteration", "model")),
            Hook(_CHECKPOINTING, "load_checkpoint", self._around_load, ("optimizer", "load_arg")),
            Hook(_CHECKPOINTING, "get_checkpoint_tracker_filename", self._around_tracker),
            Hook(_CHECKPOINTING, "ensure_directory_exists", self._around_write),
            Hook(_ASYNC, "maybe_finalize_async_save", self._around_finalize, required=False),
            Hook(_TRAINING, "finalize_model_grads", self._around_reduction, required=False),
            Hook(_TRAINING, "training_log", self._around_log, required=False),
            Hook(_TRAINING, "evaluate", self._around_evaluate, required=False),
            Hook(_TRAINING, "build_pretraining_data_loader", self._around_loader, required=False),
        ]

    # -- from start to end ------------------------------------------------------------------------

    def around_pretrain(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        """The entire training, which has ended well only when this returns; called again for a recovery in place."""
        pretrain, self._trained = Pretrain(args, kwargs, first=not self._trained), True
        self._trainings.begins()
        self._again = again = EnteredFromFiles(pretrain.why, pretrain.values)
        self._parsed = pretrain.parsed
        if again.wait():
            pretrain.reset()
        if pretrain.joins():
            again.join(pretrain.fewer)
        while True:
            try:
                args, kwargs = pretrain.given
                result = call(*args, **kwargs)
            except BaseException as error:
                self._failed(error)
                self._told = None
                if not again.goes_on(error, pretrain.reset):
                    raise
            else:
                self._close()
                return result

    def _failed(self, error: BaseException) -> None:
        run, self._run = self._run, None
        before, self._told = self._told, error
        if run is not None:
            run.life.failed(error)
        elif self._again is not None and error is not before:
            self._again.failed(error)

    def _close(self, completed: bool = True) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.life.close(completed=completed)

    def _at_exit(self) -> None:
        """The script has ended without `pretrain`: well, unless Python has printed an exception that nobody caught."""
        self._close(completed=getattr(sys, "last_value", None) is None)

    def _around_setup(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        if self._run is not None:
            return call(*args, **kwargs)
        from megatron.training import get_args

        from lastgasp_megatron.run import Run

        megatron = get_args()
        if getattr(megatron, "skip_train", False) or leads_itself(megatron) or not saves(megatron):
            return call(*args, **kwargs)
        self._run = run = Run(megatron, self._again, self._trainings, parsed=self._parsed)
        atexit.register(self._at_exit)
        try:
            run.choose()
            result = call(*args, **kwargs)
            run.selector.done()
            run.bind(*result[:3])
        except BaseException as error:
            self._failed(error)
            raise
        self._check()
        return result

    def _around_train(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        self._check()
        run = self._run
        if run is None:
            return call(*args, **kwargs)
        run.begin()
        try:
            run.end_if_over()
            result = call(*args, **kwargs)
        except BaseException as error:
            self._failed(error)
            raise
        run.saver.training = False
        run.session.progress("data")  # a last save and the evaluation may follow
        return result

    def _around_loader(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        run = self._run
        if run is not None and len(args) == 2 and not kwargs:
            args = (args[0], run.loads_from(*args))
        return call(*args, **kwargs)

    # -- every step -------------------------------------------------------------------------------

    def _around_step(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        run = self._run
        if run is None:
            return call(*args, **kwargs)
        if not run.life.begun and not self._outside:
            self._outside = True
            run.session.note(_OUTSIDE)
        state, steps, marks, progress = run.state, run.state.steps, run.marks, run.session.progress
        if marks is not None:
            marks.step_begins()
        state.iteration_begin()
        progress("forward")
        before = steps.step
        result = call(*args, **kwargs)
        steps.iteration_end()
        if marks is not None:
            marks.step_ends(steps.step if steps.step > before else None)
        progress("data")
        return result

    def _around_log(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        result = call(*args, **kwargs)
        if self._run is not None:
            steps = self._run.state.steps
            steps.logged = steps.step
        return result

    def _around_reduction(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        if self._run is not None:
            self._run.session.progress("backward")
        return call(*args, **kwargs)

    def _around_evaluate(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        """Each forward pass is progress: all of them may take longer than a job may go without any."""
        run = self._run
        if run is None:
            return call(*args, **kwargs)
        progress = run.session.progress
        progress("validation")
        with ExitStack() as undo:
            for chunk in run.chunks:
                undo.callback(chunk.register_forward_pre_hook(lambda *_: progress("validation")).remove)
            result = call(*args, **kwargs)
        progress("data")
        return result

    # -- checkpoints ------------------------------------------------------------------------------

    def _around_load(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        run = self._run
        if run is None:
            return around_load(call, args, kwargs)
        undo = without_gloo(argument(call, "optimizer", args, kwargs))
        try:
            own = argument(call, "load_arg", args, kwargs, "load") == "load"
            load = run.selector.load if own else run.selector.load_other
            restore = run.buffers_of(args[0] if args else kwargs.get("ddp_model")) if own else None
            result = load(lambda: around_load(call, args, kwargs))
            if restore is not None:
                restore()
            return result
        finally:
            undo()

    def _around_save(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        run = self._run
        if run is None:
            return call(*args, **kwargs)
        run.session.progress("save")
        with run.save_mark:
            result = run.saver.save(call, args, kwargs)
        run.session.progress("data")
        return result

    def _around_finalize(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        result = call(*args, **kwargs)
        if self._run is not None:
            self._run.saver.finalized()
        return result

    def _around_tracker(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        path = call(*args, **kwargs)
        return path if self._run is None else self._run.selector.tracker(self._run.saver.tracker(path))

    def _around_write(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        if self._run is not None:
            self._run.park_if_held()
        return call(*args, **kwargs)
