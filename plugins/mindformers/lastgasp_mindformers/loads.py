"""The functions by which MindFormers' `training_process` loads: while it runs, they are called through the selector."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import mindspore

from lastgasp.adapter import replace_attribute
from lastgasp_mindformers.topology import left_to_mindspore
from lastgasp_mindformers.unfit import refuse_missing

if TYPE_CHECKING:
    from lastgasp_mindformers.reload import MindFormersSelector

Loads = Callable[..., Any]
_MODULE = "mindformers.trainer.base_trainer"
_CONTENT = ("transform_and_load_checkpoint", "load_checkpoint")
_COUNTERS = "load_resume_context_from_checkpoint"
_WHOLE = ("stand_alone", "data_parallel")
"""Parallel modes in which each rank holds all parameters."""


@contextlib.contextmanager
def watched(selector: MindFormersSelector) -> Iterator[None]:
    """Functions that a version of MindFormers lacks are left out: there an error of loading propagates unchanged."""
    module = sys.modules.get(_MODULE)
    with contextlib.ExitStack() as undo:
        if module is not None and not left_to_mindspore():  # TrainFaultTolerance loads on some ranks only
            for name in (*_CONTENT, _COUNTERS):
                if callable(vars(module).get(name)):
                    through = _reading if name == _COUNTERS else _loading
                    undo.callback(replace_attribute(module, name, functools.partial(through, selector)))
        yield


@contextlib.contextmanager
def method_watched(selector: MindFormersSelector, owner: Any, name: str) -> Iterator[None]:
    """The same for a method of one object, such as the pynative Trainer's."""
    with contextlib.ExitStack() as undo:
        if callable(getattr(owner, name, None)):
            undo.callback(replace_attribute(owner, name, functools.partial(_loading, selector)))
        yield


def _reading(selector: MindFormersSelector, original: Loads) -> Loads:
    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return selector.read(lambda: original(*args, **kwargs))

    return ours


def _loading(selector: MindFormersSelector, original: Loads) -> Loads:
    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        network = _network(original, args, kwargs)
        return selector.load(lambda: original(*args, **kwargs), lambda held: refuse_another(network, held))

    return ours


def _network(function: Loads, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The object that the call loads into; None if its parameter has another name."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    return next((given[name] for name in ("network", "model") if hasattr(given.get(name), "trainable_params")), None)


def refuse_another(network: Any, held: Collection[str]) -> None:
    """Refuse missing parameters: MindFormers leaves parameters that a checkpoint lacks as they are, and trains on.

    Args:
        network: what is about to be loaded into; None is not judged, and nothing is where ranks hold different parts.
        held: names of the parameters in the files of this rank.

    Raises:
        CheckpointError: there are such parameters.
    """
    if network is not None and mindspore.get_auto_parallel_context("parallel_mode") in _WHOLE:
        refuse_missing((param.name for param in network.trainable_params()), held)
