"""`train`: a training function that is entered again in the same process after a fault."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import torch.distributed as dist

from lastgasp.errors import UsageError
from lastgasp.gasp.again import Again
from lastgasp.gasp.joining import order_when_taken_in, tell_code
from lastgasp.gasp.new_process import order_of_this_process
from lastgasp.pytorch.cut import cut_connections
from lastgasp.pytorch.draining import drain
from lastgasp.pytorch.drop_groups import drop_groups, forget_accelerate
from lastgasp.pytorch.handover import hand_over
from lastgasp.pytorch.loop import joining
from lastgasp.pytorch.loop.kept_hooks import next_hook
from lastgasp.pytorch.loop.kept_random import KeptRandom
from lastgasp.pytorch.loop.memory import Held, Memory
from lastgasp.pytorch.loop.sigterm_between import SigtermBetween
from lastgasp.pytorch.loop.state import TorchState

log = logging.getLogger("lastgasp")

P = ParamSpec("P")
T = TypeVar("T")
LATER = {"auto": "later", "replace": ""}
"""How a training may be entered again (`messages.Begin`) that is not the first of its script."""

_current: Entry | None = None
_begun = False
"""A training of this process has begun. A new process would run the script up to that one's place, not to a later."""


class Renewed(Protocol):
    """What a process keeps from one entry to the next."""

    def renew(self, state: Any) -> None:
        """Make it as a new process would have it; `state` is what `Held` says of the entry that has ended."""


class Entry:
    """One `train` in progress.

    Attributes:
        why: why the function cannot be entered again; empty if it can.
        held: what was kept for the next call of it, or is not used up by this one yet.
        sessions: opened in this call; only the first one is known to be that of the call before.
        end: ends an open session as its `with` block would, where the function has none.
        objects: of the first session of the first call.
        random: as it is at the first call; hooks: the number of the first one that it could register.
        first: no other training has begun in this process before.
        given: iterators that this call of the function has taken its data from; earlier: those of the call before. The
            iterators themselves are had by a call.
    """

    def __init__(self, why: str, held: Held | None, first: bool = True) -> None:
        self.why, self.held, self.first = why, held, first
        self.again, self.sessions = False, 0
        self.end: Callable[[BaseException], object] | None = None
        self.objects: Renewed | None = None
        self.random, self.hooks = KeptRandom(), next_hook()
        self.given, self.earlier = list[Callable[[], Any]](), list[Callable[[], Any]]()

    def take(self) -> Held | None:
        """For a session that is being opened: what it begins with, if the training was entered again.

        Raises:
            UsageError: the function has to be left first.
        """
        if self.again:
            raise UsageError("a session has ended by a fault, and train() is about to call its function again: let the "
                             "exception leave it, and open no other session")  # fmt: skip
        held, self.held = self.held, None
        self.sessions += 1
        return held

    def takes(self, data: Any) -> None:
        """The loop is about to iterate over `data`.

        Raises:
            UsageError: an iterator that the call before has taken from: it is further than this rank's training.
        """
        if not isinstance(data, Iterator):
            return
        if any(data is one() for one in self.earlier):
            raise UsageError(f"s.batches() was given a {type(data).__name__} that was made before the function was "
                             "called again, and has given batches already: make it inside of the function")  # fmt: skip
        if not any(data is one() for one in self.given):
            self.given.append(_known_by(data))

    def keep(self, held: Held) -> None:
        """A session has ended by a fault; the function is to be called again with what it held."""
        self.held, self.again = held, True


def current() -> Entry | None:
    """The `train` in progress in this process, if any. For a session that is being opened."""
    global _begun
    _begun = True
    return _current


def in_progress() -> bool:
    """Whether this process is inside of `train` or of another training that may be entered again."""
    return _current is not None


def train(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function(*args, **kwargs)`; after a fault that can be answered in place, call it again in the same process.

    The function makes its process group, wraps its model, opens its `Session` and trains. When it is called again, the
    session begins with the last completed step, from memory: model, optimizer, scheduler, random state and position in
    the data are those of that step. What is made outside of the function (a model, a data set) stays as it is.

    A rank that was killed or hung is replaced by a new process, which runs the program from its start; all other ranks
    keep theirs; so is one that is killed during the recovery, once. An exception that may pass (`RuntimeError`,
    `OSError`) is answered by doing the step again, once. All other faults, and further ones during the recovery, are
    answered as ever: the step is saved and the job restarts.

    Returns:
        What the function returned.

    Raises:
        UsageError: it is called inside of itself, or the function is a generator or a coroutine.
        BaseException: what the function has raised, where it is not entered again.
    """
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise UsageError("train() calls a function that trains: a generator or a coroutine does nothing when called")
    if in_progress():
        raise UsageError("train() is called inside of a function that train() has called")
    return enter(partial(function, *args, **kwargs), _cannot(), joins=True, fewer=True)


def enter(function: Callable[[], T], why: str, first: bool = True, joins: bool = False, fewer: bool = False) -> T:
    """Call `function`, and again after each fault that is answered in place; no other training may be in progress.

    Args:
        why: why it cannot be entered again; empty if it can.
        first: a new process would come to it without having met the others before, as far as the caller knows.
        joins: where MindIO leads, a new process joins it here, before `function` makes a process group.
        fewer: it may go on with fewer ranks, as far as the caller knows.

    Raises:
        BaseException: what the function has raised, where it is not entered again.
    """
    global _current, _begun
    tell_code()
    if why and os.environ.get("RANK", "0") == "0":
        log.warning("this training cannot be entered again: %s. After a fault the job restarts", why)
    held = _as_replacement()
    if joins and held is None and not (why or _begun):
        held = joining.join(fewer)
    entry = _current = Entry(why, held, first=first and not _begun)
    _begun = True
    try:
        while True:
            try:
                result = function()
                if not entry.again:
                    return result
                _goes_on(entry, None)  # it has handled the error itself
            except BaseException as error:
                if not _goes_on(entry, error):
                    raise
                traceback.clear_frames(error.__traceback__)
            _enter_again(entry)
    finally:
        _current = None


def _cannot() -> str:
    if dist.is_available() and dist.is_initialized():
        return "the process group was made outside of the function that train() calls"
    if threading.current_thread() is not threading.main_thread():
        return "train() is not called on the main thread, where signals arrive"
    return ""


def _as_replacement() -> Held | None:
    """What the launcher has told a process that takes the place of a dead rank, or that of a missing one."""
    order = order_of_this_process() or order_when_taken_in()
    return Held(order) if order is not None else None


def _goes_on(entry: Entry, error: BaseException | None) -> bool:
    """Whether the function is to be called again; the session has reported the error, or is made to."""
    if error is not None and not entry.again and entry.end is not None:
        entry.end(error)
    if error is not None and not entry.again and entry.held is not None and entry.held.life is not None:
        entry.held.life.failed(error)  # before the session was opened once more
    goes_on, entry.again, entry.end, entry.sessions = entry.again, False, None, 0
    entry.given, entry.earlier = [], entry.given or entry.earlier
    return goes_on


def _known_by(data: Any) -> Callable[[], Any]:
    """Has `data` as long as it lives; for ever where it does not tell its end (`zip`, `itertools.cycle`)."""
    try:
        return weakref.ref(data)
    except TypeError:
        return lambda: data


def _enter_again(entry: Entry) -> None:
    """Drop the process groups, and join the next incarnation with what is held."""
    held = entry.held
    assert held is not None
    try:
        drain()
        cut_connections(held.again.pids, held.again.ends, held.again.port)
        in_parts = held.again.arenas is not None
        if in_parts:
            _renew(entry, held)
            gc.collect()  # the model has its groups, whose end may take long, and memory that the next one needs
        drop_groups(held.wrapped)
        forget_accelerate()
        if not in_parts:
            _renew(entry, held)
        os.environ.update(held.again.environment)
        if held.rejoin is not None:
            held.life = held.rejoin(held)
            held.life.before_again = partial(_once_more, entry, held)
        entry.random.renew()
        held.alone = None  # what has ended is let go of
    except BaseException as error:  # the launcher has died, so that no other rank can join, either
        if held.alone is not None:
            held.alone(error)
        raise
    finally:
        if held.between is not None:
            held.between.over()
            held.between = None


def _once_more(entry: Entry, held: Held, again: Again) -> None:
    """This rank has joined and waits for others, which do not come: it is to join again, with what it holds."""
    assert held.life is not None
    memory = held.memory
    if memory is not None and again.saved:
        memory = replace(memory, durable=again.step)
    between = SigtermBetween(held.life.session.status, held.users_handler)
    alone = held.life.save_alone
    entry.keep(replace(held, again=again, memory=memory, life=None, between=between, alone=alone))


def _renew(entry: Entry, held: Held) -> None:
    if entry.objects is not None:
        entry.objects.renew(held.state)
    if held.again.arenas is not None or isinstance(held.state, TorchState):
        held.state = None  # with the model, of which there may be no room for two


def received(held: Held) -> Memory:
    """What this rank held, or takes from the one that did; all ranks call it together."""
    memory = held.memory
    if held.again.takers:
        memory = hand_over(memory, held.again.source, held.again.takers)
    assert memory is not None
    return memory
