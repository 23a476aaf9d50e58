"""How long tests take, about: a table beside this file, by which workers get their shares of a run.

`TESTS_DURATIONS=tests/support/durations.txt make test` renews it. It promises nothing: a test that it lacks, or that
takes longer now, runs all the same.
"""

from __future__ import annotations

import os
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ENVIRON = "TESTS_DURATIONS"
TABLE = Path(__file__).parent / "durations.txt"
SHOWN = 2.0
"""Seconds from which on a test stands in the table."""
BY_MARKER = {"slow": 12.0, "fault": 4.0}
"""Seconds of a test that does not."""
KIN = ("megatron", "contract/test_mindio", "fault/test_in_place")
"""Parts of the names of files."""


def seconds(test: pytest.Item) -> float:
    """How long it takes, about."""
    known = _table().get(_name(test.nodeid))
    return known or next((each for mark, each in BY_MARKER.items() if test.get_closest_marker(mark)), 0.0)


def family(test: pytest.Item) -> tuple[str, str]:
    """The files whose jobs share images and references, and its own: what tests of one file share is made once."""
    file = test.nodeid.partition("::")[0]
    return next((kin for kin in KIN if kin in file), file), file


def note_durations(config: pytest.Config) -> None:
    """Write the table anew at the end of this run, if somebody asked for it."""
    path = os.environ.pop(ENVIRON, "")
    if path:
        config.pluginmanager.register(_Durations(Path(path)))


class _Durations:
    """With xdist, the process that all workers report to."""

    def __init__(self, path: Path) -> None:
        self._path = Path.cwd() / path
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._runs: defaultdict[str, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = _name(report.nodeid)
        self._spent[name] += report.duration
        self._runs[name] += report.when == "setup"

    def pytest_sessionfinish(self) -> None:
        means = {name: spent / self._runs[name] for name, spent in self._spent.items() if self._runs[name]}
        rows = [f"{mean:.0f} {name}\n" for name, mean in sorted(means.items()) if mean >= SHOWN]
        self._path.write_text("".join(rows), encoding="utf-8")


@cache
def _table() -> dict[str, float]:
    rows = TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else []
    return {name: float(number) for number, _, name in (row.partition(" ") for row in rows)}


def _name(nodeid: str) -> str:
    return nodeid.partition("[")[0]
