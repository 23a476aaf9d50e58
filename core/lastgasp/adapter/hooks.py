"""Wrappers around a framework's functions and methods: in every holder, late, reversible, looked after.

A function is found by identity, since `from x import f` makes copies of its name, and wrapped wherever it is held. A
wrapper passes arguments and results through, so that no version's signature matters; one that is called inside another
of the same hook only passes on. A function that is missing, or lacks a parameter that the hook needs, is refused:
a job must not run unprotected without a word.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any, Protocol

import wrapt

from lastgasp.errors import LastgaspError

Function = Any
"""A callable of the framework's; its signature changes from version to version and is never declared here."""
Around = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of the function, with it, its arguments and its keywords. A method comes bound, without self."""
Undo = Callable[[], None]

_OURS = ("lastgasp", "wrapt")


class HookNotPlaced(LastgaspError):
    """A function that must be wrapped is not what it has to be; the job must not run unprotected.

    Args:
        expected: what was looked for; found: what is there.
        remedy: which versions are known, and what to do.
    """

    restart_helps = False

    def __init__(self, expected: str, found: str, remedy: str) -> None:
        self.expected, self.found = expected, found
        super().__init__(f"lastgasp cannot protect this job: expected {expected}, found {found}. {remedy}")


@dataclass(frozen=True)
class Hook:
    """One function or method to wrap.

    Args:
        module: the module that must have it.
        name: its name there: `function` or `Class.method`.
        around: what is called instead.
        needs: parameters that it must have.
        required: whether a version without it is refused.
    """

    module: str
    name: str
    around: Around
    needs: tuple[str, ...] = ()
    required: bool = True

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.module}.{self.name}"


class PatchManager(Protocol):
    """Somebody else who applies patches to the same functions again and again, and must know of ours (MindSpeed)."""

    def register(self, path: str, wrapper: Callable[[Function], Function]) -> None:
        """Have `wrapper` applied to the function at the dotted `path` from now on. Idempotent."""

    def unregister(self, path: str, wrapper: Callable[[Function], Function]) -> None:
        """Take it out again."""


@dataclass(frozen=True)
class _Placed:
    owner: Any
    name: str
    ours: Function
    original: Function


class Hooks:
    """Some hooks, and where they have been put.

    Args:
        hooks: what to wrap; nothing is changed before `place`.
        remedy: ends the error of a hook that cannot be placed: known versions, and how to run without lastgasp.
        homes: further modules whose function of a hook's name is the hook's, even where it is one of their own.
        manager: is told of each hook.
    """

    def __init__(
        self,
        hooks: Iterable[Hook],
        *,
        remedy: Callable[[], str] = lambda: "Install a version that this one knows, or a newer lastgasp.",
        homes: Sequence[str] = (),
        manager: PatchManager | None = None,
    ) -> None:
        self.hooks = tuple(hooks)
        self._remedy, self._homes, self._manager = remedy, tuple(homes), manager
        self._ours: dict[int, Function] = {}
        self._placed: list[_Placed] = []
        self._factories = {hook.path: self._factory(hook) for hook in self.hooks}
        self._inside = threading.local()

    # -- state ------------------------------------------------------------------------------------

    def is_ours(self, function: Function) -> bool:
        """Whether calling it comes to one of our wrappers, as far as `__wrapped__` shows."""
        return any(self._made(layer) for layer in wrapped_chain(function))

    def _made(self, layer: Function) -> bool:
        parent = getattr(layer, "_self_parent", None)  # a method that was looked up is a bound copy of the wrapper
        return id(layer) in self._ours or (parent is not None and id(parent) in self._ours)

    def lost(self) -> list[str]:
        """Dotted names where a loaded module's function of a hook is not ours."""
        return [
            f"{owner.__name__}.{hook.name.rpartition('.')[2]}"
            for hook in self.hooks
            for owner, function in self._sources(hook)
            if not self.is_ours(function)
        ]

    # -- change -----------------------------------------------------------------------------------

    def place(self) -> None:
        """Put every hook in all holders. Idempotent; what was lost since the last call is put back.

        Raises:
            HookNotPlaced: a required function is missing or lacks parameters; then none is placed.
        """
        for hook in self.hooks:
            self._check(hook)
        before = {hook.path: self._originals(hook) for hook in self.hooks}
        if self._manager is not None:
            for hook in self.hooks:
                self._manager.register(hook.path, self._factories[hook.path])
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
        if self._manager is not None:
            for path, factory in self._factories.items():
                self._manager.unregister(path, factory)
        for placed in reversed(self._placed):
            if vars(placed.owner).get(placed.name) is placed.ours:
                setattr(placed.owner, placed.name, placed.original)
        self._placed.clear()

    # -- inside -----------------------------------------------------------------------------------

    def _sources(self, hook: Hook) -> list[tuple[Any, Function]]:
        """The functions of the hook's name in the modules, or the class, that are known to have one."""
        class_name, _, name = hook.name.rpartition(".")
        if class_name:
            owner = getattr(sys.modules.get(hook.module), class_name, None)
            found = vars(owner).get(name) if isinstance(owner, type) else None
            return [(owner, found)] if callable(found) else []
        modules = [sys.modules.get(home) for home in dict.fromkeys((hook.module, *self._homes))]
        held = [(module, vars(module).get(name)) for module in modules if isinstance(module, ModuleType)]
        return [(module, function) for module, function in held if callable(function)]

    def _originals(self, hook: Hook) -> list[Function]:
        """What may be held under this hook: its functions and what they wrap, but nothing of ours."""
        found: dict[int, Function] = {}
        for _, function in self._sources(hook):
            for layer in wrapped_chain(function):
                if self.is_ours(layer):
                    break
                found[id(layer)] = layer
        return list(found.values())

    def _replace_everywhere(self, functions: Mapping[Hook, list[Function]]) -> None:
        plain = [function for hook, found in functions.items() if "." not in hook.name for function in found]
        holders = holders_of(plain)
        for hook, found in functions.items():
            for function in found:
                held = self._sources(hook) if "." in hook.name else holders[id(function)]
                self._replace(hook, function, [(owner, name) for owner, name in _named(hook, held)])

    def _replace(self, hook: Hook, function: Function, holders: list[tuple[Any, str]]) -> None:
        holders = [(owner, name) for owner, name in holders if vars(owner).get(name) is function]
        ours = self._factories[hook.path](function) if holders else None
        for owner, name in holders:
            setattr(owner, name, ours)
            self._placed.append(_Placed(owner, name, ours, function))

    def _factory(self, hook: Hook) -> Callable[[Function], Function]:
        def lastgasp_wrapper(original: Function) -> Function:
            if self.is_ours(original):
                return original
            ours = self._wrap(hook, original)
            self._ours[id(ours)] = ours
            return ours

        lastgasp_wrapper.__name__ = f"lastgasp_{hook.name.replace('.', '_')}_wrapper"  # MindSpeed stacks such names
        return lastgasp_wrapper

    def _wrap(self, hook: Hook, original: Function) -> Function:
        inside, path, method = self._inside, hook.path, "." in hook.name

        def ours(call: Function, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if method and not isinstance(call, MethodType):  # called through the class, whatever the object is
                instance, args = (args[0], args[1:]) if instance is None else (instance, args)
                call = MethodType(original, instance)
            if getattr(inside, path, False):
                return call(*args, **kwargs)
            setattr(inside, path, True)
            try:
                return hook.around(call, args, kwargs)
            finally:
                setattr(inside, path, False)

        return wrapt.FunctionWrapper(original, ours)

    def _check(self, hook: Hook) -> None:
        expected = f"{hook.path}({', '.join(hook.needs)}{', ' if hook.needs else ''}...)"
        sources = [function for owner, function in self._sources(hook) if _home(owner, hook)]
        if not sources:
            if hook.required:
                raise HookNotPlaced(expected, _absent(hook), self._remedy())
            return
        missing = _missing(sources[0], hook.needs)
        if missing:
            found = f"{hook.path}{inspect.signature(sources[0])}, without {', '.join(missing)}"
            raise HookNotPlaced(expected, found, self._remedy())


def replace_attribute(owner: object, name: str, make: Callable[[Any], Any]) -> Undo:
    """Replace an attribute of this one object by `make(original)`; the undo is idempotent.

    Raises:
        AttributeError: there is none.
    """
    original = getattr(owner, name)
    held = name in vars(owner)
    before, ours = vars(owner).get(name), make(original)
    object.__setattr__(owner, name, ours)

    def undo() -> None:
        if vars(owner).get(name) is not ours:
            return
        if held:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)

    return undo


def argument(function: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = None) -> Any:
    """The value that a call gives to the parameter `name`, whatever the order is in this version."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return kwargs.get(name, default)
    bound.apply_defaults()
    return bound.arguments.get(name, kwargs.get(name, default))


def arguments_of(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call gives, by the name of the parameter; left out what it leaves out.

    Raises:
        TypeError: the call does not fit the function.
    """
    signature = inspect.signature(function)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def holders_of(targets: Iterable[Function]) -> dict[int, list[tuple[ModuleType, str]]]:
    """Every module attribute that is one of `targets`, under whatever name; keyed by `id(target)`."""
    found: dict[int, list[tuple[ModuleType, str]]] = {id(target): [] for target in targets}
    if found:
        for module, name, value in _attributes():
            if id(value) in found:
                found[id(value)].append((module, name))
    return found


def wrapped_chain(function: Function) -> list[Function]:
    """`function` and what it wraps, outermost first, as far as `__wrapped__` shows."""
    chain: list[Function] = []
    while function is not None and not any(function is seen for seen in chain):
        chain.append(function)
        function = getattr(function, "__wrapped__", None)
    return chain


def _attributes() -> Iterator[tuple[ModuleType, str, object]]:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and not module.__name__.startswith(_OURS):
            yield from ((module, name, value) for name, value in list(vars(module).items()))


def _named(hook: Hook, held: Sequence[tuple[Any, Any]]) -> Iterator[tuple[Any, str]]:
    class_name, _, name = hook.name.rpartition(".")
    for owner, second in held:
        yield owner, name if class_name else second


def _home(owner: Any, hook: Hook) -> bool:
    return isinstance(owner, type) or owner.__name__ == hook.module


def _absent(hook: Hook) -> str:
    module = sys.modules.get(hook.module)
    if module is None:
        return "no such module"
    class_name, _, name = hook.name.rpartition(".")
    if class_name and not isinstance(owner := getattr(module, class_name, None), type):
        return f"{owner!r} as {class_name}"
    there = getattr(getattr(module, class_name) if class_name else module, name, None)
    return "no such function" if there is None else f"{there!r} under that name"


def _missing(function: Function, needs: Sequence[str]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values()):
        return []  # a wrapper that hides what it wraps
    return [name for name in needs if name not in parameters]


def _union(first: list[Function], second: list[Function]) -> list[Function]:
    return list({id(function): function for function in (*first, *second)}.values())
