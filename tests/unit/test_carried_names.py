"""Names that a loop carries from step to step, found in its source."""

from __future__ import annotations

import ast
import os
import sys
import textwrap
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lastgasp.pytorch.loop.carried_names import CarriedNames, carried_at, places_of, told
from lastgasp.pytorch.loop.positions_of_its_own import PositionsOfItsOwn

LOOPS = {
    "the best so far, counters, sums of an epoch, histories": (
        """
        best, seen, total, history, table, patience = 0.0, 0, 0.0, [], {}, None
        for epoch in range(1):
            running = 0.0
            for batch in [1]:
                loss = batch * 2.0
                running += loss
                seen += 1
                table[batch] = loss
                look()
            accuracy = running / seen
            if accuracy > best:
                best = accuracy
            history.append(accuracy)
            patience = 1 if patience is None else patience + 1
        """,
        ["best", "seen", "history", "patience", "running", "table"],
    ),
    "nothing, but the time": (
        """
        t0, started = time.time(), time.perf_counter()
        limit = 5
        while True:
            for batch in [1]:
                if batch > 3:
                    rate = 0.1
                else:
                    rate = 0.2
                loss = batch * rate
                for i, part in enumerate([loss]):
                    loss = loss + part
                with open(os.devnull) as file:
                    text = file.read()
                try:
                    value = int(text or 1)
                except ValueError:
                    value = 0
                if value > limit:
                    continue
                t1 = time.time()
                dt = t1 - t0
                t0 = t1
                names = [x for x in str(value)]
                look()
                print_ = names, dt, started
            break
        """,
        [],
    ),
    "what may not be set, by several ways": (
        """
        a = b = c = d = e = 0
        for batch in [1]:
            if batch > 3:
                a = 1
            elif batch > 2:
                b = 1
            match batch:
                case 7:
                    c = 1
            for part in []:
                d = part
            try:
                e = 1
            except ValueError:
                pass
            a, b = a + 1, b
            look(a, b, c, d, e)
            if (w := batch) > 3 or w:
                w
        """,
        ["a", "b", "c", "d", "e"],
    ),
    "what extra has": (
        """
        best, best_step, steps, log = extra["best"], 7.5, 12, extra["log"]
        for batch in [1]:
            look()
            best += 1
            best_step += 1
            steps += 1
            log.append(best)
            extra["n"] = best
        """,
        [],
    ),
}
EXTRA: dict[str, Any] = {"best": 0.0, "best_step": 0, "log": []}


@pytest.mark.parametrize("where", ["a function", "the module"])
@pytest.mark.parametrize("what", LOOPS)
def test_names_that_an_iteration_needs_from_the_one_before(what: str, where: str, tmp_path: Path) -> None:
    (body, wanted), saved = LOOPS[what], [EXTRA] * (what == "what extra has")
    body = textwrap.dedent(body)
    if where == "a function":
        body = "def train():\n" + textwrap.indent(body, "    ") + "\ntrain()\n"
    file, found = tmp_path / "train.py", list[str]()
    file.write_text("import os, time\n" + body)

    def look(*_: object) -> None:
        frame: FrameType | None = sys._getframe(1)
        found.extend(carried_at(places_of(frame, saved, (12, 0))))

    module = {"__name__": "__main__", "look": look, "extra": EXTRA}
    exec(compile(file.read_text(), str(file), "exec"), module)
    assert sorted(found) == sorted(wanted)


def test_what_is_told() -> None:
    assert not told([])
    assert ": a, b. Give what matters to TorchState(extra={...})" in told(["a", "b"])
    assert ": a, b, c, d, e, f and 2 more." in told(list("abcdefgh"))


def test_a_file_is_parsed_once_for_all_who_call_each_other_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which stops all other threads meanwhile."""
    file, parsed, found = tmp_path / "train.py", list[str](), list[str]()
    file.write_text("def train(n):\n    for i in range(1):\n        train(n - 1) if n else look()\ntrain(5)\n")
    parse = ast.parse

    def counted(source: str) -> ast.AST:
        parsed.append(source)
        return parse(source)

    monkeypatch.setattr(ast, "parse", counted)

    def look() -> None:
        places = places_of(sys._getframe(1), [], ())
        found.extend(carried_at(places))
        assert len(places) >= 7

    exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__", "look": look})
    assert len([one for one in parsed if one.startswith("def train")]) == 1 and not found


class Lazy:
    """As Django's SimpleLazyObject, and wrapt's proxies."""

    made = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Makes it."""
        Lazy.made = True
        return dict


def test_a_lazy_object_is_not_made() -> None:
    data, n = Lazy(), 0

    def look() -> None:
        frame = sys._getframe(1)
        assert "n" in places_of(frame, [], ())[0].lost
        PositionsOfItsOwn(frame)

    exec("n = 0\nlook()", {"__name__": "__main__", "look": look, "data": data, "n": n})
    assert not Lazy.made


def test_a_loop_without_a_source_is_none(tmp_path: Path) -> None:
    found = [0]

    def look() -> None:
        found[0] += 1
        assert carried_at(places_of(sys._getframe(1), [], ())) == []

    exec("best = 0\nfor i in range(2):\n    look()\n    best += 1", {"__name__": "__main__", "look": look})
    assert found == [2]


def test_they_are_told_once_the_source_is_read_however_long_that_takes(tmp_path: Path) -> None:
    source = "best = 0\nfor i in range(1):\n    look()\n    best += 1"
    for slow in (False, True):
        file, told_of = tmp_path / f"train-{slow}.py", list[str]()
        if slow:
            os.mkfifo(file)
        else:
            file.write_text(source)
        names = CarriedNames(told_of.append)

        def look(names: CarriedNames = names) -> None:
            names.look(sys._getframe(1), [], ())

        exec(compile(source, str(file), "exec"), {"__name__": "__main__", "look": look})
        names.wait(0.1 if slow else 60.0)
        assert names.looked and len(told_of) == (not slow)
        if slow:
            file.open("w").close()  # its reader goes on
            names.wait(60.0)
