"""What happens at each of the wrapped methods. Translates them into calls of Run and its selector; decides nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lastgasp.adapter import ConfigError, Options, arguments_of, switched
from lastgasp_mindformers.settings import CALLBACK, callback_entry, options_of_config

if TYPE_CHECKING:
    from lastgasp_mindformers.run import Run

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class Training:
    """The trainings of this process, one after the other.

    Args:
        turn_on: wraps `Model.train` and `training_process`, or raises.
        absent: while its context lasts, nothing is wrapped.
    """

    def __init__(self, turn_on: Callable[[], None], absent: Callable[[], AbstractContextManager[None]]) -> None:
        self._turn_on, self._absent = turn_on, absent
        self._run: Run | None = None
        self._training: Run | None = None

    # -- MindFormers ------------------------------------------------------------------------------

    def around_trainer(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        """`Trainer.train` and `Trainer.finetune`: the last moment to choose what is loaded (mindformers.md §2)."""
        trainer = call.__self__
        config = getattr(trainer, "config", None)
        options = options_of_config(config) if config is not None else None
        options = _options_of_object(as_list(getattr(trainer, "callbacks", None))) or options
        if options is None:
            with self._absent():
                return call(*args, **kwargs)
        return self._protected(call, trainer, arguments_of(call, args, kwargs), options)

    def _protected(self, call: Any, trainer: Any, arguments: Keywords, options: Options) -> Any:
        self._turn_on()
        register_callback()
        entry = callback_entry(trainer.config)
        if entry is not None and not entry.get("dir"):
            entry["dir"] = str(options.gasp.directory)  # MindFormers' own object must get the same directory
        run = self._run = new_run(options)
        try:
            if not _trained_before():  # what the first training has saved is none of the second one's
                run.selector.steer(trainer.config, arguments)
            result = call(**arguments)
        except BaseException as error:
            run.end_early(error)
            raise
        finally:
            self._run = None
        run.close(goodbye=True)
        return result

    def around_pynative(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        """`train` of the pynative Trainer, which has a loop of its own."""
        from lastgasp_mindformers.pynative import asked, protected

        options = asked(call.__self__)
        if options is None:
            with self._absent():
                return call(*args, **kwargs)
        return protected(call, call.__self__, arguments_of(call, args, kwargs), options)

    def around_process(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        """`training_process`: the selected checkpoint must still be the one about to be loaded."""
        if self._run is None:
            return call(*args, **kwargs)
        from lastgasp_mindformers.loads import watched

        config, selector = arguments_of(call, args, kwargs).get("config"), self._run.selector
        selector.check(getattr(call.__self__, "config", None) if config is None else config)
        with watched(selector):
            return call(*args, **kwargs)

    # -- MindSpore --------------------------------------------------------------------------------

    def around_model(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        """`Model.train` and `Model.fit`: the callback goes into the list, a real `list` (mindformers.md §3)."""
        arguments, model = arguments_of(call, args, kwargs), call.__self__
        arguments["callbacks"] = as_list(arguments.get("callbacks"))
        if self._run is not None:
            return self._train(call, self._run, model, arguments)
        options = _options_of_call(arguments["callbacks"])
        if options is None and not _trained_before():
            return call(*args, **kwargs)
        if options is None:
            return call(**arguments | {"callbacks": _unprotected(arguments["callbacks"])})
        run = new_run(options)
        try:
            result = self._train(call, run, model, arguments)
        except BaseException as error:
            run.end_early(error)
            raise
        run.close(goodbye=True)
        return result

    def _train(self, call: Any, run: Run, model: Any, arguments: Keywords) -> Any:
        """`Model.train`, unless all of its epochs are trained."""
        attached = run.attach(model, arguments)
        if attached is None:
            return None
        self._training = run
        try:
            return call(**attached)
        finally:
            self._training = None

    def around_eval(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        """`Model.eval`, which callbacks call in a training (MindFormers' `do_eval`): each batch is progress."""
        if self._training is None:
            return call(*args, **kwargs)
        from lastgasp_mindformers.callback import Evaluation

        arguments = arguments_of(call, args, kwargs)
        arguments["callbacks"] = [*as_list(arguments.get("callbacks")), Evaluation(self._training)]
        return call(**arguments)

    def around_generate(self, call: Any, args: Arguments, kwargs: Keywords) -> Any:
        """`generate` of a model, which MindFormers calls where a metric is of texts: each batch is progress."""
        if self._training is not None:
            self._training.evaluates()
        return call(*args, **kwargs)


def new_run(options: Options) -> Run:
    """Create the training; MindSpore has been imported by now."""
    from lastgasp_mindformers.run import Run

    return Run(options)


def _trained_before() -> bool:
    module = sys.modules.get("lastgasp_mindformers.run")
    return module is not None and bool(module.trained_before())


def _unprotected(callbacks: list[Any]) -> list[Any]:
    from lastgasp_mindformers.run import unprotected

    return unprotected(callbacks)


def as_list(callbacks: Any) -> list[Any]:
    """What `Model.train` was given, as a new list."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def register_callback() -> None:
    """Let `callbacks: - type: LastGasp` of MindFormers' YAML find the class. Idempotent."""
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    from lastgasp_mindformers.callback import LastGasp

    if not MindFormerRegister.is_exist(MindFormerModuleType.CALLBACK, CALLBACK):
        MindFormerRegister.register_cls(LastGasp, module_type=MindFormerModuleType.CALLBACK, alias=CALLBACK)


def _options_of_call(callbacks: list[Any]) -> Options | None:
    """The options that a `Model.train` requests by its callbacks or the environment; None if there are none.

    Raises:
        ConfigError: two LastGasps, or settings that are not allowed.
    """
    return _options_of_object(callbacks) or (Options.resolve() if switched() else None)


def _options_of_object(callbacks: list[Any]) -> Options | None:
    """Those of the LastGasp among the callbacks; None if there is none, or it is switched off.

    Raises:
        ConfigError: there are two.
    """
    module = sys.modules.get("lastgasp_mindformers.callback")
    given = [callback for callback in callbacks if module is not None and isinstance(callback, module.LastGasp)]
    if len(given) > 1:
        raise ConfigError("callbacks", f"{len(given)} of LastGasp", "one", "Take the others out.")
    return given[0].options if given and switched() is not False else None
