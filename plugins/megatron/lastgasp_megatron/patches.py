"""Wrappers around Megatron's functions: in every holder, reversible, idempotent, looked after.

A wrapper takes `*args, **kwargs` and passes results through, so that no version's signature matters. One that
is called inside another of the same hook only passes on: MindSpeed may put its own layers in between.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lastgasp.errors import LastgaspError
from lastgasp_megatron import mindspeed
from lastgasp_megatron.holders import Function, Holder, holders_of, wrapped_chain

Around = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of the function, with the function, its arguments and its keywords."""

HOMES = (
    "megatron.training.training",
    "megatron.training.checkpointing",
    "megatron.training.initialize",
    "megatron.training.arguments",
    "megatron.training.async_utils",
    "megatron.training",
    "mindspeed_llm.training.training",
    "mindspeed_llm.training.checkpointing",
    "mindspeed_llm.training.initialize",
    "mindspeed_llm.training.arguments",
    "mindspeed_llm.training",
)
"""Modules whose function of a hook's name is the hook's, even where it is one of their own (megatron.md §4)."""


class HookNotPlaced(LastgaspError):
    """A function of Megatron's that must be wrapped is not what it has to be; the job must not run unprotected.

    Args:
        expected: what was looked for; found: what is there.
    """

    restart_helps = False

    def __init__(self, expected: str, found: str) -> None:
        self.expected, self.found = expected, found
        super().__init__(
            f"lastgasp cannot protect this job: expected {expected}, found {found} (megatron-core {_version()}). "
            "It was written for core_v0.12.1 to 0.19.2. Install one of these or a newer lastgasp, or take "
            "lastgasp_megatron.install() out of the script to run without it."
        )


@dataclass(frozen=True)
class Hook:
    """One function to wrap.

    Args:
        home: the module that must have it; name: its name there.
        around: what is called instead.
        needs: parameters that the function must have.
        required: whether a version without it is refused.
    """

    home: str
    name: str
    around: Around
    needs: tuple[str, ...] = ()
    required: bool = True

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.home}.{self.name}"


@dataclass(frozen=True)
class _Placed:
    module: ModuleType
    name: str
    ours: Function
    original: Function


class Patches:
    """Some hooks, and where they have been put.

    Args:
        hooks: which functions; nothing is changed before `place`.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = tuple(hooks)
        self._ours: dict[int, Function] = {}
        self._placed: list[_Placed] = []
        self._factories = {hook.path: self._factory(hook) for hook in self.hooks}
        self._inside = threading.local()

    # -- state ------------------------------------------------------------------------------------

    def is_ours(self, function: Function) -> bool:
        """Whether calling it comes to one of our wrappers, as far as `functools.wraps` tells."""
        return any(id(layer) in self._ours for layer in wrapped_chain(function))

    def lost(self) -> list[str]:
        """Dotted names where a loaded module's function of a hook is not ours."""
        return [
            f"{module.__name__}.{hook.name}"
            for hook in self.hooks
            for module, function in _sources(hook)
            if not self.is_ours(function)
        ]

    # -- change -----------------------------------------------------------------------------------

    def place(self) -> None:
        """Put every hook in all holders. Idempotent; what was lost since the last call is put back.

        Raises:
            HookNotPlaced: a required function is missing or has not the parameters it must have.
        """
        for hook in self.hooks:
            _check(hook)
        before = {hook.path: self._originals(hook) for hook in self.hooks}
        for hook in self.hooks:
            mindspeed.register(hook.path, self._factories[hook.path])
        self._replace_everywhere({hook: _union(before[hook.path], self._originals(hook)) for hook in self.hooks})

    def place_in(self, module: str) -> None:
        """Put the hooks whose function the just imported `module` has in all holders of it, unchecked."""
        namespace = vars(sys.modules[module])
        found = {hook: namespace.get(hook.name) for hook in self.hooks}
        fresh = {hook: [f] for hook, f in found.items() if callable(f) and not self.is_ours(f)}
        if fresh:
            self._replace_everywhere(fresh)

    def undo(self) -> None:
        """Put back what still is ours. Idempotent."""
        for path, factory in self._factories.items():
            mindspeed.unregister(path, factory)
        for placed in reversed(self._placed):
            if vars(placed.module).get(placed.name) is placed.ours:
                setattr(placed.module, placed.name, placed.original)
        self._placed.clear()

    def _originals(self, hook: Hook) -> list[Function]:
        """What modules may hold under this hook: its functions and what they wrap, but nothing of ours."""
        found: dict[int, Function] = {}
        for _, function in _sources(hook):
            for layer in wrapped_chain(function):
                if self.is_ours(layer):
                    break
                found[id(layer)] = layer
        return list(found.values())

    def _replace_everywhere(self, functions: Mapping[Hook, list[Function]]) -> None:
        holders = holders_of([function for found in functions.values() for function in found])
        for hook, found in functions.items():
            for function in found:
                self._replace(hook, function, holders[id(function)])

    def _replace(self, hook: Hook, function: Function, holders: list[Holder]) -> None:
        holders = [(module, name) for module, name in holders if vars(module).get(name) is function]
        ours = self._factories[hook.path](function) if holders else None
        for module, name in holders:
            setattr(module, name, ours)
            self._placed.append(_Placed(module, name, ours, function))

    def _factory(self, hook: Hook) -> Callable[[Function], Function]:
        def lastgasp_wrapper(original: Function) -> Function:
            if self.is_ours(original):
                return original
            ours = self._wrap(hook, original)
            self._ours[id(ours)] = ours
            return ours

        lastgasp_wrapper.__name__ = f"lastgasp_{hook.name}_wrapper"  # MindSpeed stacks what ends like this
        return lastgasp_wrapper

    def _wrap(self, hook: Hook, original: Function) -> Function:
        inside, path = self._inside, hook.path

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, path, False):
                return original(*args, **kwargs)
            setattr(inside, path, True)
            try:
                return hook.around(original, args, kwargs)
            finally:
                setattr(inside, path, False)

        return ours


def _sources(hook: Hook) -> list[tuple[ModuleType, Function]]:
    """The functions of the hook's name in the modules that are known to have one."""
    modules = [sys.modules.get(name) for name in dict.fromkeys((hook.home, *HOMES))]
    found = [(module, vars(module).get(hook.name)) for module in modules if isinstance(module, ModuleType)]
    return [(module, function) for module, function in found if callable(function)]


def _union(first: list[Function], second: list[Function]) -> list[Function]:
    return list({id(function): function for function in (*first, *second)}.values())


def _check(hook: Hook) -> None:
    expected = f"{hook.path}({', '.join(hook.needs)}{', ' if hook.needs else ''}...)"
    function = getattr(sys.modules.get(hook.home), hook.name, None)
    if not callable(function):
        if hook.required:
            what = "no such module" if hook.home not in sys.modules else f"{function!r} under that name"
            raise HookNotPlaced(expected, what)
        return
    missing = _missing(function, hook.needs)
    if missing:
        raise HookNotPlaced(expected, f"{hook.path}{inspect.signature(function)}, without {', '.join(missing)}")


def _missing(function: Function, needs: Sequence[str]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values()):
        return []  # a wrapper that does not tell what it wraps
    return [name for name in needs if name not in parameters]


def _version() -> str:
    return str(getattr(sys.modules.get("megatron.core"), "__version__", "of unknown version"))


def argument(function: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = None) -> Any:
    """The value that a call gives to the parameter `name`, whatever the order is in this version."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return kwargs.get(name, default)
    bound.apply_defaults()
    return bound.arguments.get(name, kwargs.get(name, default))
