"""Wrappers around methods of MindSpore's and MindFormers' classes: reversible, idempotent, checked against the version.

A wrapper takes `*args, **kwargs` and passes results through, so that no version's signature matters. One that is
called inside another of the same hook only passes on.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lastgasp.errors import LastgaspError

Method = Callable[..., Any]
Around = Callable[[Method, tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of the method, with the method, its arguments (the object first) and its keywords."""
_MISSING = object()


class HookNotPlaced(LastgaspError):
    """A method that must be wrapped is not what it has to be; the job must not run unprotected.

    Args:
        expected: what was looked for; found: what is there.
    """

    restart_helps = False

    def __init__(self, expected: str, found: str) -> None:
        self.expected, self.found = expected, found
        super().__init__(
            f"lastgasp cannot protect this job: expected {expected}, found {found} ({_versions()}). It was written for "
            "mindformers 1.6.0 to 1.9.0 with mindspore 2.7.0 to 2.9.0. Install one of these or a newer lastgasp, or "
            "set LASTGASP=0 to run without it."
        )


@dataclass(frozen=True)
class Hook:
    """One method to wrap.

    Args:
        module: where its class is; owner: the class; name: the method.
        around: what is called instead.
        needs: parameters that the method must have.
    """

    module: str
    owner: str
    name: str
    around: Around
    needs: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.module}.{self.owner}.{self.name}"


class Patches:
    """Some hooks on classes whose modules are imported.

    Args:
        hooks: which methods; nothing is changed before `place`.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = tuple(hooks)
        self._placed: list[tuple[type, str, Method, Method]] = []
        self._inside = threading.local()

    def place(self) -> None:
        """Wrap all of them. Idempotent; what somebody else has replaced since is wrapped again.

        Raises:
            HookNotPlaced: a method is missing or has not the parameters it must have; then none is wrapped.
        """
        found = [(hook, *_method(hook)) for hook in self.hooks]
        for hook, owner, method in found:
            if not self._is_ours(method):
                ours = self._wrap(hook, method)
                setattr(owner, hook.name, ours)
                self._placed.append((owner, hook.name, ours, method))

    def undo(self) -> None:
        """Put back what still is ours. Idempotent."""
        for owner, name, ours, original in reversed(self._placed):
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
        self._placed.clear()

    def _is_ours(self, method: Method) -> bool:
        layers = {id(ours) for _, _, ours, _ in self._placed}
        layer: Any = method
        while layer is not None:
            if id(layer) in layers:
                return True
            layer = getattr(layer, "__wrapped__", None)
        return False

    def _wrap(self, hook: Hook, original: Method) -> Method:
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


def bound(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call gives, by the name of the parameter, less the object; left out what it leaves out.

    Raises:
        TypeError: the call does not fit the method.
    """
    signature = inspect.signature(method)
    given = dict(signature.bind(*args, **kwargs).arguments)
    del given[next(iter(signature.parameters))]
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def _method(hook: Hook) -> tuple[type, Method]:
    expected = f"{hook.path}({', '.join(('self', *hook.needs))}, ...)"
    module = sys.modules.get(hook.module)
    if module is None:
        raise HookNotPlaced(expected, "no such module")
    owner = getattr(module, hook.owner, None)
    if not isinstance(owner, type):
        raise HookNotPlaced(expected, f"{owner!r} as {hook.owner}")
    method = vars(owner).get(hook.name, _MISSING)
    if not callable(method):
        raise HookNotPlaced(expected, "no such method" if method is _MISSING else repr(method))
    parameters = inspect.signature(method).parameters
    missing = [name for name in hook.needs if name not in parameters]
    if missing:
        raise HookNotPlaced(expected, f"{hook.name}{inspect.signature(method)}, without {', '.join(missing)}")
    return owner, method


def _versions() -> str:
    return ", ".join(f"{name} {_version(name)}" for name in ("mindformers", "mindspore"))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version" if name in sys.modules else "not installed"
