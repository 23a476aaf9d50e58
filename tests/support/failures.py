"""What failed, in short, in the file that TESTS_FAILED names: .ci/run ends with it, where a cut log still has it.

Written at each failure, so that it is there when the run itself is killed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ENVIRON = "TESTS_FAILED"
WIDTH = 200


def note_failures(config: pytest.Config) -> None:
    """Write down what fails in this run, if somebody asked for it; not what fails in runs that its tests start."""
    path = os.environ.pop(ENVIRON, "")
    if path:
        config.pluginmanager.register(_Failures(Path(path)))


class _Failures:
    """With xdist, the process that all workers report to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(report.nodeid + ("" if report.when == "call" else f" ({report.when})"), report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(f"{report.nodeid} (collection)", report.longreprtext)

    def pytest_internalerror(self, excrepr: object) -> None:
        self._write("pytest itself", str(excrepr))

    def _write(self, what: str, text: str) -> None:
        lines = [f"FAILED {what}", *(f"    {line}" for line in shortened(text))]
        noted = "".join(f"{line[:WIDTH]}\n" for line in lines)
        try:
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(noted)
        except OSError as error:
            # A full disk, mostly, which is then why the test failed. The run goes on, and its log has the lines.
            print(f"\n{self._path}: {error}\n{noted}", file=sys.stderr, flush=True)


def shortened(text: str) -> list[str]:
    """At most five lines of a traceback: the first and last ones of what was raised, and where."""
    lines = [line for line in text.splitlines() if line.strip()]
    raised = [line[1:].strip() for line in lines if line.startswith("E  ")] or lines[-4:]
    if len(raised) > 4:
        raised = [*raised[:2], *raised[-2:]]
    return raised if not lines or lines[-1] in raised else [*raised, lines[-1]]
