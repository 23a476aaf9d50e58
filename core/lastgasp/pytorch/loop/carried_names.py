"""Names that a loop's code carries from one step, or epoch, to the next: `if acc > best: best = acc`, `seen += n`.

No checkpoint has them but what `TorchState(extra=...)` has, and a resumed run begins with the script's. They are found
in the source: names that an iteration may read before it sets them, and sets; and containers that it adds to.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from types import FrameType
from typing import Any, NamedTuple

from lastgasp.pytorch.loop.positions_of_its_own import locals_of
from lastgasp.pytorch.uservalues.kinds import is_users_module

CARRIED = (
    "what this loop carries from step to step in names of its own is in no checkpoint, and a resumed run begins with "
    "the script's: {}. Give what matters to TorchState(extra={{...}})"
)
_NAMED = 6
_CALLERS = 12
_LINES = 20_000
"""A longer file is not looked into."""
_ADDS = frozenset(("append", "appendleft", "extend", "insert", "add", "update", "setdefault", "pop", "popleft"))
_CLOCKS = frozenset(
    ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "now")
)
_CONTAINERS = (list, dict, set, deque)
Loop = ast.For | ast.AsyncFor | ast.While
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """A line of a user's code where a frame is.

    Attributes:
        lost: names with a value there that a checkpoint does not have.
    """

    file: str
    function: str
    line: int
    lost: frozenset[str]


class CarriedNames:
    """Finds and tells them on a thread of its own: it reads the script, whose disk may be slow.

    Args:
        tell: takes the text; it is not called where there is nothing to say.

    Attributes:
        looked: whether `look` was called; once is enough.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.looked, self._tell = False, tell
        self._thread: threading.Thread | None = None

    def look(self, frame: FrameType | None, saved: Iterable[Any], counts: Iterable[int]) -> None:
        """Where a frame is; as `places_of`, whose values are looked at here. Never raises."""
        self.looked = True
        with contextlib.suppress(Exception):  # the user's values; a limit of threads
            places = places_of(frame, saved, counts)
            thread = threading.Thread(target=self._find, args=(places,), name="lastgasp-names", daemon=True)
            thread.start()
            self._thread = thread

    def _find(self, places: list[Place]) -> None:
        with contextlib.suppress(Exception):  # the user's source
            if found := told(carried_at(places)):
                self._tell(found)

    def wait(self, seconds: float) -> None:
        """Until it is told."""
        if self._thread is not None:
            self._thread.join(seconds)


def places_of(frame: FrameType | None, saved: Iterable[Any], counts: Iterable[int]) -> list[Place]:
    """Of a frame, and of those that have called it.

    Args:
        saved: what `extra` has: a value that is in there, or goes by the same name, is not lost.
        counts: of steps and epochs: a number that is one of these is not lost, either.
    """
    held, names, kept = set[Any](), set[str](), set[int]()
    for name, value in _inside(saved):
        names.add(name)
        kept.add(id(value))
        if isinstance(value, Number | str) and value not in (0, ""):
            held.add(value)
    held |= {count + off for count in counts for off in (-1, 0, 1) if count}
    found = list[Place]()
    for _ in range(_CALLERS):
        if frame is None:
            break
        if is_users_module(frame.f_globals.get("__name__", "")):
            code = frame.f_code
            values = frame.f_globals if code.co_name == "<module>" else frame.f_globals | locals_of(frame)
            lost = {name for name, value in values.items() if name not in names and _is_lost(value, held, kept)}
            found.append(Place(code.co_filename, code.co_name, frame.f_lineno, frozenset(lost)))
        frame = frame.f_back
    return found


def carried_at(places: Iterable[Place]) -> list[str]:
    """Those of the loops around these lines. Reads the files."""
    found, read = dict[str, None](), dict[str, ast.AST | None]()
    for place in places:
        if place.file not in read:  # a parser stops all other threads
            read[place.file] = _read(place.file)
        names = _of_line(read[place.file], place.function, place.line)
        found |= {name: None for name in names if name in place.lost}
    return list(found)


def told(names: list[str]) -> str:
    """The note of these; empty for none."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return CARRIED.format(", ".join(names[:_NAMED]) + more) if names else ""


def _inside(saved: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for one in saved:
        yield "", one
        content = one if isinstance(one, dict) else getattr(one, "__dict__", {})
        yield from ((str(name), value) for name, value in list(content.items()))


def _is_lost(value: object, held: set[Any], kept: set[int]) -> bool:
    kind = type(value)  # not isinstance: a lazy object is made by a question for its class
    if value is None or issubclass(kind, Number | str):
        return value not in held
    return issubclass(kind, _CONTAINERS) and id(value) not in kept


def _read(file: str) -> ast.AST | None:
    lines = linecache.getlines(file)
    return ast.parse("".join(lines)) if lines and len(lines) <= _LINES else None


def _of_line(inner: ast.AST | None, function: str, line: int) -> list[str]:
    loops, name = list[Loop](), "<module>"
    while inner is not None and (found := _around(inner, line)) is not None:
        inner = found
        if isinstance(inner, Function):
            loops, name = [], inner.name
        elif isinstance(inner, Loop):
            loops.append(inner)
    return [one for loop in loops for one in Iteration(loop).carried] if name == function else []


def _around(node: ast.AST, line: int) -> ast.AST | None:
    """The statement, function or class in it that has the line."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            first = child.body[0].lineno if isinstance(child, ast.match_case) else child.lineno
            last = child.body[-1].end_lineno if isinstance(child, ast.match_case) else child.end_lineno
            if first <= line <= (last or first):
                return child
    return None


class Iteration:
    """What one iteration of a loop does with names, in the order in which it does it.

    Attributes:
        carried: names that it may read before it sets them, and sets, but clocks; and containers that it adds to.
    """

    def __init__(self, loop: Loop) -> None:
        self._read, self._set, self._added = dict[str, None](), set[str](), dict[str, None]()
        self._others, self._clocks = set[str](), dict[str, set[str]]()
        defined = set[str]()
        if isinstance(loop, ast.While):
            self._reads(loop.test, defined)
        else:
            self._sets(loop.target, defined)
        self._body(loop.body, defined)
        carried = [name for name in self._read if name in self._set and not self._is_clock(name)]
        self.carried = carried + [name for name in self._added if name not in self._set]

    def _is_clock(self, name: str, looked: frozenset[str] = frozenset()) -> bool:
        """Whether it is only ever set to the time, also by way of other names."""
        if name in looked:
            return True
        if name in self._others or name not in self._clocks:
            return False
        return all(not source or self._is_clock(source, looked | {name}) for source in self._clocks[name])

    # -- statements: each changes `defined`; returns whether what follows is reached ----------------------------

    def _body(self, statements: list[ast.stmt], defined: set[str]) -> bool:
        return all(self._statement(one, defined) for one in statements)

    def _statement(self, one: ast.stmt, defined: set[str]) -> bool:
        match one:
            case ast.Assign():
                self._reads(one.value, defined)
                for target in one.targets:
                    self._sets(target, defined, one.value)
            case ast.AugAssign():
                self._reads(one.value, defined)
                if isinstance(one.target, ast.Name):
                    self._reads(ast.Name(one.target.id, ast.Load()), defined)
                self._sets(one.target, defined)
            case ast.AnnAssign() if one.value is not None:
                self._reads(one.value, defined)
                self._sets(one.target, defined, one.value)
            case ast.If():
                self._reads(one.test, defined)
                self._either(defined, [one.body, one.orelse])
            case ast.For() | ast.AsyncFor():
                self._reads(one.iter, defined)
                inside = set(defined)
                self._sets(one.target, inside)
                self._body(one.body, inside)
                self._body(one.orelse, defined)
            case ast.While():
                self._reads(one.test, defined)
                always = isinstance(one.test, ast.Constant) and bool(one.test.value)
                self._body(one.body, defined if always else set(defined))
            case ast.With() | ast.AsyncWith():
                for item in one.items:
                    self._reads(item.context_expr, defined)
                    if item.optional_vars is not None:
                        self._sets(item.optional_vars, defined)
                return self._body(one.body, defined)
            case ast.Try() | ast.TryStar():
                before = set(defined)
                self._body([*one.body, *one.orelse], defined)
                for handler in one.handlers:
                    inside = set(before)
                    if self._body(handler.body, inside):
                        defined &= inside
                self._body(one.finalbody, defined)
            case ast.Match():
                self._reads(one.subject, defined)
                self._either(defined, [*(case.body for case in one.cases), []])
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                defined.add(one.name)
            case ast.Import() | ast.ImportFrom():
                defined.update((alias.asname or alias.name).partition(".")[0] for alias in one.names)
            case ast.Continue() | ast.Break() | ast.Return() | ast.Raise():
                self._reads(one, defined)
                return False
            case _:
                self._reads(one, defined)
        return True

    def _either(self, defined: set[str], branches: list[list[ast.stmt]]) -> None:
        ends = list[set[str]]()
        for branch in branches:
            inside = set(defined)
            if self._body(branch, inside):
                ends.append(inside)
        if ends:
            defined |= set[str].intersection(*ends)

    # -- names --------------------------------------------------------------------------------------------------

    def _reads(self, node: ast.AST, defined: set[str]) -> None:
        """Of an expression, or of a statement that sets no names but by `:=`."""
        bound = set[str]()
        for one in ast.walk(node):
            if isinstance(one, ast.comprehension):
                bound |= {name.id for name in ast.walk(one.target) if isinstance(name, ast.Name)}
            elif isinstance(one, ast.arg):
                bound.add(one.arg)
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and one.id not in bound | defined:
                self._read[one.id] = None
            elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in _ADDS:
                self._adds(one.func.value)
        for one in ast.walk(node):
            if isinstance(one, ast.NamedExpr):
                self._sets(one.target, defined, one.value)

    def _adds(self, holder: ast.expr) -> None:
        while isinstance(holder, ast.Subscript):
            holder = holder.value
        if isinstance(holder, ast.Name):
            self._added[holder.id] = None

    def _sets(self, target: ast.expr, defined: set[str], value: ast.expr | None = None) -> None:
        match target:
            case ast.Name():
                defined.add(target.id)
                self._set.add(target.id)
                if (source := _time_of(value)) is None:
                    self._others.add(target.id)
                else:
                    self._clocks.setdefault(target.id, set()).add(source)
            case ast.Tuple() | ast.List():
                alike = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
                values: list[ast.expr | None] = [*value.elts] if alike else [None] * len(target.elts)  # type: ignore[union-attr]
                for one, its in zip(target.elts, values, strict=True):
                    self._sets(one, defined, its)
            case ast.Starred():
                self._sets(target.value, defined)
            case ast.Subscript():
                self._reads(target.slice, defined)
                self._adds(target.value)


def _time_of(value: ast.expr | None) -> str | None:
    """Empty for a call that asks a clock, a name for that; None for anything else."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return "" if name in _CLOCKS else None
    return None
