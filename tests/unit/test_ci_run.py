"""What .ci/run prints last: the merge gate shows a part of the log only."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.failures import shortened

ROOT = Path(__file__).parents[2]
MAKEFILE = """
test: lint tests
lint:
\t@{lint}
tests:
\t@{tests}
"""
CONFTEST = """
from support.failures import note_failures

def pytest_configure(config):
    note_failures(config)
"""
CASES = """
import pytest

@pytest.mark.parametrize("n", range(40))
def test_sum(n):
    assert 1 + n == 3000, "three thousand"
"""
PYTEST = (
    f"PYTHONPATH={shlex.quote(f'{ROOT}/tests')} {shlex.quote(sys.executable)} -m pytest -q -p no:cacheprovider cases.py"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with this one's .ci/run, and with stubs."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / ".ci/named").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / ".ci/named").chmod(0o755)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


def started(checkout: Path, *, lint: str = "true", tests: str, **variables: str) -> subprocess.Popen[str]:
    """.ci/run with these recipes, its stdin closed."""
    (checkout / "Makefile").write_text(MAKEFILE.format(lint=lint, tests=tests))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST"))}
    command = ["sh", "-c", "exec .ci/run <&-"]
    return subprocess.Popen(
        command, cwd=checkout, env=environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ran(checkout: Path, *, lint: str = "true", tests: str, **variables: str) -> tuple[int, list[str]]:
    """Its exit code and lines."""
    with started(checkout, lint=lint, tests=tests, **variables) as run:
        output, _ = run.communicate(timeout=120)
    return run.returncode, output.splitlines()


def after_make(lines: list[str]) -> list[str]:
    [begin] = [number for number, line in enumerate(lines) if line.startswith("=== .ci/run failed")]
    return lines[begin:]


def test_failed_tests_are_named_at_the_end_with_what_they_raised(checkout: Path) -> None:
    (checkout / "cases.py").write_text(CASES)
    code, lines = ran(checkout, tests=PYTEST.replace(" -q", ""))
    end = after_make(lines)
    assert code == 2
    assert len(end) <= 50
    assert end[-1].startswith("=") and "40 failed" in end[-1]
    first = end.index("FAILED cases.py::test_sum[0]")
    assert end[first + 1 : first + 3] == ["    AssertionError: three thousand", "    assert (1 + 0) == 3000"]
    assert end[first + 3] == "    cases.py:6: AssertionError"
    named = [line for line in end if line.startswith("FAILED")]
    [more] = [line for line in end if line.startswith("... and ")]
    assert len(named) > 10
    assert more.split()[2].isdecimal()


def test_a_full_disk_does_not_end_the_run(checkout: Path) -> None:
    """What failed cannot be noted, mostly for the reason for which it failed: it did end the run, at 92 %."""
    (checkout / "cases.py").write_text(CASES)
    run = subprocess.run(
        ["sh", "-c", PYTEST],
        cwd=checkout,
        env=os.environ | {"TESTS_FAILED": "/dev/full"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "40 failed" in run.stdout and "FAILED cases.py::test_sum[39]" in run.stderr
    assert "No space left on device" in run.stderr


def test_a_failed_lint_says_again_what_it_found(checkout: Path) -> None:
    (checkout / "cases.py").write_text("def test_one():\n    pass\n")
    lint = "echo ruff found E501; exit 3"
    code, lines = ran(checkout, lint=lint, tests=f"{PYTEST} && seq 500")
    end = after_make(lines)
    assert code == 2
    assert len(end) <= 40
    assert "ruff found E501" in end
    assert any("lint] Error 3" in line for line in end)


def test_a_file_that_cannot_be_collected_is_named(checkout: Path) -> None:
    (checkout / "cases.py").write_text("import nothing_of_this_name\n")
    _, lines = ran(checkout, tests=PYTEST)
    end = after_make(lines)
    assert "FAILED cases.py (collection)" in end
    assert "    ModuleNotFoundError: No module named 'nothing_of_this_name'" in end


def test_a_step_that_is_neither_shows_what_came_before_it(checkout: Path) -> None:
    code, lines = ran(checkout, tests="echo No space left on device; false")
    assert code == 2
    assert "No space left on device" in after_make(lines)


def test_where_no_test_ran_it_fails(checkout: Path) -> None:
    code, lines = ran(checkout, tests="true")
    assert code == 1
    assert "no test ran" in after_make(lines)[0]


def test_a_run_that_passed_ends_with_the_closing_line(checkout: Path) -> None:
    (checkout / "cases.py").write_text("def test_one():\n    pass\n")
    code, lines = ran(checkout, tests=PYTEST.replace(" -q", ""), FORCE_COLOR="1", TMPDIR="/nonexistent")
    assert code == 0
    assert lines[-1].startswith("=") and "1 passed" in lines[-1]


def test_ended_from_outside_it_says_what_has_failed_so_far(checkout: Path) -> None:
    (checkout / "cases.py").write_text(
        "import time\n\ndef test_one():\n    assert not 'early'\n\n"
        "def test_two():\n    print('waits', flush=True)\n    time.sleep(300)\n"
    )
    with started(checkout, tests=f"{PYTEST} -s") as run:
        assert run.stdout is not None
        while "waits" not in run.stdout.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=120)
    end = after_make(output.splitlines())
    assert run.returncode == 143
    assert "signal from outside" in end[0]
    assert "FAILED cases.py::test_one" in end


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("worker 'gw0' crashed", ["worker 'gw0' crashed"]),
        ("E   a\nE   b\nE   c\nE   d\nE   e\n\nx.py:3: ValueError", ["a", "b", "d", "e", "x.py:3: ValueError"]),
    ],
)
def test_shortened(text: str, lines: list[str]) -> None:
    assert shortened(text) == lines
